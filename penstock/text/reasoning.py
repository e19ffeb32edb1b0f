"""What a model thinks before it answers: where it begins and ends in its text, as that comes."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.text.tools.base import Reader


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a family of models marks it.

    Attributes:
        start, end: what is before and after it.
        always: every answer begins with it, whether or not it begins with `start`.
    """

    start: str
    end: str
    always: bool = False

    def opened(self, prompt: str) -> bool | None:
        """Whether an answer begins with it, by how its prompt ends; None where the answer itself says it."""
        end = prompt.rstrip()
        if end.endswith(self.start):
            return True
        if end.endswith(self.end):
            return False
        return True if self.always else None


REASONING = {
    "deepseek_r1": Reasoning("<think>", "</think>", always=True),
    "deepseek_v3": Reasoning("<think>", "</think>"),
    "glm45": Reasoning("<think>", "</think>"),
    "kimi_k2": Reasoning("<think>", "</think>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "qwen3": Reasoning("<think>", "</think>"),
    "seed_oss": Reasoning("<seed:think>", "</seed:think>"),
}


class ReasoningParser:
    """One output's text as reasoning and what follows it, without white space around either.

    Args:
        opened: see `Reasoning.opened`.
    """

    def __init__(self, reasoning: Reasoning, opened: bool | None) -> None:
        self._reasoning = reasoning
        self._reader = Reader()
        self._opened = opened
        self._blank = ""  # white space that belongs to it if more follows
        self._state = self._rest if opened is False else self._begin
        self._thought: list[str] = []
        self._answer: list[str] = []

    def push(self, text: str) -> tuple[str, str]:
        """What this text brings: of the reasoning, and of what follows it."""
        self._reader.add(text)
        while self._state():
            pass
        found = "".join(self._thought), "".join(self._answer)
        self._thought, self._answer = [], []
        return found

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text comes."""
        self._reader.final = True
        return self.push("")

    def _begin(self) -> bool:
        start, text = self._reasoning.start, self._reader.text.lstrip()
        if len(text) < len(start) and start.startswith(text) and not self._reader.final:
            return False
        if text.startswith(start):
            self._reader.skip_blank()
            self._reader.take(len(start))
            self._opened = True
        self._state = self._open if self._opened else self._rest
        return True

    def _open(self) -> bool:
        if self._reader.skip_blank():
            self._state = self._think
            return True
        return False

    def _think(self) -> bool:
        text, end = self._reader.seek(self._reasoning.end)
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        self._thought.append(shown)
        if end:
            self._state = self._between
        return bool(end)

    def _between(self) -> bool:
        if self._reader.skip_blank():
            self._state = self._rest
            return True
        return False

    def _rest(self) -> bool:
        self._answer.append(self._reader.take(len(self._reader.text)))
        return False
