"""How many instances there are: thresholds, HFX, and ours."""

import dataclasses
import random
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.sched.cluster import ClusterView, Fleet, Move, Rates, Start, Stop, Tally
from penstock.sched.cluster.hfx_scaling import HFXScaling
from penstock.sched.cluster.hindsight import Lot, in_time
from penstock.sched.cluster.scaling import Bounded, Wish, stages
from penstock.sched.cluster.unified_scaling import OnlineTraffic, UnifiedScaling, strain
from penstock.sim.baselines.threshold_scaling import ThresholdScaling
from tests.helpers.policies import demand, instance

SIZINGS = {"threshold": ThresholdScaling, "hfx": HFXScaling, "unified": UnifiedScaling}
FLEET = Fleet(absent=["x0", "x1", "x2"], least=1, most=8)
STEADY = Rates(arrivals=50, completions=50, attained=50, prompt_tokens=256.0, output_tokens=32.0)
BUSY = {"requests": 40, "held_tokens": 60_000}  # of 65,536


def view(*instances, now=100.0, waiting=0, waited=0.0, rates=STEADY, ttft=1.0):
    queue = [demand(f"r{i}", arrived=now - waited, ttft=ttft, tpot=0.1) for i in range(waiting)]
    return ClusterView(now=now, instances=instances, queue=queue, rates=rates)


def tallies(now, rates, seconds=1.0):
    """What came and went in the seconds before, at these rates."""
    share = seconds / rates.window
    came, went, kept = (round(share * count) for count in (rates.arrivals, rates.completions, rates.attained))
    return [Tally(now - seconds / 2, came, round(came * rates.prompt_tokens), went, kept)]


class Scaler:
    """A policy, of which only the changes are looked at; `said` are its verdicts, by role."""

    def __init__(self, sizing, **cooldowns):
        self.policy, self.said = Bounded(sizing, **cooldowns), {}

    def decide(self, what, fleet):
        scaled = self.policy.decide(what, fleet)
        self.said = {verdict.role: verdict for verdict in scaled.verdicts}
        assert set(self.said) == {i.role for i in what.instances} | set(fleet.lacking)
        return scaled.changes


def scaler_of(name, **cooldowns):
    return Scaler(SIZINGS[name](), **cooldowns)


def any_(count, **values):
    return [instance(f"a{i}", **values) for i in range(count)]


def after(scaler, what, fleet=FLEET, seconds=0.0):
    """What it decides once the same has been so for some time."""
    start = what.now - seconds
    for i in range(round(seconds)):
        lately = tallies(start + i, what.rates)
        assert not scaler.decide(replace(what, now=start + i), replace(fleet, lately=lately)), "too early"
    return scaler.decide(what, replace(fleet, lately=tallies(what.now, what.rates)))


@pytest.mark.parametrize("name", SIZINGS)
def test_nothing_changes_while_all_is_well(name):
    well = view(*any_(2, requests=9, held_tokens=33_000, decoding=9, ttft=1.0, tpot=0.1))
    well = replace(well, rates=replace(STEADY, arrivals=200, completions=200, attained=200, prompt_tokens=2000.0))
    assert not after(scaler_of(name), well, seconds=100)


@pytest.mark.parametrize("name", SIZINGS)
def test_a_queue_that_waits_asks_for_more_although_execution_keeps_up(name):
    scaler = scaler_of(name)
    for second in range(10):
        changes = scaler.decide(view(*any_(2), now=100.0 + second, waiting=40, waited=0.9, ttft=1.0), FLEET)
        if changes:
            break
    assert second <= {"unified": 5}.get(name, 0)
    assert all(isinstance(c, Start) and c.role == "any" and c.reason for c in changes)
    assert [c.name for c in changes] == ["x0", "x1", "x2"][: len(changes)]


@pytest.mark.parametrize("name", SIZINGS)
def test_an_idle_cluster_shrinks_by_the_emptiest_one_by_one(name):
    idle = Rates(arrivals=0, completions=30, attained=30, output_tokens=32.0)
    some = [instance("a0", requests=1, held_tokens=500, decoding=1, tpot=0.1), instance("a1")]
    scaler = scaler_of(name)
    changes = after(scaler, view(*some, rates=idle), seconds={"threshold": 60, "hfx": 30, "unified": 45}[name])
    assert [(type(c), c.name) for c in changes] == [(Stop, "a1")]
    assert not scaler.decide(view(some[0], now=500.0, rates=idle), FLEET), "never the last one"
    assert not scaler_of(name).decide(view(*some, rates=idle), replace(FLEET, least=2))


@pytest.mark.parametrize("name", SIZINGS)
def test_a_cooldown_passes_between_two_changes_and_starting_ones_count(name):
    scaler, urgent = scaler_of(name), view(*any_(2), waiting=40, waited=0.9)
    for second in range(6):  # for so long ours takes it for a burst
        first = scaler.decide(replace(urgent, now=100.0 + second), FLEET)
        if first:
            urgent = replace(urgent, now=100.0 + second)
            break
    assert first
    assert not scaler.decide(replace(urgent, now=urgent.now + 0.5), FLEET)
    fleet = replace(FLEET, starting={c.name: "any" for c in first}, most=2 + len(first))
    assert not scaler.decide(replace(urgent, now=urgent.now + 100), fleet), "no more than `most`"


def test_hfx_is_silent_on_too_few_events_and_out_on_more_arrivals_than_completions():
    few = Rates(arrivals=12, completions=4)
    assert not Scaler(HFXScaling()).decide(view(*any_(2, **BUSY), rates=few), FLEET)
    many = Rates(arrivals=60, completions=20)
    (change,) = Scaler(HFXScaling()).decide(view(*any_(2, **BUSY), rates=many), FLEET)
    assert change == Start(name="x0", role="any", reason="rho 3.00, w 0.00, least u 0.92")


def test_hfx_shrinks_where_nothing_comes_however_few_end():
    for ended in (0, 3):
        quiet = view(*any_(2), rates=Rates(arrivals=0, completions=ended))
        (change,) = after(Scaler(HFXScaling()), quiet, seconds=30)
        assert (type(change), change.reason) == (Stop, "rho 0.00, w 0.00, least u 0.00")


def test_hfx_does_not_shrink_when_the_work_fits_nowhere_else():
    leaving = Rates(arrivals=10, completions=60)
    full = instance("a0", requests=9, held_tokens=65_000)
    light = instance("a1", requests=2, held_tokens=1_000)
    assert not after(Scaler(HFXScaling()), view(full, light, rates=leaving), seconds=60)
    assert after(Scaler(HFXScaling()), view(full, replace(light, held_tokens=500), rates=leaving), seconds=30)


def test_hfx_switches_a_role_where_one_stage_has_too_many_and_the_other_too_few():
    prefills = [instance(f"p{i}", "prefill") for i in range(3)]
    slow = instance("d0", "decode", requests=200, held_tokens=64_000, decoding=200, tpot=0.001)
    scaler = Scaler(HFXScaling())
    rates = Rates(arrivals=10, completions=8)  # 18 events: too few for either rho
    assert isinstance(scaler.decide(view(*prefills, slow, rates=rates), FLEET)[0], Start)
    quiet = Rates(arrivals=0, completions=30)
    changes = []
    for second in range(101, 160):  # nothing more to prefill, and still too slow to decode
        changes = scaler.decide(view(*prefills, slow, now=float(second), rates=quiet), replace(FLEET, absent=[]))
        if changes:
            break
    assert [(type(c), c.name, c.role) for c in changes] == [(Move, "p0", "decode")]


def test_a_queue_that_waits_for_decoders_does_not_make_more_prefillers():
    prefill = instance("p0", "prefill")
    slow = instance("d0", "decode", requests=200, held_tokens=64_000, decoding=200, tpot=0.001)
    changes = Scaler(HFXScaling()).decide(view(prefill, slow, waiting=9, waited=0.9, rates=Rates(arrivals=9)), FLEET)
    assert [c.role for c in changes] == ["decode"]


def test_a_missed_prediction_asks_for_one_more_and_then_waits_what_comes_of_it():
    busy = any_(2, requests=40, decoding=40, held_tokens=30_000, ttft=1.0, tpot=0.05)
    heavy = replace(STEADY, arrivals=250, completions=250, attained=100, prompt_tokens=2000.0, output_tokens=300.0)
    scaler = Scaler(UnifiedScaling())
    (change,) = after(scaler, view(*busy, rates=heavy), seconds=1)
    assert change.reason == "10 of 25 kept their targets"
    more = [*busy, replace(busy[0], name="x0")]
    for second in range(4):
        lately = [Tally(100.0 + second, 4, 8000, 4, 1)]
        assert not scaler.decide(view(*more, now=101.0 + second, rates=heavy), replace(FLEET, lately=lately))


def test_ours_grows_by_as_many_as_are_missing():
    flood = replace(STEADY, arrivals=3000, prompt_tokens=2000.0)
    there = view(*any_(2, ttft=1.0, tpot=0.1), rates=flood)
    assert len(after(Scaler(UnifiedScaling()), there)) == 3


@pytest.mark.parametrize("often", [1, 12])
def test_ours_has_instances_for_bursts_that_come_again_and_for_one_as_long_as_it_is_remembered(often):
    """They are far too short to be met by instances that start then."""
    scaler = Scaler(UnifiedScaling(memory=30.0))
    few = replace(STEADY, arrivals=10, completions=10, attained=10, prompt_tokens=2000.0)
    count, counts = 1, []
    for second in range(100, 300):
        lately = tallies(second, few)
        if 130 <= second < 130 + 10 * often and second % 10 == 0:
            lately = [Tally(second - 0.5, 150, 150 * 2000)]  # 150 prompts take one instance far longer than a second
        fleet = replace(FLEET, absent=[f"x{i}" for i in range(8)], lately=lately)
        there = [instance(f"i{i}", ttft=1.0, tpot=0.1) for i in range(count)]
        for change in scaler.decide(view(*there, now=float(second), rates=few), fleet):
            count += 1 if isinstance(change, Start) else -1
        counts.append(count)
    quiet, last = counts[:30], 20 + 10 * often
    assert set(quiet) == {1}
    assert max(counts) > 3
    assert set(counts[33 : last + 25]) == {max(counts)}, "the next one would find them"
    assert counts[last + 50] == 1


lots = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.integers(1, 50), st.floats(0.001, 0.3)), min_size=1, max_size=40
).map(lambda found: [Lot(at, count, count * alone, alone) for at, count, alone in sorted(found)])


@given(lots=lots, share=st.floats(0.2, 1.0), ttft=st.floats(0.4, 3.0))
def test_more_instances_would_never_have_kept_fewer_prompts_in_time(lots, share, ttft):
    kept = [in_time(lots, count, share, ttft) for count in range(1, 12)]
    assert all(0 <= one <= other + 1e-9 for one, other in pairwise([*kept, 1.0]))
    assert in_time(lots, 10_000, share, ttft) == pytest.approx(1.0)


def test_what_would_have_been_in_time_is_what_can_be_computed_by_hand():
    at_once = [Lot(0.0, 10, 2.0, 0.2)]
    assert in_time(at_once, 1, 1.0, 1.2) == pytest.approx(0.5)  # each begins within the second before its own 0.2 s
    assert in_time(at_once, 2, 1.0, 1.2) == 1.0
    assert in_time(at_once, 2, 0.5, 1.4) == pytest.approx(0.5)
    later = [*at_once, Lot(0.5, 5, 1.0, 0.2)]  # half a second of it is left then
    assert in_time(later, 1, 1.0, 1.2) == pytest.approx((5 + 2.5) / 15)
    assert in_time([*at_once, Lot(0.1, 3, 9.0, 3.0)], 2, 1.0, 1.2) == 1.0, "nobody could have"


@given(
    rate=st.floats(0.0, 100.0),
    prompt=st.floats(1.0, 4000.0),
    output=st.floats(1.0, 400.0),
    prefilling=st.floats(0.0, 6.0),
    role=st.sampled_from(["any", "prefill", "decode"]),
)
def test_more_instances_never_strain_more_and_more_work_never_less(rate, prompt, output, prefilling, role):
    traffic = OnlineTraffic(rate, prompt, output, 0.05, prefilling)
    load = instance("a0")
    strains = [strain(role, load, traffic, count) for count in (1, 2, 3, 8)]
    assert all(a >= b * (1 - 1e-6) for a, b in pairwise(strains))
    if role != "decode":
        assert strain(role, load, dataclasses.replace(traffic, prefilling=prefilling + 1.0), 2) >= strains[1]
    assert strain(role, load, dataclasses.replace(traffic, tpot=inf), 2) <= strains[1]


@pytest.mark.parametrize("name", SIZINGS)
@given(seed=st.integers(0, 10**6))
def test_changes_stay_within_the_fleet_and_equal_views_give_equal_ones(name, seed):
    rng = random.Random(seed)
    roles = rng.choice([["any"] * 3, ["prefill", "decode"], ["prefill", "prefill", "decode", "decode"]])
    one, two = scaler_of(name), scaler_of(name)
    now = 0.0
    for _ in range(30):
        now += rng.choice([0.5, 5.0, 40.0])
        loads = [
            instance(
                f"i{i}",
                role,
                requests=(requests := rng.choice([0, 3, 200])),
                held_tokens=requests * rng.choice([10, 300]),
                decoding=requests,
                tpot=rng.choice([0.001, 0.1, inf]),
            )
            for i, role in enumerate(roles)
        ]
        rates = Rates(
            arrivals=rng.choice([0, 30, 900]),
            completions=(done := rng.choice([0, 30, 300])),
            attained=rng.choice([done, done // 2]),
            prompt_tokens=rng.choice([0.0, 900.0]),
            output_tokens=rng.choice([0.0, 100.0]),
        )
        what = view(*loads, now=now, waiting=rng.choice([0, 0, 30]), waited=rng.choice([0.0, 0.9]), rates=rates)
        fleet = Fleet(
            absent=["x0"],
            starting={"s": roles[0]} if rng.random() < 0.2 else {},
            least=2,
            most=len(roles) + 1,
            lately=tallies(now, rates, 0.5),
        )
        changes = one.decide(what, fleet)
        assert list(changes) == list(two.decide(what, fleet))
        names = [c.name for c in changes]
        assert len(names) == len(set(names))
        started = [c for c in changes if isinstance(c, Start)]
        stopped = [c for c in changes if isinstance(c, Stop)]
        serving = len(loads) + len(fleet.starting)
        assert {c.name for c in started} <= {"x0"}
        if started:
            assert serving + len(started) <= fleet.most
        assert serving - len(stopped) >= fleet.least or not stopped
        left = {i.name: i.role for i in loads if i.name not in {c.name for c in stopped}}
        left |= {c.name: c.role for c in changes if isinstance(c, Move)}
        assert set(left.values()) == set(roles), "a stage keeps somebody"


class Whims:
    """A `Sizing` that wishes for anything."""

    name, interval, out, back = "whims", 1.0, 3.0, 20.0

    def __init__(self, rng):
        self.rng = rng

    def wishes(self, view, fleet):
        return {role: Wish(self.rng.choice([-2, -1, 0, 1, 3]), "so") for role in stages(view)}


@given(seed=st.integers(0, 10**6))
def test_whatever_is_wished_floor_ceiling_budget_and_cooldowns_hold(seed):
    """Against a fleet whose starts and drains take time, and whose instances fail."""
    rng = random.Random(seed)
    roles = rng.choice([["any"], ["any", "any"], ["prefill", "decode"], ["prefill", "decode", "decode"]])
    limits = {"least": rng.randint(len(roles), 3), "most": rng.randint(3, 7), "budget": rng.choice([inf, 5.0, 8.0])}
    names = {f"i{n}": 1 + (n % 2) * rng.choice([0, 1]) for n in range(8)}
    scaler, serving = Scaler(Whims(rng)), dict(zip(names, roles, strict=False))
    starts, drains, turned = {}, {}, []  # name -> (role, when); name -> when; (when, role, +1 or -1)
    for now in map(float, range(120)):
        serving |= {name: role for name, (role, at) in starts.items() if at <= now}
        starts = {name: (role, at) for name, (role, at) in starts.items() if at > now}
        drains = {name: at for name, at in drains.items() if at > now}
        if rng.random() < 0.03 and serving:
            serving.pop(rng.choice(list(serving)))
        there = set(serving.values()) | {role for role, _ in starts.values()}
        fleet = Fleet(
            absent=[name for name in names if name not in {*serving, *starts, *drains}],
            starting={name: role for name, (role, _) in starts.items()},
            draining=set(drains),
            lacking=[role for role in dict.fromkeys(roles) if role not in there],
            devices=names,
            **limits,
        )
        before = len(serving) + len(starts)
        held = {*serving, *starts, *drains}
        changes = scaler.decide(view(*(instance(n, role) for n, role in serving.items()), now=now), fleet)
        for change in changes:
            if isinstance(change, Start):
                held.add(change.name)
                starts[change.name] = change.role, now + rng.choice([1.0, 6.0])
                turned.append((now, change.role, 1))
            elif isinstance(change, Stop):
                turned.append((now, serving.pop(change.name), -1))
                drains[change.name] = now + rng.choice([1.0, 10.0])
            else:
                turned += [(now, serving[change.name], -1), (now, change.role, 1)]
                serving[change.name] = change.role
        started = any(isinstance(change, Start) for change in changes)
        assert not started or len(held) <= limits["most"]
        assert not started or sum(names[name] for name in held) <= limits["budget"]
        if any(isinstance(change, Stop) for change in changes):
            assert len(serving) + len(starts) >= limits["least"]
        if before < limits["least"] and not started:
            assert any(v.kind in ("ceiling", "budget") for v in scaler.said.values()) or not serving
    for role in set(roles):
        mine = [(at, way) for at, whose, way in turned if whose == role]
        for at, _ in mine:
            ways = [way for other, way in mine if at <= other < at + Whims.back]
            assert sum(one != two for one, two in pairwise(ways)) <= 1, "it turns round once in a cooldown"
