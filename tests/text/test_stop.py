from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.stop import StopStrings

alphabet = st.text(alphabet="ab🙂", max_size=24)
stop_sets = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """(end, stop string): by the definition, one prefix after the other."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def begun(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of a text that some stop string starts with."""
    return max(n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops))


@given(st.lists(alphabet, max_size=6), stop_sets, st.booleans())
def test_any_chunking_gives_what_the_definition_says(chunks: list[str], stops: tuple[str, ...], include: bool) -> None:
    checker = StopStrings(stops, include)
    seen = shown = ""
    for chunk in chunks:
        seen += chunk
        shown += checker.push(chunk)
        match = first_match(seen, stops)
        if match is None:
            assert checker.matched is None
            assert shown == (seen if include else seen[: len(seen) - begun(seen, stops)])
        else:
            end, stop = match
            assert checker.matched == stop
            assert shown == seen[: end if include else end - len(stop)]
    shown += checker.flush()
    if checker.matched is None:
        assert shown == seen


@given(st.lists(alphabet, max_size=3), st.lists(alphabet, max_size=3), stop_sets, st.booleans())
def test_a_stop_string_counts_where_it_is_complete(
    early: list[str], late: list[str], stops: tuple[str, ...], include: bool
) -> None:
    checker = StopStrings(stops, include)
    shown = "".join([*(checker.push(c, may_end=False) for c in early), *map(checker.push, late)]) + checker.flush()
    before, text = len("".join(early)), "".join(early + late)
    for end in range(before + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            assert checker.matched == max(complete, key=len)
            assert shown == text[: end if include else end - len(checker.matched)]
            return
    assert checker.matched is None
    assert shown == text


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (("User:", "\n\nUser:"), "Hi.\n\nUser: a", "Hi.", "\n\nUser:"),
        (("abcdef", "cd"), "abcdef", "ab", "cd"),
        (("aab",), "aaab", "a", "aab"),
        (("STOP",), "STOP", "", "STOP"),
        (("x", "x"), "axb", "a", "x"),
    ],
)
def test_the_first_to_be_complete_wins(stops: tuple[str, ...], text: str, shown: str, matched: str) -> None:
    checker = StopStrings(stops, include_in_output=False)
    assert "".join(map(checker.push, text)) + checker.flush() == shown
    assert checker.matched == matched


def test_what_may_begin_a_stop_string_is_held_back_and_let_go() -> None:
    checker = StopStrings(("</end>",), include_in_output=False)
    assert checker.push("a < b </e") == "a < b "
    assert checker.push("nd") == ""
    assert checker.push(" </") == "</end "
    assert checker.flush() == "</"
