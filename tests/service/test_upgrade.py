"""A deployment becomes another one: what has to happen, and in which order it does, back included."""

import json
import os
import shutil
import threading
from types import SimpleNamespace

import pytest

from penstock.cli.deployment import TABLES
from penstock.core.errors import ConfigError
from penstock.service.change import Running
from penstock.service.checkpoint import DEMO, file_states, fingerprint
from penstock.service.control import ControlSocket, ask
from penstock.service.deployment_file import parse
from penstock.service.difference import difference
from penstock.service.launcher import Registration
from penstock.service.rollout import Rollout, Step
from penstock.service.supervisor import Program
from penstock.service.upgrade import Upgrades

LIMIT = 10.0


def deployment(text):
    return parse("up.yaml", "model: demo\npolicy: round_robin\n" + text, TABLES, {})


def differ(before, after, **more):
    return difference("new.yaml", deployment(before), deployment(after), **more)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("instances: [{count: 2}]", "instances: [{count: 2}]\nrestart: {}", []),
        ("instances: [{}]", "instances: [{count: 2}]", ["engine-1 is added"]),
        (
            "instances: [{count: 2}]",
            "instances: [{name: engine, max-num-seqs: 7}]",
            ["engine-0 is replaced: max-num-seqs", "engine-1 is removed"],
        ),
        (
            "instances: [{role: prefill}, {role: decode}]",
            "instances: [{name: prefill}, {role: decode}]",
            ["prefill-0 is replaced: role"],
        ),
        (
            "instances: [{}]",
            "priorities: [{priority: 1, ttft-ms: [1, 2], tpot-ms: [1, 2]}]\nlive-roles: true\ninstances: [{}]",
            ["master is started anew: live-roles, priorities"],
        ),
        (
            "instances: [{role: encode}, {role: prefill}, {role: decode}]",
            "instances: [{role: encode}, {role: prefill}, {role: decode}]\nmedia-route: EP+D",
            ["master is started anew: media-route"],
        ),
    ],
)
def test_what_has_to_happen(before, after, lines):
    assert differ(before, after).lines == lines
    assert differ(after, after).lines == []


def test_a_new_checkpoint_replaces_all():
    assert differ("instances: [{count: 2}]", "instances: [{}]", new_model=True).lines == [
        "engine-0 is replaced: model",
        "engine-1 is removed",
    ]


def test_what_ray_sets_apart_is_a_setting_and_a_new_checkpoint_is_refused():
    before, after = "launcher: ray\ninstances: [{}]", "launcher: ray\ninstances: [{cpus: 2, resources: {fast: 1}}]"
    assert differ(before, after).lines == ["engine-0 is replaced: cpus, resources"]
    with pytest.raises(
        ConfigError, match=r"^new.yaml: model: another checkpoint, allowed with launcher ray is the same"
    ):
        differ(before, before, new_model=True)


def test_what_cannot_change_is_refused_by_name():
    before = "served-model-name: a\napi-key: [one]\ntransport: {kind: shared}\ninstances: [{count: 2}]"
    after = (
        "served-model-name: b\napi-key: [two]\ntransport: {kind: tcp}\nport: 8001\nfrontends: 2\n"
        "restart: {limit: 1}\nkv-pool: {orphans: 1}\nlimits: {drain-timeout: 1}\nwarm-pool: 1\ninstances: [{count: 2}]"
    )
    with pytest.raises(ConfigError) as caught:
        differ(before, after)
    lines = str(caught.value).splitlines()
    named = {line.removeprefix("new.yaml: ").partition(":")[0] for line in lines}
    expected = {"served-model-name", "api-key", "transport", "port", "frontends", "restart", "kv-pool.orphans"}
    assert named == expected | {"drain-timeout", "warm-pool"}
    assert "new.yaml: port: 8001, allowed while the deployment runs is 8000" in lines
    assert not any("two" in line or "one" in line for line in lines if "api-key" in line), "keys are nobody's business"


def test_groups_that_share_experts_stay_as_they_are():
    unit = "{name: unit, data-parallel-size: 2, enable-expert-parallel: true"
    before = f"instances: [{unit}}}, {{}}]"
    assert differ(before, f"instances: [{unit}}}, {{max-num-seqs: 7}}]").lines == ["engine-0 is replaced: max-num-seqs"]
    says = "^new.yaml: data-parallel-size: another group, with enable-expert-parallel allowed is what it began with"
    for after in (
        f"instances: [{unit}, max-num-seqs: 7}}, {{}}]",
        f"instances: [{unit}, count: 2}}, {{}}]",
        "instances: [{}]",
    ):
        with pytest.raises(ConfigError, match=says):
            differ(before, after)
    with pytest.raises(ConfigError, match=says):
        differ(before, before, new_model=True)


def test_a_model_keeps_its_place_in_a_list_of_models():
    def listed(name):
        entry = f"{{name: {name}, served-model-name: m, model: demo, instances: [{{}}]}}"
        return parse("up.yaml", f"models: [{entry}]", TABLES, {})

    alone = parse("up.yaml", "model: demo\nserved-model-name: m\ninstances: [{}]", TABLES, {})
    for before, after, says in (
        (listed("a"), listed("b"), "models: name: b, allowed while the deployment runs is a"),
        (listed("a"), alone, "models: name: no list of them, allowed while the deployment runs is a"),
    ):
        with pytest.raises(ConfigError, match=says):
            difference("new.yaml", before, after)
    assert difference("new.yaml", listed("a"), listed("a")).lines == []


class Processes:
    """A fleet. What is in `unfit` fails its probe, what is in `hangs` never answers."""

    def __init__(self, *names, unfit=(), hangs=(), requests=2):
        self.serving, self.unfit, self.hangs = set(names), set(unfit), set(hangs)
        self.trying, self.draining, self.asked = set(), {}, requests
        self.events = []

    def start(self, program):
        self.events.append(f"start {program.name} {program.command[0]}")
        self.serving.discard(program.name)
        self.trying.add(program.name)
        self.now_is = program.command[0]

    def verdict(self, name):
        if name in self.hangs:
            return None
        return "it is unfit" if name in self.unfit or self.now_is in self.unfit else ""

    def admit(self, name):
        self.trying.remove(name)
        self.serving.add(name)

    def serves(self, name):
        return name in self.serving

    def drain(self, name):
        self.events.append(f"drain {name}")
        self.draining[name] = self.asked

    def end(self, name):
        self.events.append(f"end {name}")
        self.trying.discard(name)
        self.serving.discard(name)

    def has_gone(self, name):
        if name in self.draining:
            self.draining[name] -= 1
            if not self.draining[name]:
                del self.draining[name]
                self.serving.remove(name)
        return name not in self.serving | self.trying


def program(name, command="x"):
    return Program(name=name, kind="engine", command=(command,))


def roll(steps, fleet):
    rollout, now = Rollout(steps, LIMIT), 0.0
    while not rollout.over:
        assert now < 1000, rollout.doing
        rollout.look(now, fleet)
        assert fleet.serving - set(fleet.draining) or not rollout.done, "somebody always serves"
        now += 1.0
    assert not fleet.trying
    return rollout


PAIRS = [Step(start=program(f"{name}.1"), stop=program(name)) for name in ("a", "b")]


def test_one_at_a_time_and_the_old_one_drains_once_the_new_one_serves():
    fleet = Processes("a", "b", "z")
    rollout = roll([Step(start=program("c")), *PAIRS, Step(stop=program("z"))], fleet)
    assert not rollout.failure
    assert fleet.serving == {"a.1", "b.1", "c"}
    started = ["start c x", "start a.1 x", "drain a", "start b.1 x", "drain b", "drain z"]
    assert fleet.events == started


@pytest.mark.parametrize(
    ("trouble", "why"),
    [({"unfit": ["b.1"]}, "it is unfit"), ({"hangs": ["b.1"]}, "it did not answer a probe within 10 s")],
)
def test_all_returns_when_one_is_not_fit(trouble, why):
    fleet = Processes("a", "b", **trouble)
    rollout = roll([Step(start=program("c")), *PAIRS], fleet)
    assert rollout.failure == f"b.1 is not fit to serve ({why})"
    assert rollout.returns
    assert fleet.serving == {"a", "b"}
    assert fleet.events[-4:] == ["end b.1", "start a x", "drain a.1", "drain c"]


def test_what_cannot_be_returned_to_is_left_and_named():
    fleet = Processes("a", "b", unfit=["b.1", "a"])
    rollout = roll(PAIRS, fleet)
    assert rollout.failure == "b.1 is not fit to serve (it is unfit); a could not be returned to (it is unfit)"
    assert fleet.serving == {"a.1", "b"}


def test_one_of_a_kind_gives_its_place_and_gets_it_back():
    fleet = Processes("a", "b", "master", unfit=["new"])
    master = Step(start=program("master", "new"), stop=program("master", "old"))
    assert roll([PAIRS[0], master], fleet).failure == "master is not fit to serve (it is unfit)"
    assert fleet.serving == {"a", "b", "master"}
    assert fleet.events == ["start a.1 x", "drain a", "start master new", "start master old", "start a x", "drain a.1"]


@pytest.fixture
def asked(tmp_path):
    """Asks the launcher of a deployment in which a change could not be taken back as a whole."""
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    running = Running(
        deployment=deployment("instances: [{count: 2}]"),
        directory=model,
        digest=fingerprint(model),
        files=file_states(model),
        names={"engine-0": "engine-0.1", "engine-1": "engine-1"},
    )
    programs = {name: program(name) for name in ("engine-0", "engine-1")}
    launcher = SimpleNamespace(stopping=False, programs=programs)

    def read(question):
        return [(deployment(question["text"]), tmp_path / question.get("model", "model"))]

    def plan(wanted, names):
        return [program(name) for name in names.values()]

    models = [(Registration(), running)]
    upgrades = Upgrades(ControlSocket(tmp_path), launcher, models, read, plan, [], lambda wanted: None)
    over = threading.Event()

    def look():
        while not over.wait(0.01):
            upgrades.look(0.0)

    looking = threading.Thread(target=look)
    looking.start()
    yield lambda **question: list(ask(tmp_path, {"file": "new.yaml", "check": True, **question}))
    over.set()
    looking.join()
    upgrades.close()


def test_what_a_failed_return_has_left_is_put_right(asked):
    plan, end = asked(text="instances: [{count: 2}]")
    assert plan == {"plan": ["engine-0 is added", "engine-0 is removed"]}, "the one is not there, the other too much"
    assert end == {"over": True, "error": "", "code": 0}


def test_no_question_harms_what_runs(asked, tmp_path):
    (nonsense,) = asked()
    assert nonsense["code"] == 2
    text = "instances: [{count: 2}]"
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    (refused,) = asked(text=text, model="other")
    assert "new.yaml: model: tokenizer.json of " in refused["error"]
    weights = tmp_path / "model" / "model.safetensors"
    stat = weights.stat()
    with weights.open("r+b") as file:  # between what a fingerprint reads
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        ends = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
        file.seek(file.tell() + max(ends, key=lambda span: span[1] - span[0])[1] - 8)
        file.write(bytes(8))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint(tmp_path / "model") == fingerprint(DEMO)
    (refused,) = asked(text=text)
    assert "has changed since it was loaded" in refused["error"]
    weights.write_bytes(b"another")
    (refused,) = asked(text=text)
    assert "has changed since it was loaded: there would be nothing to return to" in refused["error"]
    assert len(asked(text="port: 1\n" + text)) == 1
