"""What clients saw, of made-up records."""

import pytest

from penstock.bench.metrics import Answer, ClientRecord
from penstock.drill.faults import Strike
from penstock.drill.outcome import Struck, judge

BREAKS = {"engine-0": frozenset({"engine-0"}), "frontend-0": frozenset()}


def record(number, times=(1.0, 2.0, 5.0, 6.0), tokens=(7, 8, 9, 10), error=None):
    made = ClientRecord(number=number, start=0.5, sent=0.5, end=times[-1])
    made.events = [(time, 1) for time in times]
    made.answer = Answer(["a"] * len(times), list(tokens[: len(times)]))
    made.finish_reason = None if error else "length"
    made.error = error
    return made


def struck(target, began=2.5, ended=4.0):
    return Struck(Strike(2.5, "kill", target, 0.0, 0.3), began, ended, ended + 1)


def test_gaps_are_those_of_streams_that_the_fault_met():
    right = [record(0), record(1)]
    found = judge(right, right, [struck("engine-0")], {0: ("engine-0",), 1: ("engine-1",)}, BREAKS)
    assert (found.streams, found.completed, found.identical, found.lost, found.unlike) == (2, 2, 2, 0, 0)
    assert [(hit.stream, hit.at, hit.gap) for hit in found.hits] == [(0, 2.0, 3.0)]
    assert found.met == [1]
    assert found.recovery.p99 == pytest.approx(3000)


def test_what_a_new_process_was_sent_did_not_meet_the_fault():
    late = record(0, times=(5.0, 9.0))
    late.sent = 4.5  # before it is seen that the process serves again
    found = judge([late], [late], [struck("engine-0")], {0: ("engine-0",)}, BREAKS)
    assert (found.met, found.hits) == ([0], [])


def test_other_tokens_are_found_in_whole_and_in_broken_streams():
    bad = [record(0, tokens=(7, 8, 0, 10)), record(1, times=(1.0, 2.0), tokens=(7, 0), error="connection")]
    found = judge(bad, [record(0), record(1)], [], {}, BREAKS)
    assert (found.completed, found.identical, found.unlike, found.lost) == (1, 0, 2, 1)
    assert found.errors == {"connection": 1}
    assert "token 2 is 0, 9 is right" in found.wrong[0]


@pytest.mark.parametrize(("began", "excused"), [(1.5, 1), (8.0, 0)])
def test_only_who_loses_its_frontend_is_excused(began, excused):
    failed = record(0, times=(1.0, 2.0), error="error event")
    found = judge([failed], [record(0)], [struck("frontend-0", began, began + 1)], {}, BREAKS)
    assert (found.excused, found.lost) == (excused, 1 - excused)
    assert (found.hits, found.met) == ([], [excused])
