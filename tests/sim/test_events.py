import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sim.events import Due, Priority, Timeline


def test_events_happen_by_time_then_priority_then_order_of_adding():
    timeline, seen = Timeline(), []

    def note(name):
        return lambda now: seen.append((now, name)) or []

    timeline.add([Due(2.0, Priority.FAULT, note("late")), Due(1.0, Priority.STEP, note("step"))])
    timeline.add([Due(1.0, Priority.MESSAGE, note("first")), Due(1.0, Priority.MESSAGE, note("second"))])
    timeline.run(lambda: False)
    assert seen == [(1.0, "first"), (1.0, "second"), (1.0, "step"), (2.0, "late")]
    assert timeline.happened == 4


def test_what_follows_from_an_event_happens_in_its_turn():
    timeline, seen = Timeline(), []

    def chain(now):
        seen.append(now)
        return [Due(now + 1, Priority.CLOCK, chain)]

    timeline.add([Due(0.0, Priority.CLOCK, chain)])
    timeline.run(lambda: len(seen) == 4)
    assert seen == [0.0, 1.0, 2.0, 3.0]
    assert timeline.now == 3.0


def test_nothing_is_added_to_the_past():
    timeline = Timeline()
    timeline.add([Due(5.0, Priority.CLOCK, lambda now: [Due(4.0, Priority.CLOCK, lambda now: [])])])
    with pytest.raises(AssertionError, match=r"an event at 4\.0 s is added at 5\.0 s"):
        timeline.run(lambda: False)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(Priority), st.sampled_from([None, 0, 1])), max_size=40))
def test_events_happen_in_the_same_order_whatever_their_lanes(events):
    timeline, seen = Timeline(lanes=2), []
    for number, (at, priority, lane) in enumerate(events):
        key = (at, priority, number)
        timeline.add([Due(at, priority, lambda now, key=key: seen.append(key) or [], lane)])
    timeline.run(lambda: False)
    assert seen == sorted(seen)
    assert len(seen) == len(events)
