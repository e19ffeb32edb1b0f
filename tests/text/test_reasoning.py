"""What of a text is reasoning, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.reasoning import REASONING, ReasoningParser
from tests.text.test_tools import cut

QWEN, R1 = REASONING["qwen3"], REASONING["deepseek_r1"]


def fold(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    found = [*map(parser.push, pieces), parser.finish()]
    return "".join(thought for thought, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("opened", "text", "thought", "answer"),
    [
        (None, "<think>\na\nb\n</think>\n\nc", "a\nb", "c"),
        (None, " no <think>a</think>", "", " no <think>a</think>"),
        (None, "<thin", "", "<thin"),
        (None, "", "", ""),
        (None, "<think></think>c", "", "c"),
        (True, "a</think>c</think>", "a", "c</think>"),
        (True, "<think>a</think>", "a", ""),
        (True, "a </thin", "a </thin", ""),
        (False, "a</think>b", "", "a</think>b"),
    ],
)
def test_what_is_reasoning(opened: bool | None, text: str, thought: str, answer: str) -> None:
    assert fold(ReasoningParser(QWEN, opened), [text]) == (thought, answer)
    assert fold(ReasoningParser(QWEN, opened), list(text)) == (thought, answer)


@given(data=st.data(), opened=st.sampled_from([None, True, False]))
def test_it_does_not_matter_how_a_text_is_cut(data: st.DataObject, opened: bool | None) -> None:
    family = REASONING[data.draw(st.sampled_from(sorted(REASONING)))]
    pieces = [family.start, family.end, " ", "\n", "a", "<", "</think", "["]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=10)))
    places = data.draw(st.lists(st.integers(0, len(text))))
    assert fold(ReasoningParser(family, opened), cut(text, places)) == fold(ReasoningParser(family, opened), [text])


def test_how_a_prompt_ends() -> None:
    for end, qwen, r1 in (
        ("<|im_start|>assistant\n", None, True),
        ("<think>\n", True, True),
        ("<think>\n\n</think>\n\n", False, False),
    ):
        assert (QWEN.opened(end), R1.opened(end)) == (qwen, r1)
