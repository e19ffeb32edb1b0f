"""Kimi K2: in a section of its own, for each call an id such as functions.NAME:0, and its arguments."""

from __future__ import annotations

from penstock.text.tools.base import NAME, NUMBER
from penstock.text.tools.sections import SectionTools


class KimiK2(SectionTools):
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    around = ("<|tool_call_begin|>", "<|tool_call_end|>")
    after_name = "<|tool_call_argument_begin|>"
    head = f"functions.{NAME}:{NUMBER}{after_name}"
    markers = (*section, *around, after_name)
    signs = (section[0],)

    def name(self, header: str) -> str:
        return header.strip().removeprefix("functions.").split(":")[0]

    @staticmethod
    def call_id(name: str, index: int, unique: str) -> str:
        return f"functions.{name}:{index}"
