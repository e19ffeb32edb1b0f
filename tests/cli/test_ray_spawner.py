"""Both sides of an engine that Ray runs, without Ray: the actor with a real process, and the launcher with a script of
an actor's answers."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.cli import ray_actor
from penstock.cli.ray_actor import VERSION, EngineActor, Order
from penstock.cli.ray_spawner import LOST, RayIncarnation, actor_class
from penstock.core.clock import ManualClock
from penstock.service.checkpoint import find_checkpoint, fingerprint
from penstock.service.programs import make_program
from tests.helpers.waiting import eventually

ENGINE = {"device": "modelled:h200", "geometry": "qwen3-8b", "max_model_len": 2048, "kv_blocks": 64}


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(ray_actor, "_node_address", lambda: "127.0.0.1")
    actor = EngineActor()
    yield actor
    actor.close()


def order(**more):
    settings = {"name": "engine-0", "role": "any", "options": ENGINE | {"model": "/nowhere"}, "kv_pool": None}
    settings |= {"transport": None, "log_level": "info", "log_format": "text", "shown_as": "engine-0"}
    digest = fingerprint(find_checkpoint("demo"))
    environment = {"PENSTOCK_CLUSTER_SECRET": "s", "OMP_NUM_THREADS": "1"}
    return asdict(Order(VERSION, "demo", digest, settings, environment, 5.0)) | more


def follow(actor, number, until):
    """Everything that is said until `until` holds of it."""
    lines, seen, up = [], 0, False
    while True:
        news = actor.follow(number, seen, up)
        lines += news.get("lines", [])
        if until(news):
            return news, b"".join(lines).decode()
        seen, up = news["heard"], news["up"]


def test_an_actor_runs_one_engine_after_another_at_one_address(actor):
    first = actor.start(1, order())
    assert first == actor.start(1, order()), "who asks again did not get the answer"
    news, said = follow(actor, 1, lambda news: news["up"])
    assert news["code"] is None
    assert "[engine-0]: qwen3-8b on modelled:h200: 64 blocks" in said
    assert Path(f"/proc/{first['pid']}/environ").read_text().count("OMP_NUM_THREADS=1") == 1
    os.kill(first["pid"], signal.SIGKILL)
    news, _ = follow(actor, 1, lambda news: news["code"] is not None)
    assert news["code"] == -signal.SIGKILL
    second = actor.start(2, order())
    assert second["endpoint"] == first["endpoint"]
    assert second["pid"] != first["pid"]
    assert actor.follow(1, 0, False) == {"lost": True}
    follow(actor, 2, lambda news: news["up"])
    actor.kill(1)
    assert actor.follow(2, 10, True)["code"] is None, "an order for an earlier one is none"
    actor.kill(2)
    assert follow(actor, 2, lambda news: news["code"] is not None)[0]["code"] == -signal.SIGKILL


def test_an_engine_that_cannot_be_served_brings_its_code_and_its_last_line(actor):
    wrong = order()
    wrong["settings"]["options"] = ENGINE | {"max_model_len": 1 << 30}
    assert "refused" not in actor.start(1, wrong)
    news, said = follow(actor, 1, lambda news: news["code"] is not None)
    assert news["code"] == 2
    assert "max-model-len: 1073741824" in news["last"]
    assert news["last"] in said


def test_a_warm_process_of_an_actor_becomes_its_engine(actor):
    warm = actor.warm({"environment": order()["environment"]})
    assert warm["node"] == "127.0.0.1"
    assert actor.is_warm() == {}
    first = actor.start(1, order())
    assert (first["pid"], first["warm"]) == (warm["pid"], True)
    news, said = follow(actor, 1, lambda news: news["up"] or news["code"] is not None)
    assert news["up"], said
    assert "[engine-0]: qwen3-8b on modelled:h200: 64 blocks" in said
    actor.kill(1)
    assert follow(actor, 1, lambda news: news["code"] is not None)[0]["code"] == -signal.SIGKILL
    second = actor.start(2, order())
    assert not second["warm"]
    assert second["endpoint"] == first["endpoint"]


def test_a_warm_process_that_has_ended_or_fits_no_more_is_none(actor):
    with contextlib.closing(EngineActor()) as other:
        pid = other.warm({"environment": {"OMP_NUM_THREADS": "7"}})["pid"]
        os.kill(actor.warm({"environment": order()["environment"]})["pid"], signal.SIGKILL)
        eventually(lambda: "refused" in actor.is_warm())
        assert actor.is_warm()["refused"] == "it said nothing, on Ray node 127.0.0.1"
        for each in (actor, other):
            assert not each.start(1, order())["warm"]
            follow(each, 1, lambda news: news["up"])
        assert not Path(f"/proc/{pid}").exists()


def test_an_engine_has_its_weights_from_another_of_its_deployment_on_its_node(actor):
    options = {"device": "cpu", "model": "/nowhere", "max_model_len": 256, "kv_cache_memory": 16 << 20}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "weight_cache": False}
    public = {"givers": "", "joins": False, "tls": None, "mooncake": ""}

    def runs(actor, name, **more):
        asked = order(givers={"far": "tcp:127.0.0.1:1"}, **more)
        asked["settings"] |= {
            "name": name,
            "shown_as": name,
            "options": options,
            "weights": {"pair": "", "public": public},
        }
        actor.start(1, asked)
        news, said = follow(actor, 1, lambda news: news["up"] or news["code"] is not None)
        assert news["up"], said
        return said

    with contextlib.closing(EngineActor()) as second, contextlib.closing(EngineActor()) as third:
        assert "from checkpoint" in runs(actor, "engine-0", deployment="one")
        assert "from map engine-0" in runs(second, "engine-1", deployment="one")
        said = runs(third, "engine-2", deployment="other")
        assert "weights do not come from far, others are asked: " in said
        assert "from checkpoint" in said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"digest": "of another"},
            "model: demo is another checkpoint than that of the launcher, on Ray node 127.0.0.1",
        ),
        ({"model": "/no/such"}, "model: '/no/such' is no folder; .*, on Ray node 127.0.0.1"),
    ],
)
def test_a_node_with_another_model_is_refused_by_name(actor, more, why):
    assert re.match(why, actor.start(1, order(**more))["refused"])


def test_a_node_with_another_version_or_none_is_refused_by_name(monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed (penstock[ray])")
    travels = ray.cloudpickle.dumps(actor_class())
    assert b"EngineActor" in travels, "its code is in it"
    on_node = ray.cloudpickle.loads(travels)()
    assert on_node.follow(1, 0, False) == {"lost": True}
    other = "penstock 9.9 with protocol 1"
    node = ray.util.get_node_ip_address()
    assert "refused" in on_node.is_warm()
    said = on_node.start(1, order(version=other))["refused"]
    assert on_node.warm(order(version=other)) == {"refused": said}
    assert said == f"this deployment has {other}, and Ray node {node} has {VERSION}"
    monkeypatch.setitem(sys.modules, "penstock.cli.ray_actor", None)
    said = on_node.start(1, order())["refused"]
    assert said.startswith(f"this deployment has {VERSION}, and Ray node {node} has no penstock of that version (")


class Script:
    """An actor, and what becomes of it: each question waits until `answer` or `fail`."""

    def __init__(self):
        self.asked, self.waiting, self.released = [], [], []
        self.broken = False

    def ask(self, method, *arguments):
        self.asked.append(method)
        self.waiting.append(Future())
        return self.waiting[-1]

    def find(self, program, number):
        if self.broken:
            raise RuntimeError("the head has gone")
        return self

    def answer(self, said):
        self.waiting[-1].set_result(said)

    def release(self, name):
        self.released.append(name)

    def say_if_without_room(self):
        self.asked.append("room")


@pytest.fixture
def run():
    script, clock = Script(), ManualClock()
    program = make_program("engine-0", "engine", {}, Path("/nowhere"), resources={"CPU": 1})
    made = Order(VERSION, "demo", "", {}, {}, 5.0)
    incarnation = RayIncarnation(script.find, script.release, program, 1, made, clock)
    assert incarnation.poll() is None
    return incarnation, script, clock


NEWS = {"lines": [], "heard": 0, "up": True, "code": None, "last": "", "trouble": None}


def begin(run):
    incarnation, script, _ = run
    script.answer({"endpoint": "tcp://10.0.0.2:5", "pid": 7, "node": "10.0.0.2", "warm": False})
    assert incarnation.poll() is None
    assert incarnation.endpoint == "tcp://10.0.0.2:5"
    script.answer(NEWS)
    assert incarnation.poll() is None
    assert incarnation.is_up()
    assert script.asked == ["start", "follow", "follow"]


def test_what_an_actor_says_is_what_the_launcher_knows(run):
    pytest.importorskip("ray", reason="Ray is not installed (penstock[ray])")
    begin(run)
    incarnation, script, clock = run
    script.answer(NEWS | {"trouble": ("it does nothing", True)})
    incarnation.poll()
    assert incarnation.trouble(clock.now()).hangs
    incarnation.kill()
    script.waiting[-2].set_result(NEWS | {"code": -9, "last": "the end", "up": False})
    assert incarnation.poll() == -9
    assert incarnation.last_words() == "the end"
    assert not script.released, "the actor and its devices are kept for the next one"


def test_an_actor_that_cannot_be_reached_is_suspected_and_asked_again(run):
    exceptions = pytest.importorskip("ray.exceptions", reason="Ray is not installed (penstock[ray])")
    begin(run)
    incarnation, script, clock = run
    for _ in range(20):
        script.waiting[-1].set_exception(exceptions.ActorUnavailableError("a cable", b"0" * 16))
        assert incarnation.poll() is None
        clock.advance(1.0)
        assert incarnation.poll() is None
    trouble = incarnation.trouble(clock.now())
    assert (trouble.why, trouble.hangs) == ("nothing was heard of its Ray actor for 20 s", False)
    eventually(lambda: "room" in script.asked)
    script.answer({"lost": True})
    assert incarnation.poll() == LOST, "another one has taken its place"


def test_an_actor_that_is_dead_for_good_is_replaced(run):
    exceptions = pytest.importorskip("ray.exceptions", reason="Ray is not installed (penstock[ray])")
    incarnation, script, clock = run
    dead = exceptions.ActorDiedError()
    for _ in range(2):
        assert incarnation.poll() is None
        script.waiting[-1].set_exception(dead)
        incarnation.poll()
        clock.advance(1.0)
    assert incarnation.poll() == 1
    assert "its Ray actor is dead: The actor died unexpectedly" in incarnation.last_words()
    assert script.released == ["engine-0"]


def test_where_ray_makes_no_actor_the_engine_fails_and_nothing_else(run):
    incarnation, script, clock = run
    script.broken = True
    again = RayIncarnation(script.find, script.release, incarnation._program, 2, Order("", "", "", {}, {}, 5), clock)
    assert again.poll() == 1
    assert again.last_words() == "Ray does not make an actor for it: the head has gone"


def test_who_has_not_begun_or_cannot_be_killed_is_released(run):
    incarnation, script, _ = run
    incarnation.kill()
    assert incarnation.poll() == LOST
    assert script.released == ["engine-0"]


def test_an_actor_that_does_not_kill_its_engine_is_ended(run):
    pytest.importorskip("ray", reason="Ray is not installed (penstock[ray])")
    begin(run)
    incarnation, script, clock = run
    incarnation.kill()
    assert incarnation.poll() is None
    clock.advance(3)
    assert incarnation.poll() == LOST
    assert script.released == ["engine-0"]


def test_without_ray_the_error_names_the_extra():
    code = "import sys; sys.modules['ray'] = None\nfrom penstock.cli.main import main\nsys.exit(main())"
    file = Path(__file__).parents[2] / "recipes" / "ray.yaml"
    command = [sys.executable, "-c", code, "up", str(file), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "penstock: launcher: ray needs the package ray: pip install 'penstock[ray]'\n"
