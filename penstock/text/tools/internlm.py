"""InternLM 2.5 and 3: an object between markers of a plugin's action."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.text.tools.base import QUOTED, Frame
from penstock.text.tools.json_tools import JsonTools


class InternLm(JsonTools):
    begin, end = "<|action_start|><|plugin|>", "<|action_end|>"
    markers = ("<|action_start|>", "<|plugin|>", end)
    signs = ("<|action_start|>", "<|plugin|>")

    @classmethod
    def frames(cls, special: Collection[str]) -> Sequence[Frame]:
        return [Frame(cls.begin, f'\n{{"name": {QUOTED}, "parameters": ', f"}}{cls.end}")]
