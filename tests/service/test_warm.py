"""The warm pool, with real processes: small ones that import nothing, and one that has all that an engine needs."""

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.service import warm
from penstock.service.spawner import LocalSpawner
from penstock.service.supervisor import Program
from penstock.service.warm import ENGINE, WarmPool, WarmProcess
from tests.helpers.waiting import eventually

# as cli.warm, but for what it imports: it writes what it was told, or that there was nothing
STAND_IN = """
import json, os, pathlib, socket, sys
from penstock.cli import warm
warm.prepare = lambda: None
def main(settings):
    fd = settings["public"] and socket.socket(fileno=settings["public"]["fd"]).getsockname()[1]
    words = pathlib.Path("/proc/self/cmdline").read_text().rstrip("\\0")
    whole = " ".join([sys.executable, "-m", "penstock.cli.engine", json.dumps(settings)])
    assert words == whole[: max(4000, len(words))]  # Linux shows a page of it
    told = {"pid": os.getpid(), "warm": settings["warm"], "port": fd, "stdin": os.readlink("/proc/self/fd/0")}
    print("an engine's voice", file=sys.stderr, flush=True)
    pathlib.Path(settings["out"]).write_text(json.dumps(told))
    return 3
warm.main = main
sys.exit(warm.run())
"""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(warm, "WARM", (sys.executable, "-c", STAND_IN, warm.ROOM))


@pytest.fixture
def pool(small):
    pool = WarmPool(2)
    yield pool
    pool.close()


def engine(out, **more):
    settings = {"out": str(out), "public": None, "filling": "x" * 100_000}  # more than is read at once
    return Program(name="engine-0", kind="engine", command=(*ENGINE, json.dumps(settings | more)))


def filled(pool, environment=None, now=0.0):
    """Fill it, and return its processes."""

    def full():
        pool.refill(now, environment)
        return len(pool._waiting) == 2 and all(one.is_ready() for one in pool._waiting)

    eventually(full)
    return [one.process for one in pool._waiting]


def test_one_after_another_becomes_warm_and_the_first_is_the_engine(tmp_path, small):
    spawner = LocalSpawner({}, 5.0, warm=2)
    pool = spawner._pool
    spawner.refill(0.0)
    spawner.refill(0.0)
    assert len(pool._waiting) == 1, "the second waits for the first"
    first, second = filled(pool)
    with socket.create_server(("127.0.0.1", 0)) as door:
        program = engine(tmp_path / "out", public={"address": "", "fd": door.fileno()})
        process = spawner.spawn(replace(program, descriptors=(door.fileno(),)), 0.0)
        assert process.pid == first.pid
        eventually(lambda: process.poll() is not None)
        told = json.loads((tmp_path / "out").read_text())
        assert told == {"pid": first.pid, "warm": True, "port": door.getsockname()[1], "stdin": "/dev/null"}
    assert (process.poll(), process.last_words()) == (3, "an engine's voice")
    process.close()
    assert filled(pool)[0].pid == second.pid, "only what was taken is replaced"
    left = [one.process for one in pool._waiting]
    spawner.close()
    assert [one.returncode for one in left] == [-signal.SIGKILL] * 2


def test_only_an_engine_with_the_same_environment_and_cores_is_taken_from_there(tmp_path, pool, monkeypatch):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    other = {**environment, "OMP_NUM_THREADS": "2"}
    old = filled(pool, environment)
    adopted = Program(name="engine-0", kind="engine", command=(sys.executable, "-m", "penstock.cli.adopted", "{}"))
    assert pool.take(adopted, environment) is None
    assert pool.take(engine(tmp_path / "out"), other) is None
    assert [one.returncode for one in old] == [-signal.SIGKILL] * 2, "these are of no use any more"
    new = filled(pool, other)
    assert filled(pool, environment) != new, "and are replaced before one is wanted, where it is known"
    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores | {1000})
    assert pool.take(engine(tmp_path / "out"), environment) is None


def test_who_has_ended_is_not_taken_and_is_replaced_after_a_while(tmp_path, pool, caplog):
    first, second = filled(pool)
    first.kill()
    first.wait()
    taken = pool.take(engine(tmp_path / "out"), None)
    assert taken.pid == second.pid
    taken.communicate()
    third = filled(pool)[0]
    third.kill()
    third.wait()
    pool.refill(1.0, None)
    assert "a warm process has ended, and is replaced: it said nothing" in caplog.text
    assert len(pool._waiting) == 1
    pool.refill(2.0, None)
    assert len(pool._waiting) == 1
    pool.refill(1.0 + warm.AGAIN, None)
    assert len(pool._waiting) == 2


def test_one_that_is_not_ready_is_taken_and_does_not_say_that_it_was_warm(tmp_path, pool, monkeypatch):
    late = STAND_IN.replace("lambda: None", "lambda: __import__('time').sleep(0.3)")
    monkeypatch.setattr(warm, "WARM", (sys.executable, "-c", late))
    pool.refill(0.0, None)
    process = pool.take(engine(tmp_path / "out", filling=""), None)
    process.communicate()
    assert not json.loads((tmp_path / "out").read_text())["warm"]


def test_it_ends_with_its_launcher_and_has_all_that_an_engine_imports():
    one = WarmProcess(None)
    try:
        eventually(one.is_ready, 60)
        loaded = Path(f"/proc/{one.process.pid}/maps").read_text()
        assert "libtorch_cpu" in loaded
        one._link.close()  # as the end of the launcher does
        assert one.process.wait(20) == 0
    finally:
        one.close()
