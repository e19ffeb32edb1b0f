"""The schedule of faults, for any file."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.drill.faults import KINDS, Fault, Safety, over, schedule

GROUPS = {"p": frozenset({"p-0", "p-1", "p-2"}), "d": frozenset({"d-0", "d-1"})}
BREAKS = {name: frozenset({name}) for members in GROUPS.values() for name in members} | {"master": frozenset()}

faults = st.builds(
    Fault,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True).map(tuple),
    every=st.floats(2, 60),
    targets=st.lists(st.sampled_from(sorted(BREAKS)), min_size=1, unique=True).map(tuple),
    lasts=st.floats(0.1, 10),
)


@given(st.lists(faults, min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3), st.floats(0, 10), st.integers(0))
def test_a_schedule_never_breaks_more_than_it_may(made, at_once, healthy, settle, seed):
    safety = Safety(at_once=at_once, healthy=healthy, settle=settle, groups=GROUPS, breaks=BREAKS)
    strikes = schedule(made, safety, 120.0, seed)
    assert strikes == schedule(made, safety, 120.0, seed)
    assert [s.at for s in strikes] == sorted(s.at for s in strikes)
    for strike in strikes:
        assert strike.at >= 0
        assert over(strike, safety) <= 120.0
        assert any(strike.target in fault.targets and strike.kind in fault.kinds for fault in made)
        now = [other.target for other in strikes if other.at <= strike.at < over(other, safety)] or [strike.target]
        assert len(now) == len(set(now)) <= at_once
        lost = frozenset().union(*(BREAKS[name] for name in now))
        for members in GROUPS.values():
            if members & BREAKS[strike.target]:
                assert len(members - lost) >= healthy


def test_every_span_of_time_has_its_fault():
    fault = Fault(kinds=("kill",), every=20.0, targets=("p-0", "p-1", "p-2"))
    safety = Safety(at_once=1, healthy=2, settle=5.0, groups=GROUPS, breaks=BREAKS)
    assert len(schedule([fault], safety, 600.0, 1)) >= 29
