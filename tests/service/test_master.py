"""The master as a pure controller: what happened goes in, what is to be done comes out."""

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.layout import attention_groups
from penstock.core.wire.engine import LEASE, AskCache, CacheDelta, Failed, LinkFailed, LinkPeer, Peer, UnlinkPeer
from penstock.core.wire.master import (
    Begun,
    Ended,
    Endpoint,
    FleetTotals,
    Join,
    Joined,
    NoPlace,
    Outcome,
    Place,
    Placed,
    Queued,
    Settled,
    Troubles,
)
from penstock.sched.cluster import DISPATCH, Later
from penstock.service.events import FromEngine, FromFrontend, Notice, ToEngine, ToFrontend
from penstock.service.instances import ChannelLost, InstanceJoined
from penstock.service.master import Master
from penstock.service.mesh import PROBATION, RELINK_AFTER
from penstock.service.policies import Policies
from penstock.service.session import DEAD_AFTER, SUSPECT_AFTER, InstanceSession
from tests.helpers.scripted import LAYOUT, ready, snapshot

INT8 = attention_groups((None,), 1, 8, "int8")


class Cluster:
    """A master with instances that are named after their roles: p0, d1, a0."""

    ROLES = {"p": "prefill", "d": "decode", "a": "any"}  # noqa: RUF012

    def __init__(self, *names, policy="least-loaded", **changes):
        endpoints = [Endpoint(n, f"ipc://{n}", self.ROLES[n[0]]) for n in names]
        self.master = Master(endpoints, Policies(dispatch=DISPATCH[policy]()), random.Random(0), incarnation=7)
        self.now, self.count = 0.0, 0
        self.started = {name: self.start(name, **changes) for name in names}

    def engine(self, name, event):
        return [a for a in self.master.tick(self.now, FromEngine(name, event)) if not isinstance(a, Notice)]

    def start(self, name, life=1, **changes):
        return self.engine(name, ready(name, life, self.ROLES[name[0]], **changes))

    def snap(self, name, sequence=1, life=1, **values):
        self.engine(name, snapshot(life, sequence, self.ROLES[name[0]], **values))

    def frontend(self, message, name="f"):
        actions = self.master.tick(self.now, FromFrontend(name, message))
        self.master.check()
        return [a.message for a in actions if isinstance(a, ToFrontend)]

    def place(self, request_id=None, tokens=10, name="f", generation=0, exclude=()):
        self.count += 1
        request_id = request_id or f"r{self.count}"
        (answer,) = self.frontend(Place(request_id, tokens, 10, [], 0, generation, 0.0, list(exclude)), name)
        return answer

    def doubt(self, *names):
        return self.master.tick(self.now, Troubles(dict.fromkeys(names, "it hangs")))

    def tick(self, seconds=0.0):
        self.now += seconds
        return [a for a in self.master.tick(self.now) if not isinstance(a, Notice)]


def peer(name, life=1):
    return Peer(name, life, "unix:/somewhere")


def test_who_hands_over_is_connected_to_whom_it_hands_over_to():
    cluster = Cluster("p0", "d0", "p1", "a0", "d1")
    told = {(a.name, a.command.peer.name) for actions in cluster.started.values() for a in actions}
    expected = {(p, d) for p in ("p0", "p1") for d in ("d0", "d1", "a0")} | {("a0", "d0"), ("a0", "d1")}
    assert told == expected
    assert all(isinstance(a.command, LinkPeer) for actions in cluster.started.values() for a in actions)


def test_a_new_incarnation_is_connected_anew_and_the_old_one_is_taken_off():
    cluster = Cluster("p0", "d0")
    assert cluster.engine("d0", ChannelLost("gone")) == [ToEngine("p0", UnlinkPeer(1, peer("d0")))]
    assert cluster.place().at("decode") is None
    assert cluster.start("d0", life=2) == [ToEngine("p0", LinkPeer(1, peer("d0", 2)))]
    assert cluster.place().at("decode") == peer("d0", 2)
    assert cluster.start("p0", life=2) == [ToEngine("p0", LinkPeer(2, peer("d0", 2)))]  # its loss was not noticed


def test_instances_without_a_transport_are_left_alone():
    cluster = Cluster("p0", "d0", address="")
    assert cluster.started == {"p0": [], "d0": []}
    assert cluster.place().at("decode") is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": replace(LAYOUT, order="token")}, "d0: order: block here, token there"),
        (
            {"layout": replace(LAYOUT, groups=INT8), "root_key": b"else"},
            "d0: kv_dtype: float32 here, int8 there; scale_bytes: 0 here, 4 there",
        ),
        ({"root_key": b"else"}, "d0: prefix keys: 726f6f74 here, 656c7365 there"),
    ],
)
def test_what_does_not_fit_is_not_paired_and_the_reason_says_why(changes, says):
    cluster = Cluster("p0", "d0")
    cluster.engine("d0", ChannelLost("gone"))
    assert cluster.start("d0", life=2, **changes) == []
    placed = cluster.place()
    assert placed.at("decode") is None
    assert placed.reason == f"no-decode: {says}"


def test_a_failed_link_is_not_used_until_it_holds_again():
    cluster = Cluster("p0", "d0", "d1")
    for name in ("p0", "d0", "d1"):
        cluster.snap(name)
    cluster.engine("p0", LinkFailed(1, peer("d0"), "refused"))
    assert {cluster.place().at("decode").name for _ in range(6)} == {"d1"}
    cluster.engine("p0", LinkFailed(1, peer("d1", 9), "of another life"))
    assert cluster.place().at("decode").name == "d1"
    assert cluster.tick(RELINK_AFTER) == [ToEngine("p0", LinkPeer(1, peer("d0")))]
    assert cluster.tick() == []
    for name in ("p0", "d0", "d1"):
        cluster.snap(name, 2)
    assert {cluster.place().at("decode").name for _ in range(6)} == {"d1"}  # on probation
    cluster.tick(PROBATION)
    assert cluster.place().at("decode").name == "d0"  # the one with less to hold


def test_what_was_just_placed_counts_at_once_and_only_until_it_is_seen():
    cluster = Cluster("a0", "a1")
    cluster.snap("a0"), cluster.snap("a1")
    burst = [cluster.place(tokens=10).route[0].peer.name for _ in range(10)]
    assert burst.count("a0") == burst.count("a1") == 5
    cluster.snap("a0", 2), cluster.snap("a0", 3)  # all was computed, none was held for long
    session = cluster.master.fleet.sessions["a0"]
    assert session.view().pending_tokens == 0
    assert cluster.master.fleet.sessions["a1"].view().pending_tokens == 50
    cluster.frontend(Ended([f"r{i}" for i in range(1, 11)]))
    assert (session.view().requests, session.view().held_tokens) == (0, 0)


def test_a_decoder_is_charged_before_it_hears_of_the_request():
    cluster = Cluster("p0", "d0", "d1")
    names = [cluster.place(tokens=10).at("decode").name for _ in range(8)]
    assert names.count("d0") == 4
    cluster.snap("d0", running_tokens=500)
    assert {cluster.place().at("decode").name for _ in range(3)} == {"d1"}


def test_silent_and_draining_instances_get_no_work():
    cluster = Cluster("a0", "a1", weights_at="tcp:there:1")
    cluster.now = SUSPECT_AFTER + 0.1
    cluster.snap("a1")
    assert {cluster.place().route[0].peer.name for _ in range(4)} == {"a1"}
    assert cluster.master.fleet.states(cluster.now) == {"a0": "suspect", "a1": "ready"}
    assert cluster.master.fleet.givers(cluster.now) == {"a1": "tcp:there:1"}
    cluster.snap("a0")
    cluster.snap("a1", 2, draining=True)
    assert {cluster.place().route[0].peer.name for _ in range(4)} == {"a0"}
    cluster.snap("a0", 2, draining=True)
    answer = cluster.place()
    assert isinstance(answer, NoPlace)
    assert "a0 draining, a1 draining" in answer.message


def test_an_instance_that_may_hang_gets_no_work_as_soon_as_its_launcher_says_so():
    cluster = Cluster("a0", "a1")
    cluster.place()
    cluster.doubt("a0")
    assert {cluster.place().route[0].peer.name for _ in range(4)} == {"a1"}
    assert cluster.master.fleet.states(cluster.now) == {"a0": "suspect", "a1": "ready"}
    cluster.doubt("a0", "a1")
    assert {cluster.place().route[0].peer.name for _ in range(4)} == {"a0"}, "both are all there is"
    cluster.doubt("a1")
    cluster.doubt()
    assert {cluster.place().route[0].peer.name for _ in range(8)} == {"a0", "a1"}


def test_what_still_runs_gets_another_place_only_where_there_is_room_and_may_be_taken_back():
    cluster = Cluster("a0", "a1", max_sequences=2)
    first = cluster.place("r", exclude=["a1"])
    assert first.route[0].peer.name == "a0"
    fillers = [cluster.place(f"f{i}", exclude=["a0"]) for i in range(2)]
    assert {placed.route[0].peer.name for placed in fillers} == {"a1"}
    cluster.doubt("a0")
    again = Place("r", 11, 9, [], generation=1, exclude=["a0"], patience=5.0, interrupted=True, hedged=True)
    assert cluster.frontend(again) == [Queued("r", 1)]
    assert cluster.frontend(Settled("r", 0, "a0")) == []  # it has come back
    assert cluster.master.waiting == 0
    cluster.tick()
    assert cluster.master.overview(cluster.now).placed == 3
    assert [key[1] for key in cluster.master.fleet.sessions["a0"].homes] == ["r"]
    again = msgspec.structs.replace(again, generation=2)
    assert cluster.frontend(again) == [Queued("r", 2)]
    cluster.frontend(Ended(["f0"]))
    (placed,) = [action.message for action in cluster.tick()]
    assert (placed.generation, placed.route[0].peer.name) == (2, "a1")
    cluster.frontend(Settled("r", 0, "a0"))  # once more, from its place
    assert [key[1] for key in cluster.master.fleet.sessions["a1"].homes] == ["f1"]
    cluster.frontend(Ended(["r"]))
    assert not cluster.master.fleet.sessions["a0"].homes


def test_what_waits_for_room_is_not_looked_at_for_every_report(monkeypatch):
    """All that an instance had may wait, where all others are full, and they report all the time."""
    cluster, looked = Cluster("a0", "a1", max_sequences=1), []
    cluster.place("f", exclude=["a0"])
    cluster.doubt("a0")
    again = Place("r", 11, 9, [], generation=1, exclude=["a0"], patience=5.0, interrupted=True, hedged=True)
    assert cluster.frontend(again) == [Queued("r", 1)]
    takes = InstanceSession.takes
    monkeypatch.setattr(InstanceSession, "takes", lambda *of: looked.append(of) or takes(*of))
    cluster.snap("a1", running=1)
    assert cluster.tick() == []
    assert not looked, "none has any"
    cluster.frontend(Ended(["f"]))
    cluster.snap("a1", 2, num_blocks=4, free_blocks=4)
    assert not looked
    (placed,) = cluster.tick()
    assert placed.message.route[0].peer.name == "a1"


def test_no_more_gets_another_place_than_there_is_room_for():
    cluster = Cluster("a0", "a1", max_sequences=2)
    for i in range(2):
        cluster.place(f"f{i}", exclude=["a0"])
    cluster.doubt("a0")
    for i in range(3):
        more = {"exclude": ["a0"], "patience": 5.0, "interrupted": True, "hedged": True}
        assert cluster.frontend(Place(f"r{i}", 11, 9, [], generation=1, **more)) == [Queued(f"r{i}", 1)]
    cluster.frontend(Ended(["f0"]))
    assert [action.message.request_id for action in cluster.tick()] == ["r0"]
    assert cluster.tick() == []
    cluster.frontend(Ended(["r0"]))
    assert [action.message.request_id for action in cluster.tick()] == ["r1"]


def test_what_still_runs_is_known_also_when_there_is_no_room_elsewhere():
    cluster = Cluster("a0", "a1", max_sequences=1)
    assert cluster.place("r", exclude=["a1"]).route[0].peer.name == "a0"
    cluster.place("f", exclude=["a0"])
    cluster.doubt("a0")
    for generation, patience in ((1, 1.0), (2, 0.0)):
        again = Place("r", 11, 9, [], 0, generation, exclude=["a0"], patience=patience, interrupted=True, hedged=True)
        assert cluster.frontend(again) == [Queued("r", generation)]
        (told,) = cluster.tick(patience + 0.1)
        assert isinstance(told.message, NoPlace)
        assert cluster.tick() == [], "it is told once"
        cluster.frontend(Settled("r", 0, "a0"))
        assert [key[1] for key in cluster.master.fleet.sessions["a0"].homes] == ["r"]
        assert (cluster.master.waiting, cluster.master.overview(cluster.now).arrivals) == (0, 2)
    cluster.frontend(msgspec.structs.replace(again, generation=3))
    cluster.engine("a0", ChannelLost("gone"))
    cluster.frontend(Settled("r", 0, "a0"))  # of which its frontend has heard, and the master has not
    assert cluster.master.waiting == 0


def test_sleeping_instances_get_no_work_until_they_are_woken_up():
    cluster = Cluster("a0", "a1")
    cluster.snap("a0", asleep=1)
    assert {cluster.place().route[0].peer.name for _ in range(4)} == {"a1"}
    cluster.snap("a1", asleep=2)
    answer = cluster.place()
    assert isinstance(answer, NoPlace)
    assert "a0 sleeping, a1 sleeping" in answer.message
    cluster.snap("a0", 2)
    assert {cluster.place().route[0].peer.name for _ in range(4)} == {"a0"}
    assert cluster.tick() == [], "none is stopped"


def test_when_all_are_silent_they_are_all_there_is_but_not_for_ever():
    cluster = Cluster("a0")
    cluster.now = SUSPECT_AFTER + 1
    assert cluster.place().route[0].peer.name == "a0"
    cluster.now = DEAD_AFTER + 1
    assert isinstance(cluster.place(), NoPlace)
    cluster.snap("a0")
    assert cluster.place().route[0].peer.name == "a0"


def test_an_instance_that_is_lost_fails_or_is_excluded_gets_nothing():
    for event in (ChannelLost("gone"), Failed("out of memory")):
        cluster = Cluster("a0", "a1")
        cluster.engine("a0", event)
        assert {cluster.place().route[0].peer.name for _ in range(4)} == {"a1"}
        assert isinstance(cluster.place(exclude=["a1"]), NoPlace)
        cluster.snap("a0")  # late, of the incarnation that is over
        assert cluster.place().route[0].peer.name == "a1"


def test_the_same_question_has_the_same_answer_and_a_new_attempt_a_new_one():
    cluster = Cluster("a0", "a1")
    first = cluster.place("r", name="f")
    assert cluster.place("r", name="f") == first
    other = cluster.place("r", name="f", generation=1, exclude=[first.route[0].peer.name])
    assert other.route[0] != first.route[0]
    assert isinstance(other, Placed)


def test_what_a_frontend_had_ends_with_it():
    cluster = Cluster("a0")
    assert cluster.frontend(Join("f", 1)) == [Joined(7, fleet=FleetTotals(instances=1))]
    cluster.place(), cluster.place(name="g")
    cluster.frontend(Join("f", 2))  # its next incarnation
    assert len(cluster.master.fleet.sessions["a0"].homes) == 1
    cluster.tick(LEASE + 0.1)
    assert len(cluster.master.fleet.sessions["a0"].homes) == 0
    cluster.master.check()


def test_the_index_follows_the_caches():
    cluster = Cluster("a0", policy="rtp_llm")
    keys = [b"1" * 16, b"2" * 16]
    assert cluster.engine("a0", CacheDelta(1, 3, keys, [])) == [ToEngine("a0", AskCache(1))]
    assert cluster.engine("a0", CacheDelta(1, 4, keys, [])) == []  # it was asked just now
    cluster.engine("a0", CacheDelta(1, 4, keys, [], whole=True))
    assert cluster.master.fleet.index.match(keys) == {"a0": 2}
    cluster.engine("a0", ChannelLost("gone"))
    assert cluster.master.fleet.index.match(keys) == {}


def test_an_instance_whose_role_changes_is_connected_anew():
    cluster = Cluster("p0", "d0")
    moved = snapshot(1, 1, "prefill")
    assert cluster.engine("d0", moved) == []
    assert cluster.place().at("decode") is None
    assert cluster.engine("p0", snapshot(1, 1, "decode")) == [ToEngine("d0", LinkPeer(1, peer("p0")))]
    placed = cluster.place()
    assert tuple(leg.peer.name for leg in placed.route) == ("d0", "p0")


def test_frontends_are_told_whether_keys_are_wanted():
    master = Cluster("a0").master
    assert not master.joined.wants_keys
    master._policies.dispatch.wants_keys = True
    wanting = Master([], master._policies, random.Random(0))
    (answer,) = wanting.tick(0.0, FromFrontend("f", Join("f")))
    assert answer.message.wants_keys


def test_a_refusal_counts_many_instances_instead_of_naming_them():
    cluster = Cluster(*(f"a{i}" for i in range(20)))
    for i in range(5):
        cluster.engine(f"a{i}", ChannelLost("gone"))
    assert "now: 5 absent, 15 ready" in cluster.place(tokens=1000).message


def test_what_is_shown_of_a_deployment():
    cluster = Cluster("p0", "d1")
    cluster.master.tick(cluster.now, InstanceJoined(Endpoint("a2", "ipc://a2", "any", state="stopped")))
    cluster.master.tick(cluster.now, InstanceJoined(Endpoint("a3", "ipc://a3")))
    cluster.snap("d1", running=3, num_blocks=4, free_blocks=1, ttft_ms=12.0, migration_queue=2)
    cluster.place("here")
    cluster.frontend(Place("patient", 10**6, 10, [], patience=5.0))
    overview = cluster.master.overview(cluster.now)
    assert (overview.placed, overview.waiting, overview.unplaceable, overview.frontends) == (1, 0, 1, 1)
    assert overview.arrivals == 1
    rows = {row.name: row for row in overview.instances}
    assert {name: row.state for name, row in rows.items()} == {
        "p0": "ready",
        "d1": "ready",
        "a2": "stopped",
        "a3": "absent",
    }
    assert (rows["p0"].role, rows["p0"].waiting, rows["p0"].pending_tokens) == ("prefill", 1, 10)
    seen = rows["d1"]
    assert (seen.running, seen.used_blocks, seen.num_blocks, seen.ttft_ms, seen.migration_queue) == (3, 3, 4, 12.0, 2)
    cluster.frontend(Ended(["here"], [Outcome("here", 10.0, None, 1.0, 5)]))
    overview = cluster.master.overview(cluster.now)
    assert (overview.placed, overview.completions, overview.attained, overview.output_tokens) == (0, 1, 1, 5)
    cluster.tick(SUSPECT_AFTER + 0.1)
    assert cluster.master.overview(cluster.now).instances[0].state == "suspect"


def test_what_a_placement_looks_at_does_not_grow_with_pairs(monkeypatch):
    cluster = Cluster(*(f"p{i}" for i in range(8)), *(f"d{i}" for i in range(8)))
    cluster.place()
    compared = []
    monkeypatch.setattr("penstock.service.mesh._mismatch", lambda *pair: compared.append(pair))
    made = []
    monkeypatch.setattr("penstock.service.session.InstanceLoad", lambda **values: made.append(values["name"]))
    cluster.master._policies.dispatch.decide = lambda view, rng: Later()
    cluster.master.tick(0.0, FromFrontend("f", Place("new", 10, 10, [])))
    assert compared == []
    assert len(made) == 2  # of the two that the placement before has changed


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: counts are right, and nobody is sent to an instance that is not there."""

    names = st.sampled_from(["p0", "p1", "d0", "d1", "a0"])

    def __init__(self):
        super().__init__()
        names = ("p0", "p1", "d0", "d1", "a0")
        self.cluster, self.incarnations = Cluster(*names), dict.fromkeys(names, 1)
        self.placed, self.born = {}, 1

    @rule(name=names)
    def die(self, name):
        self.cluster.engine(name, ChannelLost("gone"))
        self.incarnations.pop(name, None)

    @rule(name=names)
    def live(self, name):
        self.born += 1
        self.incarnations[name] = self.born
        self.cluster.start(name, self.born)

    @rule(name=names, sequence=st.integers(1, 5), tokens=st.integers(0, 100))
    def snap(self, name, sequence, tokens):
        self.cluster.snap(name, sequence, self.incarnations.get(name, 1), running_tokens=tokens, waiting_tokens=tokens)

    @rule(name=names, sequence=st.integers(1, 5), role=st.sampled_from(["any", "prefill", "decode"]))
    def move(self, name, sequence, role):
        self.cluster.engine(name, snapshot(self.incarnations.get(name, 1), sequence, role))

    @rule(source=names, other=names)
    def break_link(self, source, other):
        message = LinkFailed(self.incarnations.get(source, 1), peer(other, self.incarnations.get(other, 1)), "lost")
        self.cluster.engine(source, message)

    @rule(request=st.integers(0, 5), generation=st.integers(0, 2))
    def place(self, request, generation):
        answer = self.cluster.place(f"r{request}", generation=generation)
        known = self.placed.get(request)
        if isinstance(answer, NoPlace):
            assert not self.incarnations
            self.placed.pop(request, None)
        elif known is None or known.generation != generation:
            for leg in answer.route:
                assert self.incarnations[leg.peer.name] == leg.peer.incarnation
            self.placed[request] = answer
        else:
            assert answer == known

    @rule(doubted=st.sets(names))
    def doubt(self, doubted):
        self.cluster.doubt(*doubted)

    @rule(request=st.integers(0, 5), generation=st.integers(1, 2), name=names, back=st.booleans())
    def hedge(self, request, generation, name, back):
        """Ask for another place for one that may be on an instance that hangs, which may then go on there."""
        place = Place(f"r{request}", 10, 10, [], generation=generation, exclude=[name], patience=1.0, hedged=True)
        self.cluster.frontend(place)
        if back:
            self.cluster.frontend(Settled(f"r{request}", generation - 1, name))
        else:
            self.cluster.frontend(Ended([f"r{request}"]))
        self.placed.pop(request, None)

    @rule(request=st.integers(0, 5))
    def end(self, request):
        self.cluster.frontend(Ended([f"r{request}"]))
        self.placed.pop(request, None)

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def wait(self, seconds):
        self.cluster.frontend(Join("f", 1))
        self.cluster.tick(seconds)

    @invariant()
    def is_counted(self):
        self.cluster.master.check()
        self.cluster.master.fleet.index.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=25)


def test_a_long_sequence_goes_where_there_is_room_for_it():
    cluster = Cluster("a0", "a1", "a2")
    cluster.start("a0", life=2, max_model_len=50)
    cluster.start("a2", life=2, max_model_len=70)
    assert [cluster.place(tokens=80).route[0].peer for _ in range(4)] == [peer("a1")] * 4
    assert {cluster.place(tokens=10).route[0].peer.name for _ in range(12)} == {"a0", "a2"}


def test_what_no_instance_can_take_waits_as_long_as_it_is_patient():
    cluster = Cluster("a0", max_model_len=100)
    asked = {"long": 200, "short": 20}
    for name, tokens in asked.items():
        (answer,) = cluster.frontend(Place(name, tokens, 10, [], exclude=["a0"], patience=5.0))
        assert answer == Queued(name, 0)
        assert cluster.frontend(Place(name, tokens, 10, [], exclude=["a0"], patience=5.0)) == [Queued(name, 0)]
    assert cluster.master.waiting == 2
    assert cluster.tick(1.0) == []
    cluster.engine("a0", ChannelLost("gone"))
    ready_now = cluster.start("a0", life=2, max_model_len=100)  # this incarnation has failed none of them
    (placed,) = [a.message for a in ready_now if isinstance(a, ToFrontend)]
    assert (placed.request_id, placed.route[0].peer) == ("short", peer("a0", 2))
    cluster.snap("a0", life=2)
    assert cluster.tick(4.0) == []
    cluster.snap("a0", 2, life=2)
    (refused,) = [a.message for a in cluster.tick(0.1) if isinstance(a, ToFrontend)]
    assert isinstance(refused, NoPlace)
    assert (refused.request_id, cluster.master.waiting) == ("long", 0)
    cluster.master.check()


# --- KV that is elsewhere

KEYS = [bytes([i]) * 16 for i in range(100)]
LONG = {"max_model_len": 8192, "num_blocks": 1000, "kv_pool": "pool"}


def interrupted(cluster, keys=KEYS, exclude=(), **values):
    """The answer to one that is alone: what is sent to an instance counts as cached there."""
    cluster.frontend(Ended([f"r{cluster.count}"]))
    cluster.count += 1
    place = Place(f"r{cluster.count}", 64 * len(keys) + 5, 10, list(keys), exclude=list(exclude), **values)
    (answer,) = cluster.frontend(place)
    return answer


@pytest.mark.parametrize("policy", ["least-loaded", "rtp_llm"])
def test_what_a_lost_instance_left_in_the_kv_pool_is_remapped(policy):
    cluster = Cluster("a0", "a1", policy=policy, **LONG)
    cluster.snap("a0"), cluster.snap("a1")
    cluster.engine("a0", CacheDelta(1, 1, KEYS[:80], [], whole=True))
    cluster.engine("a1", CacheDelta(1, 1, KEYS[:10], [], whole=True))
    cluster.engine("a0", ChannelLost("killed"))
    placed = interrupted(cluster, interrupted=True)
    assert placed.route[0].peer == peer("a1")
    assert (placed.source.peer, placed.source.blocks) == (None, 80)
    assert 0 < placed.source.ms < placed.next_ms < placed.recompute_ms
    seen = cluster.master.fleet.sessions["a1"].prompts["f", "r1"]
    assert seen.tokens == 64 * 20 + 5, "no more than is left is to be computed"
    assert interrupted(cluster).source.blocks == 80, "new requests may have it, too"
    assert interrupted(cluster, [b"other" * 3 + b"!"]).source is None
    assert interrupted(cluster).next_ms is None
    cluster.start("a0", life=2, **LONG)  # the heir of what is left
    assert interrupted(cluster, exclude=["a0"], interrupted=True).source is None
    cluster.engine("a0", CacheDelta(2, 1, KEYS[:80], [], whole=True))
    answer = interrupted(cluster, exclude=["a0"], interrupted=True)
    assert (answer.source.peer, answer.source.blocks) == (peer("a0", 2), 84), (
        "and a little more, if it is there by then"
    )


@pytest.mark.parametrize(
    ("spoil", "source"),
    [
        (lambda c: None, "a0"),
        (lambda c: c.engine("a1", LinkFailed(1, peer("a0"), "refused")), None),
        (lambda c: c.snap("a1", 3, fetch_ms=1e6), None),
        (lambda c: (setattr(c, "now", SUSPECT_AFTER + 0.1), c.snap("a1", 3)), None),
        (lambda c: c.engine("a0", CacheDelta(1, 2, [], KEYS[:1])), None),
        (lambda c: c.engine("a0", ChannelLost("killed")), None),
    ],
    ids=["well", "without a link", "too slow", "suspect", "evicted", "lost"],
)
def test_what_a_peer_has_is_fetched(spoil, source):
    cluster = Cluster("p0", "a0", "a1", policy="rtp_llm", **LONG | {"kv_pool": ""})
    for name in ("p0", "a0", "a1"):
        cluster.snap(name)
    cluster.engine("a0", CacheDelta(1, 1, KEYS, [], whole=True))
    cluster.master.fleet._mesh._everybody = True
    cluster.master.fleet._mesh.connect(cluster.master.fleet.sessions["a1"])
    spoil(cluster)
    placed = interrupted(cluster, exclude=["a0", "p0"])
    assert placed.route[0].peer == peer("a1")
    assert (placed.source and placed.source.name) == source


def chain(name, count):
    return [f"{name}{i}".encode().ljust(16, b".") for i in range(count)]


def test_a_little_more_is_asked_for_than_was_known_and_lenders_take_turns():
    """A peer may have filled blocks since it told of any. Who has been told to fetch from one waits for it."""
    cluster = Cluster("a0", "a1", "a2", "a3", policy="rtp_llm", **LONG | {"kv_pool": ""})
    for name in ("a0", "a1", "a2", "a3"):
        cluster.snap(name, fetch_ms=0.5, fetch_wait_ms=1.0, free_blocks=1000)
    for holder in ("a0", "a1"):
        cluster.engine(holder, CacheDelta(1, 1, KEYS[:80], [], whole=True))
    first, second = (interrupted(cluster, exclude=["a0", "a1", other]) for other in ("a3", "a2"))
    assert (first.route[0].peer, second.route[0].peer) == (peer("a2"), peer("a3"))
    assert [first.source.peer, second.source.peer] == [peer("a0"), peer("a1")]
    assert first.source.blocks == second.source.blocks == 84
    assert first.source.ms == second.source.ms == pytest.approx(1.0 + 80 * 0.5)
    assert first.source.worth_ms > first.source.ms
    third = interrupted(cluster, exclude=["a0", "a1", "a3"])
    assert third.source.ms == pytest.approx(first.source.ms + 80 * 0.5)
    cluster.engine("a0", ChannelLost("killed"))
    assert interrupted(cluster, exclude=["a0", "a1", "a3"]).source.peer == peer("a1")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_burst_that_begins_alike_is_computed_once_and_another_one_is_spread(busy):
    names = [f"a{i}" for i in range(4)]
    for common, places in ((100, 1), (5, 4)):
        cluster = Cluster(*names, policy="unified", **LONG | {"kv_pool": ""})
        for name in names:
            cluster.snap(name, free_blocks=1000)
        before = names * busy
        for number, _ in enumerate(before):
            cluster.frontend(Place(f"before{number}", 6000, 10, chain(f"before{number}", 93)))
        assert [len(session.prompts) for session in cluster.master.fleet.sessions.values()] == [int(busy)] * 4
        burst = [KEYS[:common] + chain(f"{i} ", 100 - common) for i in range(4)]
        for i, keys in enumerate(burst):
            (said,) = cluster.frontend(Place(f"b{i}", 6405, 10, keys))
            assert isinstance(said, Queued) or not busy
        for number, _ in enumerate(before):
            cluster.frontend(Begun([f"before{number}"]))
        sessions = cluster.master.fleet.sessions
        for turn in range(1, 200):
            cluster.now = 0.02 * turn
            for name, session in sessions.items():
                cluster.snap(
                    name, turn + 1, free_blocks=1000, waiting_tokens=sum(p.tokens for p in session.prompts.values())
                )
            ends = [(k[1], p.sent + p.seconds) for session in sessions.values() for k, p in session.prompts.items()]
            cluster.frontend(Begun([name for name, end in ends if end <= cluster.now]))
        placed = cluster.master._placed.sequences
        at = {key[1]: flight.prefiller.name for key, flight in placed.items() if key[1][:2] != "be"}
        assert len(at) == 4
        assert len(set(at.values())) == places, at
