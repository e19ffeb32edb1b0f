"""DeepSeek V3 and R1: in a section of its own, for each call a type, the function's name, and its arguments in a block
of JSON."""

from __future__ import annotations

from penstock.text.tools.base import NAME
from penstock.text.tools.sections import SectionTools


class DeepSeekV3(SectionTools):
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    around = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    after_name = "\n"
    head, tail, between = f"function<｜tool▁sep｜>{NAME}\n```json\n", "\n```", "\n"
    markers = (*section, *around, "<｜tool▁sep｜>")
    signs = (around[0], "```json")

    def name(self, header: str) -> str:
        return header.rpartition("<｜tool▁sep｜>")[2].strip()
