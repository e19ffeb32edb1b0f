"""A change of many hosts: launchers, the master's desk and controllers as they are; engines, links and time are not."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.deployment import TABLES
from penstock.core.clock import ManualClock
from penstock.core.errors import ConfigError
from penstock.core.wire.master import StopInstance
from penstock.service import follower, trial
from penstock.service.change import Running
from penstock.service.checkpoint import file_states, fingerprint
from penstock.service.deployment_file import parse
from penstock.service.follower import Follower
from penstock.service.joined import Target
from penstock.service.launcher import LOOK, Launcher, Registration
from penstock.service.launchers import Launchers
from penstock.service.registry import LocalRegistry
from penstock.service.supervisor import Program, RestartPolicy, Supervisor
from penstock.service.upgrade import Upgrades

STEP = 4 * LOOK
STARTS, DRAINS = 1.0, 1.0  # seconds
LIMIT = 8.0
WORLDS = []  # the last one is where probes happen
POLICY = "round_robin"
COUNT = 2  # instances of each host


class Engine:
    """An incarnation; it serves a checkpoint, which is all of its command."""

    def __init__(self, world, machine, program):
        self.world, self.machine, self.program = world, machine, program
        self.endpoint, self.since, self.code = program.address, world.clock.now(), None
        self.checkpoint = program.command[0]

    def poll(self):
        return self.code

    def is_up(self):
        return self.world.clock.now() - self.since >= STARTS

    def fit(self):
        return (self.machine.name, Path(self.checkpoint).name) not in self.world.unfit

    def trouble(self, now):
        return None

    def give_time(self, now):
        pass

    def stop(self):
        self.code = 0

    kill = close = stop

    def last_words(self):
        return ""

    def last_step(self):
        return None


class Machine:
    """A host, its launcher and its engines; also the spawner and the wire of these."""

    def __init__(self, world, name, checkpoint, joined):
        self.world, self.name, self.joined = world, name, joined
        self.engines, self.inbox = {}, []
        self.frozen_until = self.cut_until = -1.0
        deployment = self.deployment(str(checkpoint))
        names = {name: name for group in deployment.groups for name in group.instances}
        programs = self.plan([(deployment, checkpoint)], names)
        supervisor = Supervisor(programs, RestartPolicy(backoff=0.1, limit=5, heartbeat_timeout=5.0), 1.0)
        digest = fingerprint(checkpoint)
        self.registration = registration = Registration(master="m", digest=digest)
        self.launcher = launcher = Launcher(
            programs,
            supervisor,
            world.clock,
            {},
            registrations=[registration],
            drain=1.0 if joined else None,
            engines=self,
        )
        launcher._wire, launcher._host = self, f"{name}/{world.number()}"
        running = Running(
            deployment=deployment, directory=checkpoint, digest=digest, files=file_states(checkpoint), names=names
        )
        self.questions_, self.answers, self.gone = [], [], False
        if joined:
            read = lambda model, policy: (self.deployment(model, policy), Path(model))  # noqa: E731
            self.changes = Follower(launcher, registration, running, read, self.plan, lambda wanted: None)
        else:
            read = lambda question: [(self.deployment(question["model"]), Path(question["model"]))]  # noqa: E731
            models = [(registration, running)]
            self.changes = Upgrades(self, launcher, models, read, self.plan, [], lambda wanted: None)

    def deployment(self, model, policy=POLICY):
        text = f"policy: {policy}\nserved-model-name: m\ninstances: [{{name: {self.name}, count: {COUNT}}}]\n"
        text += "engine: {device: 'modelled:h200', geometry: qwen3-8b}\n"
        return parse("up.yaml", f"model: {model}\n" + text, TABLES, {})

    def plan(self, wanted, names):
        ((_, directory),) = wanted
        return [
            Program(name=p, kind="engine", command=(str(directory),), address=f"{self.name}:{p}", socket=Path("x"))
            for p in names.values()
        ]

    # a spawner

    def spawn(self, program, now):
        engine = self.engines[program.name] = Engine(self.world, self, program)
        return engine

    def refill(self, now):
        pass

    def release(self, name):
        pass

    # a wire

    def forget(self, engine):
        pass

    def tell_to_stop(self, address):
        self.engines[address.partition(":")[2]].stop()

    def report(self, master, report):
        if not self.reached or self.world.master is None:
            return False
        self.world.senders[report.host] = self
        self.world.master.hear(self.world.clock.now(), report.host.encode(), report)
        return True

    def read(self, master):
        said, self.inbox = self.inbox, []
        return said

    # a control socket, and its client

    def questions(self):
        asked, self.questions_ = self.questions_, []
        return [(self, question) for question in asked]

    def tell(self, **answer):
        self.answers.append(answer)

    def close(self):
        pass

    # what it is

    @property
    def reached(self):
        return self.world.clock.now() >= self.cut_until

    @property
    def runs(self):
        return self.world.clock.now() >= self.frozen_until

    @property
    def over(self):
        return self.launcher._supervisor.over

    def alive(self):
        return {name: engine for name, engine in self.engines.items() if engine.code is None}

    def serving(self):
        """Checkpoints, by process, of what the world may send requests to."""
        ready = self.world.ready()
        return {name: Path(engine.checkpoint).name for name, engine in self.alive().items() if name in ready}

    def step(self):
        if self.runs and not self.over:
            self.launcher.step()
            self.changes.look(self.world.clock.now())


class World:
    def __init__(self, folder, hosts=2):
        self.clock, self.folder, self.unfit = ManualClock(100.0), folder, set()
        self.senders, self.numbers, self.leaving = {}, 0, {}
        WORLDS[:] = [self]
        self.start_master()
        self.hosts = []
        self.main = Machine(self, "main", folder / "old", joined=False)
        self.hosts = [Machine(self, f"host{i}", folder / "old", joined=True) for i in range(hosts)]

    def number(self):
        self.numbers += 1
        return self.numbers

    def start_master(self):
        self.registry = LocalRegistry()
        self.master, self.master_from = Launchers(self.registry, self.tell, self.ready), 0.0

    def tell(self, sender, message):
        machine = self.senders[sender.decode()]
        if machine.reached:
            machine.inbox.append(message)  # of one that has ended nobody reads it

    def ready(self):
        running = {name for name, endpoint in self.registry.instances.items() if endpoint.state == "running"}
        return [
            name
            for machine in self.machines
            if machine.reached
            for name, engine in machine.alive().items()
            if name in running and engine.is_up()
        ]

    @property
    def machines(self):
        return [machine for machine in (self.main, *self.hosts) if not machine.over]

    def machine(self, name):
        return next(machine for machine in (self.main, *self.hosts) if machine.name == name)

    def engine(self, address):
        name, _, process = address.partition(":")
        return self.machine(name).engines.get(process)

    def step(self):
        self.clock.advance(STEP)
        now = self.clock.now()
        if self.master is None and now >= self.master_from:
            self.start_master()
        if self.master is not None:
            self.master.tick(now)
            self.registry.look(lambda name: name in self.ready())
            for name, endpoint in self.registry.instances.items():
                if endpoint.state == "leaving" and now - self.leaving.setdefault(name, now) > DRAINS:
                    self.master._tell_host_of(name, StopInstance(name))
                    del self.leaving[name]
        for machine in self.machines:
            machine.step()

    def until(self, what, seconds=200.0, watch=lambda: None):
        end = self.clock.now() + seconds
        while not what():
            assert self.clock.now() < end, self.describe()
            self.step()
            watch()

    def describe(self):
        lines = [
            f"{m.launcher._host}: {m.registration.digest[:4]} other {m.registration.other[:4]}"
            f" {m.serving()} of {set(m.alive())} {m.registration.progress} orders {m.registration.orders}"
            for m in self.machines
        ]
        return "\n".join([*lines, str(self.main.answers[-3:])])

    def settled(self):
        """All serve the same, and nothing else runs."""
        model, ready = self.main.registration.digest, self.ready()
        return self.main.changes._under_way is None and all(
            machine.registration.digest == model
            and not machine.registration.other
            and len(machine.alive()) == COUNT
            and all(name in ready for name in machine.alive())
            and {fingerprint(Path(e.checkpoint)) for e in machine.alive().values()} == {model}
            for machine in self.machines
        )

    def apply(self, name, **more):
        self.main.answers.clear()
        self.main.questions_.append({"file": "new.yaml", "model": str(self.folder / name), "limit": LIMIT, **more})

    @property
    def answer(self):
        last = self.main.answers[-1] if self.main.answers else {}
        return last if last.get("over") else None

    # trouble

    def kill_master(self):
        self.master, self.master_from = None, self.clock.now() + 1.0

    def kill_main(self, name):
        """With all of its processes; started again with another file, or the same."""
        for engine in self.main.engines.values():
            engine.kill()
        self.start_master()
        self.main = Machine(self, "main", self.folder / name, joined=False)

    def kill_host(self, number):
        for engine in self.hosts[number].engines.values():
            engine.kill()
        self.hosts[number] = Machine(self, f"host{number}", self.folder / "old", joined=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("old", "new", "other"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": "qwen3", "name": name}))
    return folder


@pytest.fixture(autouse=True)
def _probes(monkeypatch):
    class Trial:
        def __init__(self, address, secret):
            self.address = address

        @property
        def verdict(self):
            engine = WORLDS[-1].engine(self.address())
            if engine is None or not engine.is_up():
                return None
            return "" if engine.fit() else "its probe failed: nonsense"

        def close(self):
            pass

    class Introduction:
        def __init__(self, name, frontends, tls):
            self.name = name

        @property
        def known(self):
            return self.name in WORLDS[-1].ready()

        def close(self):
            pass

    monkeypatch.setattr(follower._Search, "goes_on", property(lambda search: search._thread.join()))
    monkeypatch.setattr(trial, "Trial", Trial)
    monkeypatch.setattr(trial, "Introduction", Introduction)


@pytest.fixture
def world(checkpoints):
    world = World(checkpoints)
    world.until(world.settled)
    return world


def checkpoints_of(world):
    return {name for machine in world.machines for name in machine.serving().values()}


def watched(world):
    """Fails where a host has less than it began with, or more than one instance too many runs."""
    running = sum(len(machine.alive()) for machine in world.machines)
    assert running <= COUNT * len(world.machines) + 1, world.describe()
    assert all(len(machine.serving()) >= COUNT for machine in world.machines), world.describe()


def test_all_hosts_change_one_instance_at_a_time(world):
    world.apply("new", check=True)
    world.until(lambda: world.answer)
    (told,) = [answer["plan"] for answer in world.main.answers if "plan" in answer]
    assert len(told) == 3 * COUNT
    assert checkpoints_of(world) == {"old"}, "nothing has happened"
    for wanted in ("new", "old", "new"):
        world.apply(wanted)
        world.until(lambda: world.answer, watch=lambda: watched(world))
        assert world.answer["code"] == 0, world.answer
        world.until(world.settled)
        assert checkpoints_of(world) == {wanted}


@pytest.mark.parametrize("where", ["main", "host0", "host1"])
def test_one_that_is_not_fit_on_one_host_has_all_return(world, where):
    world.unfit.add((where, "new"))
    world.apply("new")
    world.until(lambda: world.answer, watch=lambda: watched(world))
    assert world.answer["code"] == 1
    assert "its probe failed: nonsense" in world.answer["error"]
    world.until(world.settled)
    assert checkpoints_of(world) == {"old"}
    world.unfit.clear()
    world.apply("new")
    world.until(lambda: world.answer)
    assert world.answer["code"] == 0


def test_a_host_without_the_checkpoint_is_named_and_nothing_is_tried(world, monkeypatch):
    def read(model, policy):
        raise ConfigError(f"model: {model} is no folder")

    monkeypatch.setattr(world.hosts[1].changes, "_read", read)
    world.apply("new")
    world.until(lambda: world.answer)
    assert world.answer["code"] == 2
    assert re.fullmatch(r"host1/\d+: model: \S+/new is no folder", world.answer["error"])
    assert all(set(machine.alive()) == {f"{machine.name}-0", f"{machine.name}-1"} for machine in world.machines)


@pytest.mark.parametrize("begun", ["old", "new"])
def test_hosts_follow_a_deployment_that_is_begun_again_in_the_middle(world, begun):
    world.apply("new")
    world.until(lambda: "host1-0.1" in world.hosts[1].alive())
    tried = world.hosts[1].alive()["host1-0.1"]
    world.kill_main(begun)
    world.until(world.settled)
    assert len(world.machines) == 3, "nobody was refused"
    assert checkpoints_of(world) == {begun}
    assert (tried in world.hosts[1].alive().values()) == (begun == "new"), "what was on its way there goes on"


@pytest.mark.parametrize("returns", [False, True])
def test_a_host_that_is_told_another_policy_in_the_middle_turns_back(world, returns):
    machine, joined = world.hosts[1], world.main.changes._models[0].joined
    name, old = machine.launcher._host, world.folder / "old"

    def order(policy, returns=False):
        what = {"model": str(old), "digest": fingerprint(old), "policy": policy}
        joined.change(Target(prefix="", host=name, **what, returns=returns), LIMIT)

    world.until(lambda: name in joined.hosts and world.settled())
    order("unified")
    world.until(lambda: "host1-0.1" in machine.alive())
    order(POLICY, returns)
    world.until(lambda: joined.answer(name) is not None and joined.answer(name).state == "changed" and world.settled())
    assert set(machine.alive()) == {"host1-0", "host1-1"}
    assert machine.changes._running.deployment.policy == POLICY


def test_a_host_that_joins_in_the_middle_comes_after_and_a_late_one_is_refused(world):
    world.apply("new")
    world.until(lambda: "host1-0.1" in world.hosts[1].alive())
    world.hosts.append(Machine(world, "host2", world.folder / "old", joined=True))
    world.until(lambda: world.answer)
    assert world.answer["code"] == 0
    world.until(world.settled)
    assert len(world.machines) == 4
    assert checkpoints_of(world) == {"new"}
    world.hosts.append(late := Machine(world, "host3", world.folder / "old", joined=True))
    world.until(lambda: late.over)
    assert "model: its checkpoint is another one" in late.launcher._supervisor.failure
    assert world.settled()


TROUBLE = st.one_of(
    st.tuples(st.just("kill_master")),
    st.tuples(st.just("kill_main"), st.sampled_from(["old", "new"])),
    st.tuples(st.just("kill_host"), st.integers(0, 1)),
    st.tuples(st.just("cut"), st.sampled_from(["host0", "host1"]), st.floats(0.5, 15)),
    st.tuples(st.just("freeze"), st.sampled_from(["main", "host0", "host1"]), st.floats(0.5, 15)),
    st.tuples(st.just("unfit"), st.sampled_from(["main", "host0", "host1"])),
    st.tuples(st.just("kill_engine"), st.integers(0, 6)),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_fails_all_serve_the_same_in_the_end(checkpoints, data):
    world = World(checkpoints)
    world.until(world.settled)
    world.apply("new")
    for _ in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.integers(0, 150))):
            world.step()
        match data.draw(TROUBLE):
            case ("kill_master",):
                world.kill_master()
            case ("kill_main", name):
                world.kill_main(name)
            case ("kill_host", number):
                world.kill_host(number)
            case ("cut", name, seconds):
                world.machine(name).cut_until = world.clock.now() + seconds
            case ("freeze", name, seconds):
                world.machine(name).frozen_until = world.clock.now() + seconds
            case ("unfit", name):
                world.unfit.add((name, "new"))
            case ("kill_engine", number):
                alive = [engine for machine in world.machines for engine in machine.alive().values()]
                if alive:
                    alive[number % len(alive)].code = -9
    world.unfit.clear()
    for _ in range(4 * 20):
        world.step()
    world.until(world.settled, seconds=400)
    if world.answer is not None:
        assert checkpoints_of(world) == {"new" if world.answer["code"] == 0 else "old"}
