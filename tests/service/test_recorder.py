"""What the flight recorder keeps, writes and reads again."""

import dataclasses
import errno
import os
import random
import resource
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from penstock.core.clock import ManualClock
from penstock.core.errors import ConfigError
from penstock.sched.cluster import DISPATCH, ClusterView, Decision, Demand, InstanceLoad, Later, Rates, Start, Stop
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service import recorder_file
from penstock.service.history import first_token
from penstock.service.recorder import DecidedEntry, EndedEntry, FlightRecorder
from penstock.service.recorder_file import MAGIC, RecorderFile, read
from penstock.service.recording import BEST, HITS, QUEUE, WHOLE, RecordDecoder, RecordEncoder, from_bytes, to_bytes
from penstock.sim.replay import redecide, replay, spread, summary
from tests.helpers.recordings import TIMES, an_afternoon, decision, demand, load


def recorded(*entries):
    """After a way through bytes."""
    encoder = RecordEncoder()
    records = [encoder.begin(0.0, 1000.0)]
    for entry in entries:
        records += encoder.encode(entry)
    return [entry for _, entry in RecordDecoder().decode(from_bytes(to_bytes(record)) for record in records)]


# --- the ring


def test_the_ring_holds_no_more_than_it_may():
    by_decisions, by_loads = FlightRecorder(decisions=3), FlightRecorder(loads=50)
    view = ClusterView(now=0.0, instances=[load(f"e{i}") for i in range(9)])
    for number in range(100):
        for recorder in (by_decisions, by_loads):
            asked = demand(str(number))
            recorder.decided(float(number), view, asked, str(number), "f", decision(asked, "e0"))
            recorder.ended(float(number), str(number), "f", None)
    decisions = [entry for entry in by_decisions.entries if isinstance(entry, DecidedEntry)]
    assert [entry.request_id for entry in decisions] == ["97", "98", "99"]
    assert sum(entry.weight for entry in by_loads.entries) <= 50
    assert by_loads.entries[-1] == EndedEntry(99.0, "99", "f", None)
    assert by_loads.total == 200


def test_whoever_writes_sees_each_entry_once_and_is_told_what_has_gone():
    recorder = FlightRecorder(loads=4)
    for number in range(3):
        recorder.ended(float(number), str(number), "f", None)
    assert [entry.request_id for entry in recorder.since(0)] == ["0", "1", "2"]
    assert [entry.request_id for entry in recorder.since(2)] == ["2"]
    assert recorder.since(3) == []
    for number in range(3, 9):
        recorder.ended(float(number), str(number), "f", None)
    assert [entry.request_id for entry in recorder.since(3)] == ["5", "6", "7", "8"]


# --- records


def test_everything_comes_back_as_it_was():
    recorder = FlightRecorder()
    an_afternoon(recorder)
    recorder.moved(12.0, Start(name="new", role="any", reason="the queue is long"))
    recorder.moved(13.0, Stop(name="busy", reason="nobody comes"))
    again = recorded(*recorder.entries)
    assert again == list(recorder.entries)
    places = [entry for entry in again if isinstance(entry, DecidedEntry)]
    assert places[1].view.queue[1] is places[2].view.queue[0]
    assert places[0].view.instances[1] is places[2].view.instances[1]
    assert isinstance(again[-2].move, Start)
    assert isinstance(again[-1].move, Stop)


def test_a_recording_with_the_old_names_of_fields_is_read():
    recorder = FlightRecorder()
    an_afternoon(recorder)
    encoder = RecordEncoder()
    began = encoder.begin(0.0, 1000.0)
    old = {"role": "pool", "prefilling": "reading"}
    records = [replace(began, load=tuple(old.get(name, name) for name in began.load))]
    assert {"pool", "reading"} <= set(records[0].load)
    for entry in recorder.entries:
        records += encoder.encode(entry)
    again = [entry for _, entry in RecordDecoder().decode(from_bytes(to_bytes(record)) for record in records)]
    assert again == list(recorder.entries)


numbers = st.integers(0, 10**6)
seconds = st.floats(0, 1e6) | st.just(inf)


def values(kind, without):
    """Any value for each field that is a number, by the type of its default."""
    kinds = {bool: st.booleans(), int: numbers, float: seconds | st.just(-inf), str: st.text(max_size=5)}
    made = {}
    for field in fields(kind):
        if field.name not in without:
            made[field.name] = kinds.get(type(field.default), numbers)
    return st.fixed_dictionaries(made)


@settings(max_examples=50)
@given(data=st.data())
def test_any_view_comes_back_whatever_was_written_before_it(data):
    names = [f"e{i}" for i in range(4)]
    entries, known, waiting = [], {}, []
    for now in range(data.draw(st.integers(1, 5))):
        for name in data.draw(st.sets(st.sampled_from(names))):
            given_values = data.draw(values(InstanceLoad, {"name", "role", "times", "load_ms", "peers", "unlinked"}))
            factors = data.draw(st.dictionaries(st.sampled_from(["gemm", "overhead"]), st.floats(0.5, 2)))
            known[name] = InstanceLoad(
                name=name,
                times=StepTime(DEVICES[data.draw(st.sampled_from(["h200", "l4"]))], GEOMETRIES["qwen3-8b"], factors),
                load_ms=data.draw(st.dictionaries(st.sampled_from(["host", "disk"]), st.floats(0, 99))),
                peers=data.draw(st.sets(st.sampled_from(names))) & known.keys(),
                **given_values,
            )
        if not known:
            continue
        for number in range(data.draw(st.integers(0, 2))):
            fixed = {
                "key": ("f", f"{now}-{number}"),
                "hits": data.draw(st.dictionaries(st.sampled_from(names), numbers)),
            }
            tiers = st.dictionaries(st.sampled_from(["host", "disk", "remote"]), st.integers(1, 99), min_size=1)
            fixed["loads"] = {name: data.draw(tiers) for name in fixed["hits"]}
            waiting.append(
                Demand(
                    **fixed,
                    **data.draw(
                        values(Demand, {"key", "hits", "loads", "lenders", "exclude", "chat", "brought", "brought_in"})
                    ),
                )
            )
        if not waiting:
            continue
        rates = Rates(**data.draw(values(Rates, set())))
        shown = [replace(one, peers=one.peers & known.keys()) for one in known.values()]
        known = {one.name: one for one in shown}
        view = ClusterView(now=float(now), instances=tuple(shown), queue=tuple(waiting), rates=rates)
        chosen = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        choice = decision(chosen, data.draw(st.sampled_from(sorted(known))), predicted_ttft=data.draw(seconds))
        entries.append(DecidedEntry(float(now), chosen.key[1], "f", chosen, choice, view, len(shown), len(view.queue)))
    assert recorded(*entries) == entries


def test_what_does_not_change_is_not_written_again():
    view = ClusterView(now=0.0, instances=[load(f"e{i}", peers={"e0", "e1"}) for i in range(WHOLE)])
    encoder = RecordEncoder()
    encoder.begin(0.0, 0.0)
    asked = demand("r")
    entry = DecidedEntry(0.0, "r", "f", asked, decision(asked, "e0"), view, WHOLE, 1)
    first, second = encoder.encode(entry), encoder.encode(dataclasses.replace(entry, demand=demand("r")))
    assert len(first) > 2 * WHOLE
    assert [type(record).__name__ for record in second] == ["DemandRecord", "DecidedRecord"]
    changed = replace(view, instances=[replace(view.instances[0], requests=1), *view.instances[1:]])
    third = encoder.encode(dataclasses.replace(entry, view=changed))
    assert [type(record).__name__ for record in third] == ["LoadRecord", "DemandRecord", "DecidedRecord"]


def test_of_a_large_cluster_the_best_and_the_chosen_are_written():
    names = [f"e{i}" for i in range(10 * WHOLE)]
    peers = frozenset(names)
    instances = [load(name, peers=peers, requests=number) for number, name in enumerate(names)]
    queue = [demand(str(number)) for number in range(2 * QUEUE)]
    view = ClusterView(now=0.0, instances=instances, queue=queue)
    costs = {name: float(-number) for number, name in enumerate(names)}
    chosen = decision(queue[-1], "e3", "e5", costs)
    (entry,) = recorded(DecidedEntry(0.0, queue[-1].key[1], "f", queue[-1], chosen, view, len(instances), len(queue)))
    best = {"e3", "e5", *names[-BEST:]}
    assert [one.name for one in entry.view.instances] == [name for name in names if name in best]
    assert {one.name: one.requests for one in entry.view.instances}["e3"] == 3
    assert entry.decision.costs["prefill"].keys() == best
    assert all(one.peers == best for one in entry.view.instances)
    assert (entry.instances, entry.waiting) == (len(instances), len(queue))
    assert len(entry.view.queue) == QUEUE
    assert entry.demand.key not in [d.key for d in entry.view.queue]
    without_costs = replace(chosen, key=queue[0].key, costs={})
    (entry,) = recorded(DecidedEntry(0.0, "0", "f", queue[0], without_costs, view, len(instances), 1))
    assert len(entry.view.instances) == BEST


def test_a_recording_of_other_fields_can_be_read():
    recorder = FlightRecorder()
    an_afternoon(recorder)
    encoder = RecordEncoder()
    began = encoder.begin(0.0, 0.0)
    records = [record for entry in recorder.entries for record in encoder.encode(entry)]
    unknown = tuple("mood" if name == "requests" else name for name in began.load)
    began = type(began)(began.now, began.wall, unknown, began.demand, began.rates)
    entries = [entry for _, entry in RecordDecoder().decode([began, *records])]
    assert len(entries) == len(recorder.entries)
    assert {one.requests for entry in entries if isinstance(entry, DecidedEntry) for one in entry.view.instances} == {0}
    with pytest.raises(ValueError, match="does not fit"):
        list(RecordDecoder().decode([began, *records[3:]]))
    with pytest.raises(ValueError, match="without a beginning"):
        list(RecordDecoder().decode(records))


def test_what_was_to_be_loaded_comes_back_and_is_nothing_in_older_recordings():
    entry = decided(chosen="busy", hits={"busy": 960, "free": 960}, loads={"free": {"host": 512, "disk": 128}})
    (again,) = recorded(entry)
    assert again.demand == again.view.queue[0] == entry.demand
    later = first_token(again.view, again.demand, again.view.instances[1])
    there = first_token(entry.view, replace(entry.demand, loads={}), entry.view.instances[1])
    assert later == pytest.approx(there + TIMES.load_ms(640) / 1e3)

    encoder = RecordEncoder()
    before = []
    for record in [encoder.begin(0.0, 0.0), *encoder.encode(entry)]:
        fields_of = msgspec.msgpack.decode(to_bytes(record))
        before.append(from_bytes(msgspec.msgpack.encode(fields_of[:-1] if fields_of[0] == "Demand" else fields_of)))
    (older,) = [decided for _, decided in RecordDecoder().decode(before)]
    assert (older.demand.hits, older.demand.loads) == (entry.demand.hits, {})


def test_what_older_recordings_say_of_the_one_tier_is_of_the_host():
    entry = decided(chosen="busy", hits={"busy": 960, "free": 960}, loads={"free": {"host": 640}})
    encoder, before = RecordEncoder(), []
    for record in [encoder.begin(0.0, 0.0), *encoder.encode(entry)]:
        fields_of = msgspec.msgpack.decode(to_bytes(record), strict=False)
        if fields_of[0] == "Demand":
            fields_of[-1] = {number: tiers["host"] for number, tiers in fields_of[-1].items()}
        before.append(from_bytes(msgspec.msgpack.encode(fields_of)))
    (older,) = [decided for _, decided in RecordDecoder().decode(before)]
    assert older.demand.loads == entry.demand.loads


def test_of_many_hits_only_what_is_written_is_to_be_loaded():
    names = [f"e{number}" for number in range(2 * HITS)]
    hits = {name: 64 * number for number, name in enumerate(names)}
    asked = demand("r", hits=hits, loads={key: {"remote": 64} for key in names})
    view = ClusterView(now=0.0, instances=[load("e0")], queue=[asked])
    (again,) = recorded(DecidedEntry(0.0, "r", "f", asked, decision(asked, "e0"), view, 1, 1))
    assert again.demand.hits.keys() == again.demand.loads.keys() == set(names[HITS:])


# --- the file


def make_file(path, recorder=None, **more):
    clock = ManualClock(5.0)
    return RecorderFile(path, recorder or FlightRecorder(), clock, wall=lambda: 1000.0, **more)


def test_what_is_written_is_read_with_the_time_of_day(tmp_path):
    recorder = FlightRecorder()
    file = make_file(tmp_path / "r", recorder)
    an_afternoon(recorder)
    file.flush()
    seen = list(read(tmp_path / "r"))  # while it is still written
    assert [entry for _, entry in seen] == list(recorder.entries)
    assert [wall for wall, _ in seen] == pytest.approx([995.0 + entry.now for entry in recorder.entries])
    file.close()


@settings(max_examples=30)
@given(cut=st.integers(1, 4000), junk=st.binary(max_size=20))
def test_a_torn_end_costs_no_more_than_itself(tmp_path_factory, cut, junk):
    path = tmp_path_factory.mktemp("recorder") / "r"
    recorder = FlightRecorder()
    file = make_file(path, recorder)
    an_afternoon(recorder)
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: max(len(MAGIC), len(whole) - cut)] + junk)
    kept = [entry for _, entry in read(path)]
    assert kept == list(recorder.entries)[: len(kept)]
    next_life = FlightRecorder()
    file = make_file(path, next_life)
    next_life.ended(6.0, "later", "f", None)
    file.close()
    after = [entry for _, entry in read(path)]
    assert after == [*kept, EndedEntry(6.0, "later", "f", None)]


def test_it_is_rotated_and_both_files_are_read(tmp_path):
    recorder = FlightRecorder()
    file = make_file(tmp_path / "r", recorder, limit=4000)
    view = ClusterView(now=0.0, instances=[load("e0"), load("e1")])
    for number in range(100):
        asked = demand(str(number))
        recorder.decided(float(number), view, asked, str(number), "f", decision(asked, "e0"))
        file.flush()
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "r.1"]
    assert all(path.stat().st_size < 6000 for path in tmp_path.iterdir())
    ids = [int(entry.request_id) for _, entry in read(tmp_path / "r")]
    assert ids == list(range(ids[0], 100))
    assert ids[0] > 0


def test_files_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "text").write_text("dear diary\n")
    for wrong, why in (
        ("text", "is no flight recording"),
        ("absent/r", "cannot be written"),
        ("", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_file(tmp_path / wrong)
    assert (tmp_path / "text").read_text() == "dear diary\n"
    with pytest.raises(ConfigError, match="is no flight recording"):
        list(read(tmp_path / "text"))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read(tmp_path / "absent"))
    file = make_file(tmp_path / "r")
    with pytest.raises(ConfigError, match="written by another process"):
        make_file(tmp_path / "r")
    file.close()
    make_file(tmp_path / "r").close()


def test_a_disk_that_is_full_stops_the_recorder_for_a_while_and_nothing_else(tmp_path, caplog):
    recorder, path = FlightRecorder(), tmp_path / "r"
    file = make_file(path, recorder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for number in range(40):
            recorder.ended(float(number), f"{number:64}", "f", None)
            file.flush()
            if number == 2:  # the next record is cut off
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
            if number == 10:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
                make_file(path.with_name("other")).close()  # a master that starts now serves without it
            if number == 30:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            file._clock.advance(1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.close()
    assert caplog.text.count(f"the flight recorder stops: {path}:") == 1
    assert f"the flight recorder stops: {path.with_name('other')}:" in caplog.text
    assert caplog.text.count("the flight recorder goes on") == 1
    ids = [int(entry.request_id) for _, entry in read(path)]
    assert ids == [0, 1, 2, *range(ids[3], 40)]
    assert 30 < ids[3] <= 31 + recorder_file.AGAIN


def test_one_that_cannot_be_made_on_a_full_disk_is_made_later(tmp_path, monkeypatch):
    recorder, real = FlightRecorder(), os.open

    def no_room(*args):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "open", no_room)
    file = make_file(tmp_path / "r", recorder)
    make_file(tmp_path / "other").close()
    recorder.ended(0.0, "lost", "f", None)
    file.flush()
    monkeypatch.setattr(os, "open", real)
    file._clock.advance(recorder_file.AGAIN)
    recorder.ended(1.0, "kept", "f", None)
    file.close()
    assert [entry.request_id for _, entry in read(tmp_path / "r")] == ["kept"]


def test_one_that_cannot_be_rotated_stops_too(tmp_path, caplog):
    recorder = FlightRecorder()
    file = make_file(tmp_path / "r", recorder, limit=1)
    (tmp_path / "r.1").mkdir()
    (tmp_path / "r.1" / "x").touch()
    for number in range(3):
        recorder.ended(float(number), str(number), "f", None)
        file.flush()
    file.close()
    assert caplog.text.count("the flight recorder stops") == 1


def test_what_was_lost_is_told(tmp_path, caplog):
    recorder = FlightRecorder(loads=2)
    file = make_file(tmp_path / "r", recorder)
    for number in range(5):
        recorder.ended(float(number), str(number), "f", None)
    file.close()
    assert "3 entries are missing" in caplog.text
    assert [entry.request_id for _, entry in read(tmp_path / "r")] == ["3", "4"]


# --- decided again


def decided(now=10.0, chosen="busy", **changes):
    busy = load("busy", requests=9, held_tokens=9000, pending_tokens=9000, free_at=10.4, idle_at=10.6)
    asked = demand("r", arrived=9.9, **changes)
    queues = {"offline": [asked]} if asked.offline else {"queue": [asked]}
    view = ClusterView(now=now, instances=[busy, load("free")], **queues)
    return DecidedEntry(now, "r", "f", asked, decision(asked, chosen), view, 2, 1)


def test_regret_is_what_another_instance_would_have_been_sooner():
    entry = decided()
    fast = TIMES.prefill_ms(1000, budget=8192) / 1e3
    assert first_token(entry.view, entry.demand, entry.view.instances[1]) == pytest.approx(fast)
    assert first_token(entry.view, entry.demand, entry.view.instances[0]) == pytest.approx(0.4 + fast)
    again = redecide(DISPATCH["least-loaded"](), entry, random.Random(0))
    assert again.regret == pytest.approx(0.4)
    assert again.other_regret == 0
    assert not again.agrees
    offline = redecide(DISPATCH["least-loaded"](), decided(offline=True), random.Random(0))
    assert offline.regret == pytest.approx(0.6)
    cached = decided(hits={"busy": 960})
    assert redecide(DISPATCH["least-loaded"](), cached, random.Random(0)).regret < 0.4
    better = redecide(DISPATCH["least-loaded"](), decided(chosen="free"), random.Random(0))
    assert better.agrees
    assert better.regret == 0


class Waits:
    """Until a time of its own, or for ever."""

    name, wants_keys = "waits", False

    def __init__(self, until):
        self.until = until
        self.asked = []

    def decide(self, view, rng):
        self.asked.append(view.now)
        if view.now < self.until:
            return Later(self.until)
        return Decision(key=("f", "r"), prefill="free", decode=None, policy=self.name, reason="-", costs={})


def test_a_policy_that_waits_is_asked_when_it_wants_and_does_not_remember_the_future():
    policy = Waits(10.25)
    again = redecide(policy, decided(), random.Random(0))
    assert again.decision.prefill == "free"
    assert again.waited == pytest.approx(0.25)
    assert again.other_regret == pytest.approx(0.25)
    assert policy.asked == [10.0]
    for_ever = redecide(Waits(inf), decided(), random.Random(0))
    assert for_ever.decision is None
    assert for_ever.other_regret is None
    assert for_ever.regret == pytest.approx(0.4)


def test_a_whole_recording_is_decided_again():
    entries = [decided(float(now)) for now in range(10, 20)]
    made = []

    def make():
        made.append(DISPATCH["least-loaded"]())
        return made[-1]

    found = summary(list(replay(entries, make, random.Random(0))))
    assert len(made) == 1
    assert found["decisions"] == 10
    assert found["agreement"] == 0.0
    assert found["waits"] == 0
    assert found["regret_ms"]["recorded"]["p95"] == pytest.approx(400)
    assert found["regret_ms"]["recorded"]["p50"] == 0  # from 11 s on, the other one is free again
    assert found["regret_ms"]["replayed"] == {"mean": 0, "p50": 0, "p95": 0}
    list(replay([*entries, decided(3.0)], make, random.Random(0)))  # another life's clock
    assert len(made) == 3
    assert summary([])["agreement"] is None


def test_the_spread_of_values():
    assert spread(range(1, 101)) == {"mean": 50.5, "p50": 50, "p95": 95}
    assert spread([]) == {"mean": None, "p50": None, "p95": None}


@pytest.mark.parametrize("name", DISPATCH)
def test_every_policy_decides_again_what_was_recorded(name):
    recorder = FlightRecorder()
    an_afternoon(recorder)
    decisions = [entry for entry in recorded(*recorder.entries) if isinstance(entry, DecidedEntry)]
    found = list(replay(decisions, DISPATCH[name], random.Random(1)))
    assert len(found) == len(decisions)
    assert found == list(replay(decisions, DISPATCH[name], random.Random(1)))
