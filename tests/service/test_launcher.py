"""The processes of a deployment: their command lines, and the loop around them, with small scripts in their place."""

import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from penstock.cli.deployment import TABLES
from penstock.core.clock import SystemClock
from penstock.core.wire.engine import Shutdown, decode_command
from penstock.service.deployment import parse
from penstock.service.launcher import Launcher, plan
from penstock.service.supervisor import Program, Restart, Supervisor
from tests.helpers.waiting import eventually

STAY = "trap 'exit 0' TERM; while :; do sleep 0.02; done"


@pytest.fixture(autouse=True)
def _handlers_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def shell(name, script, kind="frontend", **more):
    return Program(name=name, kind=kind, command=("/bin/sh", "-c", script), **more)


def launch(programs, drive=lambda: None, backoff=0.01, limit=3, environments=None):
    """Run until the end, while `drive` runs beside it."""
    supervisor = Supervisor(programs, Restart(backoff=backoff, limit=limit), drain_timeout=5)
    thread = threading.Thread(target=drive)
    thread.start()
    try:
        return Launcher(programs, supervisor, SystemClock(), environments or {}).run()
    finally:
        thread.join()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_a_killed_process_comes_back_and_a_signal_ends_all(tmp_path, caplog):
    caplog.set_level(logging.INFO, "penstock.launcher")
    pids = tmp_path / "pids"

    def drive():
        eventually(lambda: lines(pids))
        os.kill(int(lines(pids)[0]), signal.SIGKILL)
        eventually(lambda: len(lines(pids)) == 2)
        terminate()

    programs = [shell("frontend-0", f"echo $$ >> {pids}; {STAY}"), shell("master", STAY, "master")]
    assert launch(programs, drive) == 0
    told = [record.getMessage() for record in caplog.records]
    assert "frontend-0 ended with SIGKILL and starts again in 0.01 s" in told
    assert told[-1] == "stopped"
    assert told.index("frontend-0 ended with exit code 0") < told.index("master ended with exit code 0")
    for pid in lines(pids):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("code", "starts", "ended", "says"),
    [
        (7, 4, 1, "master ended 4 times in a row, the last time with exit code 7"),
        (2, 1, 2, "it cannot be served"),
    ],
)
def test_how_a_deployment_ends_by_itself(tmp_path, caplog, code, starts, ended, says):
    started = tmp_path / "started"
    master = shell("master", f"echo x >> {started}; exit {code}", "master")
    assert launch([master, shell("frontend-0", STAY)]) == ended
    assert len(lines(started)) == starts
    assert says in caplog.text


def test_exit_code_2_is_made_good_where_it_was_up_before(tmp_path, caplog):
    path, lives = tmp_path / "master", tmp_path / "lives"

    def drive():
        eventually(path.exists)
        os.kill(int(lines(lives)[0]), signal.SIGKILL)
        eventually(lambda: len(lines(lives)) == 3)
        terminate()

    script = f"echo $$ >> {lives}; [ $(wc -l < {lives}) = 2 ] && exit 2; touch {path}; {STAY}"
    assert launch([shell("master", script, "master", socket=path)], drive) == 0
    assert "master ended with exit code 2 and starts again" in caplog.text


def test_a_program_waits_for_the_socket_of_the_one_it_needs(tmp_path):
    path, order = tmp_path / "kv-pool", tmp_path / "order"
    path.touch()  # left by an earlier process, and worth nothing
    server = shell("kv-pool", f"sleep 0.2; echo kv-pool >> {order}; touch {path}; {STAY}", "kv_pool", socket=path)
    user = shell("frontend-0", f"echo user >> {order}; {STAY}", needs="kv-pool")

    def drive():
        eventually(lambda: len(lines(order)) == 2)
        terminate()

    assert launch([server, user], drive) == 0
    assert lines(order) == ["kv-pool", "user"]


def test_an_engine_is_told_over_the_wire(tmp_path):
    """It ignores signals, because those of a terminal or a service manager reach every process at once."""
    address, heard = f"ipc://{tmp_path}/engine-0", tmp_path / "heard"
    code = f"""
import signal, zmq, pathlib
signal.signal(signal.SIGTERM, signal.SIG_IGN)
router = zmq.Context().socket(zmq.ROUTER)
router.bind({address!r})
pathlib.Path({str(heard)!r}).write_bytes(b"")
pathlib.Path({str(heard)!r}).write_bytes(router.recv_multipart()[-1])
"""
    engine = Program(name="engine-0", kind="engine", command=(sys.executable, "-c", code), address=address)

    def drive():
        eventually(heard.exists)
        terminate()

    assert launch([engine], drive) == 0
    assert decode_command(heard.read_bytes()) == Shutdown()


def test_a_process_has_its_descriptors_and_environment_and_a_group_of_its_own(tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))
    out = tmp_path / "out"
    script = f"echo $WORD $(cut -d' ' -f5 /proc/$$/stat) $$ > {out}.new; "
    script += f"readlink /proc/$$/fd/{listener.fileno()} >> {out}.new; mv {out}.new {out}; {STAY}"
    program = shell("engine-0", script, "engine", descriptors=(listener.fileno(),))

    def drive():
        eventually(out.exists)
        terminate()

    with listener:
        assert launch([program], drive, environments={"engine": {**os.environ, "WORD": "hello"}}) == 0
        word, group, pid = lines(out)[0].split()
        assert word == "hello"
        assert group == pid
        assert lines(out)[1] == os.readlink(f"/proc/self/fd/{listener.fileno()}")


def test_a_failure_of_our_own_leaves_no_process(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    monkeypatch.setattr(Launcher, "_look", lambda self: 1 / 0 if lines(pid) else None)
    with pytest.raises(ZeroDivisionError):
        launch([shell("master", f"echo $$ > {pid}; {STAY}", "master")])
    assert not Path(f"/proc/{lines(pid)[0]}").exists()


# --- command lines


def settings(deployment):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(deployment.frontends)]
    try:
        programs = plan(
            deployment, Path("/models/x"), Path("/run/p"), listeners, lambda group, n: {**group.options, "n": n}
        )
        ports = [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
    assert all(p.command[:3] == (sys.executable, "-m", f"penstock.cli.{p.kind}") for p in programs)
    return {p.name: json.loads(p.command[3]) for p in programs}, {p.name: p for p in programs}, ports


def test_what_every_process_is_told():
    text = """
model: demo
seed: 3
frontends: 2
log-format: json
instances: [{role: prefill}, {role: decode, count: 2}]
transport: {lease: 2, faults: {drop: 0.1, only: [Push]}}
"""
    told, programs, ports = settings(parse("up.yaml", text, TABLES))
    assert list(told) == ["kv-pool", "prefill-0", "decode-0", "decode-1", "master", "frontend-0", "frontend-1"]
    assert all(t["parent"] == os.getpid() and t["log_format"] == "json" for t in told.values())
    assert told["kv-pool"]["path"] == told["decode-1"]["kv_pool"] == "/run/p/kv-pool"
    assert programs["kv-pool"].socket == Path("/run/p/kv-pool")
    engine = told["decode-1"]
    assert (engine["name"], engine["role"], engine["lease_s"], engine["options"]["n"]) == ("decode-1", "decode", 2, 2)
    assert engine["address"] == programs["decode-1"].address == "ipc:///run/p/decode-1"
    assert (programs["decode-1"].socket, programs["master"].socket) == (Path("/run/p/decode-1"), Path("/run/p/master"))
    faults = {"drop": 0.1, "only": ["Push"]}
    assert engine["transport"] == {"kind": "shared", "address": "unix:/run/p/decode-1.transport", "faults": faults}
    instances = [{key: told[n][key] for key in ("name", "address", "role")} for n in list(told)[1:4]]
    assert told["master"]["instances"] == told["frontend-1"]["instances"] == instances
    assert told["master"]["address"] == told["frontend-0"]["master"]
    server = told["frontend-1"]["server"]
    assert (server["names"], server["directory"], server["seed"], server["port"]) == (
        ["demo"],
        "/models/x",
        4,
        ports[1],
    )
    assert programs["frontend-1"].descriptors == (told["frontend-1"]["listen_fd"],)
    assert programs["frontend-0"].descriptors != programs["frontend-1"].descriptors


def test_tcp_takes_a_free_port():
    text = "model: demo\ninstances: [{role: prefill}, {role: decode}]\ntransport: {kind: tcp}"
    told, _, _ = settings(parse("up.yaml", text, TABLES))
    assert told["decode-0"]["transport"] == {"kind": "tcp", "address": "tcp:127.0.0.1:0", "faults": None}


def test_on_a_gpu_there_is_no_kv_pool_server_and_no_transport():
    told, programs, _ = settings(parse("up.yaml", "model: demo\ninstances: [{device: cuda}]", TABLES))
    assert list(told) == ["engine-0", "master", "frontend-0"]
    assert told["engine-0"]["kv_pool"] is None
    assert told["engine-0"]["transport"] is None
    assert programs["engine-0"].needs is None


def test_the_last_line_of_an_engine_is_told(capfd, caplog):
    script = "echo first >&2; echo 'CUDA out of memory' >&2; echo >&2; exit 3"
    assert launch([shell("engine-0", script, "engine")], limit=0) == 1
    assert "engine-0 ended once, the last time with exit code 3; its last output: CUDA out of memory" in caplog.text
    assert "first\nCUDA out of memory\n" in capfd.readouterr().err


def test_an_engine_whose_heartbeat_stops_is_killed_and_started_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("penstock.service.launcher.STILL", 0.3)
    monkeypatch.setattr("penstock.service.launcher.LOOK_CLOSELY", 0.1)
    pids = tmp_path / "pids"

    def drive():
        eventually(lambda: lines(pids))
        os.kill(int(lines(pids)[0]), signal.SIGSTOP)
        eventually(lambda: len(lines(pids)) == 2)
        terminate()

    engine = shell("engine-0", f"echo $$ >> {pids}; {STAY}", "engine", heartbeat=tmp_path / "heartbeat")
    assert launch([engine], drive) == 0
    assert "engine-0 is stuck: a signal has kept it from running" in caplog.text
    assert "engine-0 ended with SIGKILL (a signal has kept it" in caplog.text
