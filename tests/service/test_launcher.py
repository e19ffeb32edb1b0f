"""The processes of a deployment: their command lines, and the loop around them, with small scripts in their place."""

import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from penstock.cli.deployment import TABLES
from penstock.core.clock import ManualClock, SystemClock
from penstock.core.heartbeat import Heartbeat
from penstock.core.wire.codec import encode
from penstock.core.wire.engine import Shutdown, decode_command
from penstock.core.wire.master import HostRefused, HostTaken, StartInstance, StopInstance, decode_to_master
from penstock.service.deployment_file import parse
from penstock.service.launcher import Launcher, Registration
from penstock.service.process import TO_ALL
from penstock.service.programs import plan
from penstock.service.spawner import LocalProcess, LocalSpawner
from penstock.service.supervisor import Program, RestartPolicy, Supervisor
from tests.helpers.waiting import eventually

STAY = "trap 'exit 0' USR1; while :; do sleep 0.02; done"


@pytest.fixture(autouse=True)
def _handlers_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def shell(name, script, kind="frontend", **more):
    return Program(name=name, kind=kind, command=("/bin/sh", "-c", script), **more)


def launch(programs, drive=lambda: None, backoff=0.01, limit=3, environments=None, master=None, givers=None, **more):
    """Run until the end, while `drive` runs beside it."""
    more["registrations"] = [Registration(master=master, givers_file=givers)]
    restart = RestartPolicy(backoff=backoff, limit=limit, heartbeat_timeout=1)
    supervisor = Supervisor(programs, restart, drain_timeout=5)
    thread = threading.Thread(target=drive)
    thread.start()
    try:
        return Launcher(programs, supervisor, SystemClock(), environments or {}, **more).run()
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


def test_the_warm_pool_is_filled_while_nothing_starts(tmp_path, monkeypatch):
    path, seen = tmp_path / "master", []
    monkeypatch.setattr(LocalSpawner, "refill", lambda self, now: seen.append(path.exists()))

    def drive():
        eventually(lambda: seen)
        terminate()

    assert launch([shell("master", f"sleep 0.2; touch {path}; {STAY}", "master", socket=path)], drive, warm=1) == 0
    assert all(seen)


def test_an_engine_is_told_over_the_wire(tmp_path):
    address, heard = f"ipc://{tmp_path}/engine-0", tmp_path / "heard"
    code = f"""
import zmq, pathlib
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


def test_a_signal_to_all_is_the_launchers_alone_from_the_start(tmp_path):
    """A service manager sends SIGTERM to every process; whoever has no handler yet must not die of it either."""
    out = tmp_path / "out"

    def drive():
        eventually(out.exists)
        terminate()

    script = f"import os, pathlib, signal\nfor number in {[*map(int, TO_ALL)]}: os.kill(os.getpid(), number)\n"
    script += f"pathlib.Path({str(out)!r}).touch()\nsignal.pause()"
    process = Program(name="master", kind="master", command=(sys.executable, "-c", script))
    assert launch([process], drive, limit=0) == 0


def test_a_failure_of_our_own_leaves_no_process(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    monkeypatch.setattr(Launcher, "_look", lambda self: 1 / 0 if lines(pid) else None)
    with pytest.raises(ZeroDivisionError):
        launch([shell("master", f"echo $$ > {pid}; {STAY}", "master")])
    assert not Path(f"/proc/{lines(pid)[0]}").exists()


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch, caplog):
    """As where there are as many processes as may be. The others run on meanwhile."""
    spawn, pid, tries = LocalSpawner.spawn, tmp_path / "pid", []

    def full(self, program, now):
        if program.name == "master":
            tries.append(now)
            if len(tries) < 3:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return spawn(self, program, now)

    def drive():
        eventually(lambda: lines(pid))
        terminate()

    monkeypatch.setattr(LocalSpawner, "spawn", full)
    assert launch([shell("frontend-0", STAY), shell("master", f"echo $$ > {pid}; {STAY}", "master")], drive) == 0
    assert len(tries) == 3
    assert caplog.text.count("master could not be started: [Errno 11] Resource temporarily unavailable") == 2


def test_a_deployment_of_which_something_can_never_be_started_ends_with_the_reason(monkeypatch, caplog):
    def full(self, program, now):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(LocalSpawner, "spawn", full)
    assert launch([shell("master", STAY, "master")]) == 1
    assert "the deployment has ended: master ended 4 times in a row" in caplog.text
    assert "its last output: [Errno 11] Resource temporarily unavailable" in caplog.text


# --- command lines


def settings(deployment):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(deployment.frontends)]
    try:
        programs = plan(
            [(deployment, Path("/models/x"))],
            Path("/run/p"),
            listeners,
            lambda directory, group, n: {**group.options, "n": n},
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
    assert all(t["heartbeat"] == str(programs[name].heartbeat) for name, t in told.items())
    assert len({program.heartbeat for program in programs.values()}) == len(programs)
    assert told["kv-pool"]["path"] == told["decode-1"]["kv_pool"] == "/run/p/kv-pool"
    assert programs["kv-pool"].socket == Path("/run/p/kv-pool")
    engine = told["decode-1"]
    assert (engine["name"], engine["role"], engine["lease_s"], engine["options"]["n"]) == ("decode-1", "decode", 2, 2)
    assert engine["address"] == programs["decode-1"].address == "ipc:///run/p/decode-1"
    assert (programs["decode-1"].socket, programs["master"].socket) == (Path("/run/p/decode-1"), Path("/run/p/master"))
    faults = {"drop": 0.1, "only": ["Push"]}
    where = "unix:/run/p/decode-1.transport"
    assert engine["transport"] == {"kind": "shared", "address": where, "tls": None, "faults": faults}
    assert programs["decode-1"].role == "decode"
    (model,) = told["frontend-0"]["models"]
    assert model["master"] == told["master"]["address"]
    assert (model["options"]["names"], model["options"]["directory"]) == (["demo"], "/models/x")
    server = told["frontend-1"]["server"]
    assert (server["seed"], server["port"]) == (4, ports[1])
    assert programs["frontend-1"].descriptors == (told["frontend-1"]["listen_fd"],)
    assert programs["frontend-0"].descriptors != programs["frontend-1"].descriptors


@pytest.mark.parametrize("kind", ["tcp", "mooncake"])
def test_what_copies_blocks_takes_a_free_port(kind):
    text = f"model: demo\ninstances: [{{role: prefill}}, {{role: decode}}]\ntransport: {{kind: {kind}}}"
    told, _, _ = settings(parse("up.yaml", text, TABLES))
    assert told["decode-0"]["transport"] == {"kind": kind, "address": "tcp:127.0.0.1:0", "tls": None, "faults": None}


def test_weights_are_given_to_other_hosts_where_there_are_some():
    text = "model: demo\ninstances: [{}]\n"
    told, _, _ = settings(parse("up.yaml", text, TABLES))
    assert told["engine-0"]["weights"] == {
        "address": "unix:/run/p/engine-0.weights",
        "sockets": "/run/p/*.weights",
        "pair": "",
        "public": None,
    }
    told, _, _ = settings(parse("up.yaml", text + "cluster: {host: 127.0.0.2}", TABLES))
    public = {"address": "tcp:127.0.0.2:0", "givers": "/run/p/givers", "joins": False, "tls": None, "mooncake": ""}
    assert told["engine-0"]["weights"]["public"] == public
    told, _, _ = settings(parse("up.yaml", text + "cluster: {host: 127.0.0.2}\ntransport: {kind: mooncake}", TABLES))
    assert told["engine-0"]["weights"]["public"] == public | {"mooncake": "127.0.0.2"}
    ranks = "model: demo\ninstances: [{tensor-parallel-size: 2}]\ncluster: {host: 127.0.0.2}"
    told, _, _ = settings(parse("up.yaml", ranks, TABLES))
    assert told["engine-0"]["weights"]["public"] == public
    told, _, _ = settings(parse("up.yaml", text + "cluster: {}\nengine: {peer-weights: false}", TABLES))
    assert told["engine-0"]["weights"] is None
    told, _, _ = settings(parse("up.yaml", text + "engine: {peer-weights: gloo}", TABLES))
    assert told["engine-0"]["weights"]["pair"] == "gloo"
    gpu = "model: demo\ninstances: [{device: cuda}]\n"
    told, _, _ = settings(parse("up.yaml", gpu + "engine: {peer-weights: nccl}", TABLES))
    assert told["engine-0"]["weights"]["pair"] == "nccl"
    told, _, _ = settings(parse("up.yaml", gpu, TABLES))
    assert told["engine-0"]["weights"] is None


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


def test_whoever_hangs_is_killed_and_started_again_and_the_master_is_told(tmp_path, caplog, monkeypatch):
    """The KV pool server is stopped. Its engine, which waits for it and then ends, is not to blame."""
    monkeypatch.setattr("penstock.service.launcher.LOOK_CLOSELY", 0.1)
    pool, pids, engines = tmp_path / "kv-pool", tmp_path / "pids", tmp_path / "engines"
    heard = []

    def drive():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{tmp_path}/master")
            eventually(lambda: lines(engines))
            os.kill(int(lines(pids)[0]), signal.SIGSTOP)
            while not heard or not heard[-1].troubles:
                heard.append(decode_to_master(router.recv_multipart()[-1]))
            os.kill(int(lines(engines)[0]), signal.SIGKILL)
            eventually(lambda: len(lines(engines)) == 2)
            while heard[-1].troubles:
                heard.append(decode_to_master(router.recv_multipart()[-1]))
        terminate()

    server = shell("kv-pool", f"touch {pool}; echo $$ >> {pids}; {STAY}", "kv_pool", socket=pool)
    server = replace(server, heartbeat=tmp_path / "kv-pool.heartbeat")
    user = shell("engine-0", f"echo $$ >> {engines}; {STAY}", "engine", needs="kv-pool")
    more = {"limit": 1, "backoff": 0.5, "master": f"ipc://{tmp_path}/master"}  # half a second without it is told
    assert launch([server, user], drive, **more) == 0
    assert "kv-pool is killed: it hangs: no heartbeat for" in caplog.text
    assert "a signal has stopped it" in caplog.text
    assert "kv-pool ended with SIGKILL (no heartbeat for" in caplog.text
    assert "engine-0 ended with SIGKILL because of kv-pool" in caplog.text
    assert "engine-0 is killed" not in caplog.text, "it had ended before"
    said = [said.troubles["engine-0"] for said in heard if said.troubles]
    assert said[0].startswith("kv-pool hangs: no heartbeat for")
    assert any(text.startswith("kv-pool ended with SIGKILL") for text in said)


def test_whoever_ends_with_what_it_needs_is_not_to_blame_whichever_is_found_first(tmp_path, caplog):
    pool, pids, engines = tmp_path / "kv-pool", tmp_path / "pids", tmp_path / "engines"

    def drive():
        for life in range(1, 5):
            eventually(lambda life=life: len(lines(engines)) == life)
            os.kill(int(lines(engines)[-1]), signal.SIGKILL)
            os.kill(int(lines(pids)[-1]), signal.SIGKILL)
        eventually(lambda: len(lines(engines)) == 5)
        terminate()

    server = shell("kv-pool", f"echo $$ >> {pids}; touch {pool}; {STAY}", "kv_pool", socket=pool)
    user = shell("engine-0", f"echo $$ >> {engines}; {STAY}", "engine", needs="kv-pool")
    assert launch([server, user], drive, limit=4) == 0
    assert caplog.text.count("engine-0 ended with SIGKILL because of kv-pool") == 4


def test_who_was_stopped_together_with_the_launcher_does_not_hang(tmp_path, caplog, monkeypatch):
    """A suspended machine: when all go on, nobody has beaten for a long time."""
    beats = tmp_path / "heartbeat"
    process = shell("master", STAY, "master", heartbeat=beats)
    Heartbeat(tmp_path / "model").beat()
    clock = ManualClock()

    def drive():
        eventually(lambda: not beats.exists() and launched)
        beats.write_bytes((tmp_path / "model").read_bytes())
        for _ in range(5):  # nobody looks for a minute, time and again
            looks = len(launched)
            clock.advance(60)
            eventually(lambda looks=looks: len(launched) > looks + 1)
        terminate()

    launched, look = [], Launcher._look
    monkeypatch.setattr(Launcher, "_look", lambda self: launched.append(look(self)) or launched[-1])
    supervisor = Supervisor([process], RestartPolicy(backoff=1, limit=0, heartbeat_timeout=1), drain_timeout=5)
    thread = threading.Thread(target=drive)
    thread.start()
    assert Launcher([process], supervisor, clock, {}).run() == 0
    thread.join()
    assert "hangs" not in caplog.text


def test_a_process_that_ignores_its_end_is_killed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("penstock.service.supervisor.STOP_GRACE", 0.2)
    pid = tmp_path / "pid"

    def drive():
        eventually(lambda: lines(pid))
        terminate()

    script = f"trap '' USR1; echo $$ > {pid}; while :; do sleep 0.02; done"
    assert launch([shell("master", script, "master")], drive) == 0
    assert "master is killed: it did not end in time" in caplog.text
    assert not Path(f"/proc/{lines(pid)[0]}").exists()


def test_instances_are_registered_and_started_and_stopped_as_the_master_says(tmp_path, monkeypatch):
    """An engine in whose place is a script that reads nothing in its first life, and is killed, and in its second ends
    when it is told to, over the wire: once, since what the first was told is not for it."""
    monkeypatch.setattr("penstock.service.supervisor.STOP_GRACE", 0.2)
    address, socket_path, states = f"ipc://{tmp_path}/engine-0", tmp_path / "engine-0", []
    heard = tmp_path / "heard"
    code = f"""
import pathlib, time, zmq
heard = pathlib.Path({str(heard)!r})
if not heard.exists():
    heard.write_text("")
    pathlib.Path({str(socket_path)!r}).write_text("")
    time.sleep(60)
router = zmq.Context().socket(zmq.ROUTER)
router.bind({address!r})
with heard.open("a") as file:
    while router.poll(100 if file.tell() else None):
        file.write(f"{{router.recv_multipart()[-1]}}\\n")
"""
    command = (sys.executable, "-c", code)
    engine = Program(name="engine-0", kind="engine", command=command, address=address, socket=socket_path, starts=False)

    def drive():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{tmp_path}/master")
            router.setsockopt(zmq.RCVTIMEO, 20_000)

            def hear(state):
                while not states or states[-1] != state:
                    sender, report = router.recv_multipart()
                    (endpoint,) = decode_to_master(report).instances
                    states.append(endpoint.state)
                return sender

            sender = hear("stopped")
            for _ in range(2):
                router.send_multipart([sender, encode(StartInstance("engine-0", "any"))])
                hear("running")
                eventually(socket_path.exists)
                router.send_multipart([sender, encode(StopInstance("nobody"))])
                router.send_multipart([sender, encode(StopInstance("engine-0"))])
                hear("stopped")
                socket_path.unlink(missing_ok=True)
        terminate()

    assert launch([shell("frontend-0", STAY), engine], drive, master=f"ipc://{tmp_path}/master") == 0
    assert states.count("running") >= 2
    assert lines(heard) == [str(encode(Shutdown()))]


class Elsewhere:
    """A spawner of engines whose places are known when they run, as those of other machines are."""

    def __init__(self, folder, timeout):
        self.folder, self.timeout = folder, timeout
        self.spawned, self.released = [], []

    def spawn(self, program, now):
        number = len(self.spawned)
        address, socket = f"ipc://{self.folder}/life-{number}", self.folder / f"life-{number}"
        code = f"import zmq; s = zmq.Context().socket(zmq.ROUTER); s.bind({address!r}); s.recv_multipart()"
        there = replace(program, command=(sys.executable, "-c", code), socket=socket)
        process = LocalProcess(there, None, self.timeout, now)
        process.is_up, process.found = self._finds(process, address), process.is_up
        self.spawned.append(process)
        return process

    def _finds(self, process, address):
        def is_up():
            if process.found():
                process.endpoint = address
            return process.found()

        return is_up

    def refill(self, now):
        pass

    def release(self, name):
        self.released.append((name, len(self.spawned)))

    def close(self):
        self.released.append("all")


def test_engines_may_run_elsewhere_and_what_was_kept_for_one_is_released_when_it_does_not_come_back(tmp_path):
    """It is registered where it is, once that is known, and is stopped there."""
    engine = Program(name="engine-0", kind="engine", command=(), address="", socket=tmp_path / "nowhere")
    spare = Program(name="engine-1", kind="engine", command=(), address="", socket=tmp_path / "nor-here", starts=False)
    elsewhere, seen = Elsewhere(tmp_path, 5), []

    def drive():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{tmp_path}/master")
            router.setsockopt(zmq.RCVTIMEO, 20_000)

            def hear(*wanted):
                while not seen or seen[-1] != {"engine-1": ("", "stopped")} | dict(wanted):
                    sender, report = router.recv_multipart()
                    seen.append({e.name: (e.address, e.state) for e in decode_to_master(report).instances})
                return sender

            hear(("engine-0", (f"ipc://{tmp_path}/life-0", "running")))
            elsewhere.spawned[0].kill()
            sender = hear(("engine-0", (f"ipc://{tmp_path}/life-1", "running")))
            assert not elsewhere.released
            router.send_multipart([sender, encode(StopInstance("engine-0"))])
            hear(("engine-0", (f"ipc://{tmp_path}/life-1", "stopped")))
            eventually(lambda: elsewhere.released == [("engine-0", 2)])
        terminate()

    programs = [shell("frontend-0", STAY), engine, spare]
    assert launch(programs, drive, master=f"ipc://{tmp_path}/master", engines=elsewhere) == 0
    assert [process.poll() for process in elsewhere.spawned] == [-signal.SIGKILL, 0]
    assert elsewhere.released[-1] == "all"


def test_a_master_that_goes_on_not_to_take_the_instances_ends_it(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("penstock.service.launcher.REPEAT", 0.05)
    monkeypatch.setattr("penstock.service.launcher.REFUSED_FOR", 0.2)

    def drive():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{tmp_path}/master")
            while router.poll(3000):
                sender = router.recv_multipart()[0]
                router.send_multipart([sender, encode(HostRefused("model: its checkpoint is another one"))])

    assert launch([shell("frontend-0", STAY)], drive, master=f"ipc://{tmp_path}/master") == 2
    assert "the master does not take this host's instances: model: its checkpoint is another one" in caplog.text
    assert "the deployment has ended: model: its checkpoint is another one" in caplog.text


@pytest.mark.parametrize("answers", [False, True])
def test_a_host_that_joins_says_whether_the_master_takes_it(answers, tmp_path, caplog, monkeypatch):
    """Without an answer, a secret is wrong or the address, and nobody waits for it to drain."""
    caplog.set_level(logging.INFO, "penstock.launcher")
    monkeypatch.setattr("penstock.service.launcher.SILENT", 0.2)
    monkeypatch.setattr("penstock.service.launcher.REPEAT", 0.05)
    address = f"ipc://{tmp_path}/master"

    def drive():
        eventually(lambda: f"the master at {address} does not answer" in caplog.text)
        if answers:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.bind(address)
                router.send_multipart([router.recv_multipart()[0], encode(HostTaken(givers=givers))])
                eventually(lambda: f"the master at {address} has taken this host's instances" in caplog.text)
                eventually(lambda: lines(file) == ['{"e": "tcp:there:1"}'])
        terminate()

    began = time.monotonic()
    givers, file = {"e": "tcp:there:1"}, tmp_path / "givers"
    assert launch([shell("frontend-0", STAY)], drive, master=address, drain=30.0, givers=file) == 0
    assert time.monotonic() - began < 15


def test_who_gives_weights_is_written_down_as_soon_as_the_disk_has_room(tmp_path, caplog):
    file, givers = tmp_path / "full" / "givers", {"e": "tcp:there:1"}
    supervisor = Supervisor([], RestartPolicy(backoff=1, limit=0, heartbeat_timeout=1), drain_timeout=5)
    launcher, registration = Launcher([], supervisor, SystemClock(), {}), Registration(givers_file=file)
    for _ in range(3):
        launcher._pass_on(registration, givers)
    assert caplog.text.count("are not told who gives weights") == 1
    file.parent.mkdir()
    launcher._pass_on(registration, givers)
    assert lines(file) == ['{"e": "tcp:there:1"}']
