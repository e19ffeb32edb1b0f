"""What a master does with policies that let sequences wait, move instances and change their number."""

import random
from math import inf

import pytest
from msgspec import structs

from penstock.core.device import DeviceModel
from penstock.core.wire.engine import LEASE, AskCache, CacheDelta, Drain, LinkPeer, SetRole, Stopped, UnlinkPeer
from penstock.core.wire.master import (
    Begun,
    Ended,
    Endpoint,
    Join,
    NoPlace,
    Outcome,
    Place,
    Placed,
    PrefixTotals,
    Queued,
    Relocate,
    RestartInstance,
    Settled,
)
from penstock.sched.cluster import Decision, Later, Migration, Move, Scaled, SlowInstances, Start, Stop, Tally, Verdict
from penstock.sched.cluster.base import Holder
from penstock.sched.cluster.slow import BACKOFF
from penstock.sched.steptime import GEOMETRIES
from penstock.service.events import FromEngine, FromFrontend, Notice, StartInstance, StopInstance, ToEngine, ToFrontend
from penstock.service.instances import ChannelLost, InstanceJoined, InstanceLeft
from penstock.service.master import Master
from penstock.service.policies import Policies
from penstock.service.session import FleetLimits
from tests.helpers.scripted import ready, snapshot


class Held:
    """Places on an instance when told to, and remembers what it saw."""

    name, wants_keys = "held", True

    def __init__(self):
        self.to, self.at, self.moves, self.seen = None, inf, [], []
        self.breaks_at = None  # so many that wait
        self.most = inf  # that it still places
        self.open, self.home, self.prefilled, self.running, self.relieved = False, None, [], {}, []

    def decide(self, view, rng):
        self.seen.append(view)
        demands = [*view.queue, *view.offline]
        if len(demands) == self.breaks_at:
            raise RuntimeError("a bug")
        if self.to is None or not demands or not self.most:
            moves, self.moves = self.moves, []
            return Later(self.at, moves)
        self.most -= 1
        return Decision(
            key=demands[0].key,
            prefill=self.to,
            decode=None,
            policy=self.name,
            reason="told",
            costs={},
            moves=self.moves,
            open=self.open,
        )

    def migrate(self, view, prefilled):
        self.prefilled.append([(resident.demand.key[1], resident.at, resident.since) for resident in prefilled])
        if self.home is None:
            return Later(self.at)
        return Migration(key=prefilled[0].demand.key, to=self.home, reason="told: so")

    def balance(self, view, residents):
        self.running = {i.name: [r.demand.key[1] for r in residents(i.name)] for i in view.instances}
        relieved, self.relieved = self.relieved, []
        return relieved


class Scripted:
    """A role and a scaling policy that does what it is given, once."""

    name, interval, dynamic = "scripted", 1.0, True

    def __init__(self):
        self.changes, self.fleets, self.said = [], [], ()

    def decide(self, view, fleet=None):
        changes, self.changes = self.changes, []
        if fleet is None:
            return changes
        self.fleets.append(fleet)
        return Scaled(changes, self.said)


class Recorder:
    def __init__(self):
        self.told = []

    def decided(self, now, view, demand, request_id, frontend, decision):
        self.told.append(("decided", request_id, decision.prefill))

    def held(self, now, demand, request_id, frontend, later):
        self.told.append(("held", request_id, later.at))

    def moved(self, now, move):
        self.told.append(("moved", move.name))

    def scaled(self, now, verdicts):
        self.told.append(("scaled", *((verdict.role, verdict.outcome) for verdict in verdicts)))

    def relocated(self, now, at, migration):
        self.told.append(("relocated", migration.key[1], at, migration.to, migration.reason))

    def ended(self, now, request_id, frontend, outcome, refused=""):
        self.told.append(("ended", request_id, outcome and outcome.tokens))


class Cluster:
    def __init__(self, *names, roles=None, scaling=None, standby=()):
        self.policy, self.recorder, self.now = Held(), Recorder(), 0.0
        policy = self.policy
        policies = Policies(dispatch=policy, migration=policy, balance=policy, roles=roles, scaling=scaling)
        endpoints = [Endpoint(n, "", state="stopped" if n in standby else "running") for n in (*names, *standby)]
        fleet = FleetLimits(least=1, most=len(endpoints), start_seconds=2.0) if scaling is not None else None
        self.master = Master(endpoints, policies, random.Random(0), limits=fleet, recorder=self.recorder)
        for name in names:
            self.engine(name, ready(name))

    def engine(self, name, event):
        return self.did(FromEngine(name, event))

    def did(self, happening=None):
        actions = self.master.tick(self.now, happening)
        self.master.check()
        return [a for a in actions if not isinstance(a, Notice)]

    def say(self, message):
        return self.did(FromFrontend("f", message))

    def place(self, name="r", tokens=10, **more):
        return self.say(Place(name, tokens, 10, more.pop("keys", []), **more))


def messages(actions):
    return [a.message for a in actions if isinstance(a, ToFrontend)]


def test_what_has_to_wait_is_told_so_once_and_placed_when_the_policy_says():
    cluster = Cluster("a", "b")
    cluster.policy.at = 3.0
    assert messages(cluster.place("r")) == [Queued("r", 0)]
    assert cluster.master.wake == 3.0
    assert cluster.master.waiting == 1
    assert messages(cluster.place("r")) == [Queued("r", 0)]  # asked again, by a frontend that lost its connection
    assert messages(cluster.did()) == []
    cluster.policy.to = "b"
    (placed,) = messages(cluster.did())
    assert isinstance(placed, Placed)
    assert placed.route[0].peer.name == "b"
    assert cluster.master.wake == inf
    assert cluster.recorder.told == [("held", "r", 3.0), ("decided", "r", "b")]
    cluster.place("s")
    assert not cluster.master._untold


def homes(cluster):
    return {s.name: sorted(key[1] for key in s.homes) for s in cluster.master.fleet.sessions.values() if s.homes}


def test_who_decodes_is_asked_when_the_prompt_has_ended_and_until_there_is_an_answer():
    cluster = Cluster("a", "b")
    cluster.policy.to, cluster.policy.open = "a", True
    (placed,) = messages(cluster.place("r"))
    assert [(leg.stage, leg.peer and leg.peer.name) for leg in placed.route] == [("prefill", "a"), ("decode", None)]
    assert not cluster.policy.prefilled
    cluster.now, cluster.policy.at = 1.0, 2.0
    assert messages(cluster.say(Begun(["r"]))) == []
    assert cluster.policy.prefilled == [[("r", "a", 1.0)]]
    assert cluster.master.wake == 2.0
    cluster.policy.home = "b"
    (told,) = messages(cluster.did())
    assert (told.request_id, told.generation, told.peer.name, told.reason) == ("r", 0, "b", "told: so")
    assert homes(cluster) == {"b": ["r"]}
    assert cluster.recorder.told[-1] == ("relocated", "r", "a", "b", "told: so")
    assert cluster.master.wake == inf
    assert messages(cluster.did()) == [], "it was told once"
    assert messages(cluster.say(Settled("r", 1, "a"))) == []
    assert homes(cluster) == {"b": ["r"]}, "that is another attempt"
    cluster.say(Settled("r", 0, "a"))
    assert homes(cluster) == {"a": ["r"]}, "it stayed, after all"
    cluster.place("s")
    cluster.policy.home = None
    cluster.say(Begun(["s"]))
    cluster.say(Ended(["s"]))
    cluster.did()
    assert cluster.policy.prefilled[-1] == [("s", "a", 1.0)], "it is over"


def test_who_decodes_is_asked_also_when_it_goes_on_where_it_began():
    cluster = Cluster("a", "b", "c")
    for name, role in (("a", "prefill"), ("b", "prefill"), ("c", "decode")):
        cluster.engine(name, ready(name, 2, role))
    cluster.policy.to, cluster.policy.open, cluster.policy.home = "a", True, "c"
    cluster.place("r")
    cluster.policy.to = "b"
    cluster.place("r", generation=1, exclude=["a"], patience=5.0, interrupted=True, hedged=True)
    cluster.say(Settled("r", 0, "a"))
    (told,) = messages(cluster.say(Begun(["r"])))
    assert (told.generation, told.peer.name) == (0, "c")
    assert homes(cluster) == {"c": ["r"]}


def test_what_was_placed_without_a_master_that_stood_still_is_where_it_is():
    cluster = Cluster("a", "b")
    assert messages(cluster.place("waits")) == [Queued("waits", 0)]
    cluster.policy.to = "a"
    (placed,) = messages(cluster.say(Settled("waits", 0, "b"))) or [None]
    assert placed is None
    assert (cluster.master.waiting, homes(cluster)) == (0, {"b": ["waits"]})
    assert isinstance(messages(cluster.place("r"))[0], Placed)
    cluster.say(Settled("r", 0, "b"))
    assert homes(cluster) == {"b": ["r", "waits"]}
    cluster.say(Ended(["r", "waits"], [Outcome(name, 250.0, None, 50.0, 1) for name in ("r", "waits")]))
    assert not homes(cluster)


def test_what_runs_is_moved_once_at_a_time():
    cluster = Cluster("a", "b")
    cluster.policy.to = "a"
    cluster.place("r"), cluster.say(Begun(["r"])), cluster.did()
    assert cluster.policy.running == {"a": ["r"], "b": []}
    cluster.policy.relieved = [Migration(key=("f", "r"), to="b", reason="slow")]
    (told,) = messages(cluster.did())
    assert isinstance(told, Relocate)
    cluster.did()
    assert cluster.policy.running == {"a": [], "b": []}, "it is on its way"
    cluster.say(Settled("r", 0, "b"))
    cluster.did()
    assert cluster.policy.running == {"a": [], "b": ["r"]}


@pytest.mark.parametrize("state", [{"draining": True}, {"asleep": 1}])
def test_an_instance_that_drains_or_is_to_sleep_hands_over_what_it_runs(state):
    cluster = Cluster("a", "b", "c", roles=Scripted())  # all are linked with all
    cluster.policy.to = "a"
    for name in ("r", "s"):
        cluster.place(name), cluster.say(Begun([name]))
    cluster.place("t")
    cluster.engine("b", snapshot(1, 1, free_blocks=2, num_blocks=4))
    cluster.engine("c", snapshot(1, 1, free_blocks=4, num_blocks=4))
    cluster.engine("a", snapshot(1, 1, **state, running=3, num_blocks=4))
    why = "drain: a is to stop" if "draining" in state else "drain: a is to sleep"
    told = [(m.request_id, m.peer.name, m.reason) for m in messages(cluster.did())]
    assert told == [("r", "c", why), ("s", "c", why)]
    assert messages(cluster.did()) == []
    cluster.say(Settled("r", 0, "c"))
    cluster.say(Settled("s", 0, "a"))
    assert [m.request_id for m in messages(cluster.did())] == ["s"], "it stayed, and is asked for again"
    cluster.say(Begun(["t"]))
    assert [m.request_id for m in messages(cluster.did())] == ["t"]


def test_what_waits_for_a_decoder_leaves_a_draining_instance_too():
    cluster = Cluster("a", "b", roles=Scripted())
    cluster.policy.to, cluster.policy.open = "a", True
    cluster.place("r"), cluster.say(Begun(["r"]))
    cluster.engine("b", snapshot(1, 1, free_blocks=4, num_blocks=4))
    cluster.engine("a", snapshot(1, 1, draining=True, running=1, num_blocks=4))
    assert [(m.request_id, m.peer.name) for m in messages(cluster.did())] == [("r", "b")]


def test_what_was_decided_before_a_policy_fails_is_not_lost():
    cluster = Cluster("a")
    for name in ("r", "s"):
        cluster.place(name)
    cluster.policy.to, cluster.policy.breaks_at = "a", 1
    (placed,) = messages(cluster.did())
    assert placed.request_id == "r"
    assert cluster.master.wake == cluster.now
    with pytest.raises(RuntimeError, match="a bug"):
        cluster.did()
    assert cluster.master.waiting == 1


def test_a_decision_counts_before_the_next_is_made_and_until_the_first_token():
    cluster = Cluster("a")
    cluster.place("r", 30), cluster.place("s", 20, ttft_ms=500.0, tpot_ms=50.0)
    cluster.policy.to = "a"
    cluster.did()
    first, second = cluster.policy.seen[-2:]
    assert len(second.queue) == len(first.queue) - 1
    assert (second.instances[0].pending_tokens, second.instances[0].requests) == (30, 1)
    cluster.policy.to = None
    cluster.place("t")
    seen = cluster.policy.seen[-1].instances[0]
    assert (seen.prefilling, seen.decoding, seen.ttft, seen.tpot) == (2, 0, 0.5, 0.05)
    assert seen.free_at > cluster.now
    cluster.say(Begun(["r", "s"]))
    seen = cluster.policy.seen[-1].instances[0]
    assert (seen.prefilling, seen.decoding, seen.pending_tokens) == (0, 2, 0)
    assert seen.free_at <= cluster.now
    cluster.say(Ended(["s"], [Outcome("s", 400.0, 40.0, 10.0, 7)]))
    view = cluster.policy.seen[-1]
    assert (view.instances[0].requests, view.instances[0].tpot) == (1, inf)
    assert (view.rates.arrivals, view.rates.completions, view.rates.attained) == (3, 1, 1)
    assert ("ended", "s", 7) in cluster.recorder.told


def test_the_availability_is_the_latest_end_of_prefills_from_when_each_begins():
    cluster = Cluster("a")
    cluster.place("r", 30), cluster.place("s", 20), cluster.place("off", 20, offline=True)
    cluster.policy.to = "a"
    cluster.did()
    seconds = {key[1]: prompt.seconds for key, prompt in cluster.master.fleet.sessions["a"].prompts.items()}
    assert cluster.policy.seen[-1].instances[0].available_at == cluster.now + seconds["r"] + seconds["s"]
    cluster.policy.to, cluster.now = None, cluster.now + 5.0
    cluster.say(Begun(["r"]))
    cluster.place("t")
    assert cluster.policy.seen[-1].instances[0].available_at == cluster.now + seconds["s"], "s has begun only now"
    cluster.say(Begun(["s"]))
    assert cluster.policy.seen[-1].instances[0].available_at == -inf


def test_offline_work_waits_in_a_line_of_its_own():
    cluster = Cluster("a")
    cluster.place("off", offline=True), cluster.place("on")
    view = cluster.policy.seen[-1]
    assert [d.key[1] for d in view.queue] == ["on"]
    assert [d.key[1] for d in view.offline] == ["off"]
    assert cluster.master.waiting == 2
    cluster.policy.to = "a"
    cluster.did()
    cluster.policy.to = None
    cluster.place("more")
    seen = cluster.policy.seen[-1].instances[0]
    assert (seen.requests, seen.offline_requests, seen.offline_tokens) == (2, 1, 10)
    assert seen.idle_at > seen.free_at


@pytest.mark.parametrize("tell", [Ended(["r"]), ChannelLost("gone")], ids=["cancelled", "nobody-left"])
def test_what_waits_in_vain_leaves_nothing(tell):
    cluster = Cluster("a")
    cluster.place("r")
    if isinstance(tell, Ended):
        assert cluster.say(tell) == []
    else:
        cluster.engine("a", tell)
        (answer,) = messages(cluster.did())
        assert isinstance(answer, NoPlace)
    assert cluster.master.waiting == 0


def test_a_frontend_that_was_only_silent_hears_what_has_become_of_its_queue():
    cluster = Cluster("a")
    cluster.place("on"), cluster.place("off", offline=True)
    (joined,) = messages(cluster.say(Join("f", 1)))
    assert joined.waiting == 2
    cluster.now = LEASE + 0.1
    told = messages(cluster.did())
    assert [(m.request_id, type(m)) for m in told] == [("on", NoPlace), ("off", NoPlace)]
    assert cluster.master.waiting == 0
    (joined,) = messages(cluster.say(Join("f", 1)))
    assert joined.waiting == 0
    assert messages(cluster.place("on")) == [Queued("on", 0)]


def test_hits_are_what_is_cached_and_what_is_on_its_way_there():
    cluster = Cluster("a", "b")
    keys = [b"1" * 16, b"2" * 16]
    cluster.engine("b", CacheDelta(1, 1, keys[:1], [], whole=True))
    cluster.place("r", 90, keys=keys)
    assert dict(cluster.policy.seen[-1].queue[0].hits) == {"b": 64}
    cluster.policy.to = "a"
    cluster.did()
    cluster.policy.to = None
    cluster.place("s", 90, keys=keys)
    assert dict(cluster.policy.seen[-1].queue[0].hits) == {"a": 90, "b": 64}
    cluster.say(Ended(["r"]))
    cluster.place("t", 90, keys=keys)
    assert dict(cluster.policy.seen[-1].queue[-1].hits) == {"b": 64}


def test_what_waits_learns_of_what_is_placed_and_cached_meanwhile():
    cluster = Cluster("a", "b")
    keys, shared = [b"1" * 16, b"2" * 16], [b"1" * 16, b"x" * 16]
    for name, theirs in (("r", keys), ("s", shared), ("t", [b"z" * 16] * 2)):
        cluster.place(name, 90, keys=theirs)
    cluster.policy.to = "a"
    cluster.policy.most = 1
    cluster.did()

    def seen():
        return {d.key[1]: (dict(d.hits), list(d.lenders)) for d in cluster.policy.seen[-1].queue}

    assert seen() == {"s": ({"a": 64}, []), "t": ({}, [])}
    cluster.policy.to = None
    cluster.engine("b", CacheDelta(1, 1, shared, [], whole=True))
    cluster.now = 0.2
    cluster.did()
    assert seen() == {"s": ({"a": 64, "b": 90}, [Holder("b", 128)]), "t": ({}, [])}
    cluster.engine("b", CacheDelta(1, 2, [], shared))
    cluster.did()
    assert seen()["s"] == ({"a": 64}, [])
    cluster.master.check()


def test_what_lies_below_a_device_is_a_hit_that_is_to_be_loaded():
    cluster = Cluster("a", "b")
    keys = [b"1" * 16, b"2" * 16]
    cluster.engine("a", CacheDelta(1, 1, keys[:1], [], whole=True))
    cluster.engine("a", CacheDelta(1, 1, keys, [], "host", whole=True))
    cluster.engine("b", CacheDelta(1, 1, keys, [], whole=True))

    def seen(name, tokens):
        cluster.place(name, tokens, keys=keys)
        demand = cluster.policy.seen[-1].queue[-1]
        return dict(demand.hits), demand.loads

    assert seen("r", 90) == ({"a": 90, "b": 90}, {"a": {"host": 64}})
    cluster.engine("a", CacheDelta(1, 2, [], keys[:1]))
    assert seen("s", 90) == ({"a": 90, "b": 90}, {"a": {"host": 90}})  # never more than the prompt has
    cluster.policy.to = "a"
    cluster.did()  # both go there, and bring it to the device
    cluster.policy.to = None
    assert seen("t", 90) == ({"a": 90, "b": 90}, {})
    assert cluster.engine("a", CacheDelta(1, 3, [], keys, "host")) == [ToEngine("a", AskCache(1))]  # one is missing


def test_a_move_is_told_counts_at_once_and_outlives_the_instance():
    roles = Scripted()
    cluster = Cluster("a", "b", roles=roles)
    roles.changes = [Move(name="a", role="decode", reason="because")]
    assert cluster.did() == [ToEngine("a", SetRole(1, "decode", 1))]
    cluster.place()
    assert cluster.policy.seen[-1].instances[0].role == "decode"
    assert ("moved", "a") in cluster.recorder.told
    # a report from before it heard, which is told again, and one from after
    assert cluster.engine("a", snapshot(1, 1, "any")) == [ToEngine("a", SetRole(1, "decode", 1))]
    cluster.now = 0.25
    for said in (["a has role decode 250.0 ms after the decision"], []):  # once
        actions = cluster.master.tick(0.25, FromEngine("a", snapshot(1, 2, "decode", role_generation=1)))
        assert [action.text for action in actions] == said
    cluster.engine("a", ChannelLost("gone"))
    again = cluster.engine("a", ready("a", 2))
    assert ToEngine("a", SetRole(2, "decode", 1)) in again
    cluster.policy.moves = [Move(name="b", role="prefill", reason="at dispatch")]
    assert ToEngine("b", SetRole(1, "prefill", 1)) in cluster.place("s")


def test_a_new_master_counts_on_from_where_its_predecessor_was():
    """An engine passes over what an older decision was about."""
    roles = Scripted()
    cluster = Cluster("a", roles=roles)
    assert cluster.engine("a", snapshot(1, 1, "any", role_generation=6)) == []
    roles.changes = [Move(name="a", role="decode", reason="because")]
    assert cluster.did() == [ToEngine("a", SetRole(1, "decode", 7))]
    assert cluster.engine("a", snapshot(1, 2, "any", role_generation=6)) == [ToEngine("a", SetRole(1, "decode", 7))]


def test_where_roles_change_all_are_linked_with_all():
    cluster = Cluster("a", roles=Scripted())
    told = cluster.engine("b", ready("b")) if "b" in cluster.master.fleet.states(0.0) else []
    assert told == []  # it does not know b
    cluster = Cluster("a", roles=Scripted(), standby=["b"])
    told = cluster.engine("b", ready("b"))
    assert [(a.name, a.command.peer.name) for a in told if isinstance(a.command, LinkPeer)] == [("b", "a"), ("a", "b")]


def test_instances_are_started_and_drained_before_they_stop():
    scaling = Scripted()
    cluster = Cluster("a", scaling=scaling, standby=["b"])
    scaling.changes = [Start(name="b", role="any", reason="busy")]
    assert cluster.did() == [StartInstance("b", "any")]
    cluster.now = 1.0
    cluster.did()
    assert scaling.fleets[-1].starting == {"b": "any"}
    assert list(scaling.fleets[-1].absent) == []
    cluster.engine("b", ready("b"))
    cluster.policy.to = "b"
    cluster.place()
    scaling.changes, cluster.now = [Stop(name="b", reason="quiet")], 2.0
    assert cluster.did() == [ToEngine("b", Drain(1))]
    assert list(scaling.fleets[-1].lately) == [Tally(1.0, 1, 10)]
    cluster.policy.to = None
    cluster.place("s")
    assert [i.name for i in cluster.policy.seen[-1].instances] == ["a"]
    cluster.now = 3.0
    assert cluster.did() == []  # what runs there is not over
    assert scaling.fleets[-1].draining == {"b"}
    assert list(scaling.fleets[-1].lately) == [Tally(2.0, 1, 10)], "what came since the last question"
    cluster.say(Ended(["r"]))
    assert cluster.did() == [StopInstance("b")]
    cluster.engine("b", ChannelLost("stopped"))
    cluster.now = 4.0
    cluster.did()
    assert list(scaling.fleets[-1].absent) == ["b"]


def test_a_slow_instance_is_drained_started_again_and_told_of():
    cluster = Cluster("a", "b")
    cluster.master.fleet._slow, cluster.policy.to = SlowInstances(after=3.0), "b"
    cluster.place()

    def works(seconds, **speeds):
        acted = []
        for _ in range(int(2 * seconds)):
            cluster.now += 0.5
            for name, speed in speeds.items():
                life = cluster.master.fleet.sessions[name].peer.incarnation
                cluster.engine(name, snapshot(life, int(cluster.now * 2), running=1, speed=speed, num_blocks=4))
            acted += cluster.did()
        return acted

    assert works(3, a=1.0, b=0.2) == []
    seen = cluster.master.overview(cluster.now).instances
    assert [(row.speed, row.slow) for row in seen] == [
        (1.0, ""),
        (0.2, "0.20 of its model's speed, others 1.00; for 2 s"),
    ]
    assert works(1, a=1.0, b=0.2) == [ToEngine("b", Drain(1))]
    assert ("moved", "b") in cluster.recorder.told
    assert cluster.master.fleet.account.totals(cluster.now).changes == {"restart": 1}
    cluster.say(Ended(["r"]))
    assert works(7, a=1.0) == [], "it is not known to be empty"
    cluster.engine("b", snapshot(1, 99, num_blocks=4, draining=True))
    told = works(8, a=1.0)
    assert told == [RestartInstance("b", 1)] * 2, "the launcher may not have heard it"
    cluster.engine("b", Stopped(1))
    assert works(8, a=1.0) == []
    assert cluster.master.overview(cluster.now).instances[1].slow == "it is drained and started again"
    cluster.engine("b", ready("b", 2))
    assert works(1, a=1.0, b=1.0) == []
    assert cluster.master.overview(cluster.now).instances[1].slow == ""


def test_a_new_master_knows_how_often_a_slow_instance_was_restarted():
    cluster = Cluster("a", "b")
    cluster.master.fleet._slow = SlowInstances(after=1.0)
    for _ in range(2):  # launchers say so again and again
        cluster.master.fleet.recall_restart(cluster.now, "b", 2, 60.0)
    for _ in range(10):
        cluster.now += 0.5
        for name, speed in {"a": 1.0, "b": 0.2}.items():
            cluster.engine(name, snapshot(1, int(cluster.now * 2), running=1, speed=speed, num_blocks=4))
        assert cluster.did() == []
    (_, row) = cluster.master.overview(cluster.now).instances
    assert row.slow.endswith(f"it was restarted 2 times in vain, and is again in {2 * BACKOFF - 65:.0f} s")


def test_an_engine_that_was_slow_when_it_measured_its_device_is_found_beside_its_siblings():
    usual = DeviceModel(peak_flops=1e12, bandwidth=5e10, memory=1 << 30)
    shape, slow = GEOMETRIES["qwen3-8b"], usual.slowed(5.0)
    found = []
    for device, model in (("cpu", slow), ("cuda:0", slow), ("cpu", usual)):
        cluster = Cluster("a", "b")
        cluster.engine("a", ready("a", 2, device=device, device_model=usual, shape=shape))
        cluster.engine("b", ready("b", 2, device=device, device_model=model, shape=shape))
        cluster.master.fleet._slow = SlowInstances(after=1.0)
        for _ in range(10):
            cluster.now += 0.5
            for name in "ab":
                cluster.engine(name, snapshot(2, int(cluster.now * 2), running=1, speed=1.0, num_blocks=4))
            found += [(device, model is slow, action) for action in cluster.did()]
        slow_of = {row.name: row.slow for row in cluster.master.overview(cluster.now).instances}
        assert slow_of["a"] == ""
    assert found == [("cpu", True, ToEngine("b", Drain(2)))], "models of others are not measured"


def test_what_an_earlier_master_has_drained_is_started_again():
    cluster = Cluster("a", "b")
    cluster.engine("b", snapshot(1, 1, num_blocks=4, draining=True, running=1))
    assert cluster.did() == []
    cluster.engine("b", snapshot(1, 2, num_blocks=4, draining=True))
    assert cluster.did() == [RestartInstance("b")], "whatever it was to be drained for"
    assert cluster.did() == []
    cluster.did(InstanceJoined(Endpoint("b", "", state="leaving")))
    assert cluster.did() == [StopInstance("b")]


def test_what_scaling_says_costs_and_takes_is_told():
    scaling = Scripted()
    cluster = Cluster("a", scaling=scaling, standby=["b"])
    why = Verdict(role="any", serving=1, starting=0, more=1, reason="busy", outcome="budget: 1 of 1 devices are taken")
    scaling.said = [why]
    for cluster.now in (10.0, 11.0, 12.0):
        cluster.did()
    scaled = [entry for entry in cluster.recorder.told if entry[0] == "scaled"]
    assert scaled == [("scaled", ("any", why.outcome))], "once, while it says the same"
    assert cluster.did(InstanceJoined(Endpoint("b", "", state="running"))) == []
    cluster.now = 20.0
    cluster.did(InstanceJoined(Endpoint("b", "", started=7.5)))
    cluster.engine("b", structs.replace(ready("b"), weights_from="map"))
    seen = cluster.master.overview(20.0)
    assert [(stage.outcome, stage.more) for stage in seen.stages] == [(why.outcome, 1)]
    assert (seen.fleet.instances, seen.fleet.instance_seconds) == (2, 2.0 + 2 * 8.0), "since its first tick"
    assert [(start.path, start.count, start.seconds) for start in seen.fleet.starts] == [("map", 1, 7.5)]
    cluster.now = 21.0
    cluster.did()
    assert scaling.fleets[-1].start_seconds == 7.5, "as it was measured"
    cluster.did(InstanceJoined(Endpoint("b", "", given_up=True)))
    cluster.engine("b", ChannelLost("it fails"))
    cluster.now = 22.0
    cluster.did()
    assert (scaling.fleets[-1].starting, list(scaling.fleets[-1].absent)) == ({}, []), "it takes and gives nothing"


def test_nothing_is_started_or_stopped_while_an_instance_sleeps():
    scaling = Scripted()
    cluster = Cluster("a", scaling=scaling, standby=["b"])
    cluster.engine("a", snapshot(1, 1, asleep=1))
    scaling.changes = [Start(name="b", role="any", reason="nobody serves")]
    assert cluster.did() == []
    cluster.engine("a", snapshot(1, 2))
    cluster.now = 1.0
    assert cluster.did() == [StartInstance("b", "any")]


def test_instances_join_leave_and_are_drained_while_it_runs():
    cluster = Cluster("a", roles=Scripted())
    assert cluster.did(InstanceJoined(Endpoint("b", "tcp://b:1"))) == []
    told = cluster.engine("b", ready("b"))
    assert [(t.name, t.command.peer.name) for t in told] == [("b", "a"), ("a", "b")]
    cluster.policy.to = "b"
    cluster.place()
    assert cluster.did(InstanceJoined(Endpoint("b", "tcp://b:1", state="leaving"))) == [ToEngine("b", Drain(1))]
    assert cluster.did() == []  # what runs there is not over
    again = cluster.engine("b", ready("b", 2))  # it failed meanwhile, and leaves all the same
    assert ToEngine("b", Drain(2)) in again
    cluster.say(Ended(["r"]))
    assert cluster.did() == [StopInstance("b")]
    told = cluster.did(InstanceLeft("b", "its host has stopped it"))
    assert [(t.name, t.command.peer.name) for t in told if isinstance(t.command, UnlinkPeer)] == [("a", "b")]
    assert cluster.engine("b", ready("b", 3)) == []
    assert cluster.master.fleet.states(0.0) == {"a": "ready"}
    cluster.did(InstanceJoined(Endpoint("b", "tcp://b:2")))
    cluster.engine("b", ready("b", 4))
    moved = cluster.did(InstanceJoined(Endpoint("b", "tcp://b:3")))
    assert [t.name for t in moved] == ["a"]
    assert cluster.master.fleet.states(0.0) == {"a": "ready", "b": "absent"}


class Priorities:
    def __init__(self):
        self.observed, self.ahead = [], []

    def observe(self, priority, ttft, tpot, queued):
        self.observed.append((priority, ttft, tpot, queued))

    def target(self, priority, ahead):
        self.ahead.append(ahead)
        return 1.0 + priority, 0.1


def test_a_priority_is_worth_targets_where_there_are_none():
    cluster = Cluster("a")
    cluster.master._policies = Policies(dispatch=cluster.policy, priorities=Priorities())
    cluster.place("r", priority=2), cluster.place("s", priority=0), cluster.place("t", ttft_ms=700.0)
    cluster.place("u", priority=0), cluster.say(Ended(["u"]))
    targets = [(d.ttft, d.tpot) for d in cluster.policy.seen[-1].queue]
    assert targets == [(3.0, 0.1), (1.0, 0.1), (0.7, inf)]
    assert cluster.master._policies.priorities.ahead == [0, 0, 2], "t waits too, and has priority 0"
    cluster.policy.to = "a"
    placed = messages(cluster.did())
    assert [(p.ttft_ms, p.tpot_ms) for p in placed] == [(3000.0, 100.0), (1000.0, 100.0), (700.0, None)]
    cluster.say(Ended(["s"], [Outcome("s", 250.0, None, 50.0, 1)]))
    assert cluster.master._policies.priorities.observed == [(0, 0.25, None, 0.05)]


def test_what_an_ideal_cache_would_have_found_is_told_to_frontends_and_operators():
    cluster = Cluster("a", "b")
    keys = [bytes([i]) * 16 for i in range(4)]
    cluster.place("r", 200, keys=keys[:3], patience=9.0)
    cluster.place("s", 150, keys=keys[:2], patience=9.0)  # all of it came before, although it is computed nowhere
    cluster.place("s", 150, keys=keys[:2], generation=1, interrupted=True)  # again, which counts once
    cluster.engine("a", CacheDelta(1, 1, keys, [], whole=True))  # with a block that was generated
    cluster.place("t", 300, keys=keys, patience=9.0)
    (joined,) = messages(cluster.say(Join("f", 1)))
    assert joined.prefixes == PrefixTotals(650, 128 + 256)
    assert cluster.master.overview(cluster.now).prefixes == joined.prefixes


def test_what_a_disk_has_kept_is_known_and_what_a_store_has_is_not():
    cluster = Cluster("a")
    keys = [bytes([i]) * 16 for i in range(4)]
    cluster.engine("a", CacheDelta(1, 0, keys[:3], [], "disk", whole=True))
    cluster.place("r", 300, keys=keys, patience=9.0)
    assert cluster.master.prefixes == PrefixTotals(300, 192)
    cluster.did(InstanceJoined(Endpoint("b", "")))
    cluster.engine("b", ready("b", store="s", max_model_len=1000))
    assert cluster.master.prefixes == PrefixTotals(300, 192, complete=False)


def test_a_store_is_loaded_from_by_all_who_name_it():
    cluster = Cluster("c")
    for name in "ab":
        cluster.did(InstanceJoined(Endpoint(name, "")))
        cluster.engine(name, ready(name, store="s", max_model_len=1000))
    keys = [bytes([i]) * 16 for i in range(2)]
    cluster.engine("a", CacheDelta(1, 1, keys, [], "remote", whole=True))
    cluster.engine("b", snapshot(1, 1, load_ms={"remote": 7.0}))
    cluster.place("r", 200, keys=keys)
    view = cluster.policy.seen[-1]
    (demand,) = view.queue
    assert dict(demand.hits) == {"a": 128, "b": 128}
    assert demand.loads == {"a": {"remote": 128}, "b": {"remote": 128}}
    (b,) = (load for load in view.instances if load.name == "b")
    assert b.load_seconds(demand) == pytest.approx(0.014)
    cluster.engine("b", ChannelLost("gone"))
    cluster.place("s", 200, keys=keys)
    assert dict(cluster.policy.seen[-1].queue[-1].hits) == {"a": 128}
