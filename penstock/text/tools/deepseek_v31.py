"""DeepSeek V3.1: in a section of its own, for each call the function's name and its arguments."""

from __future__ import annotations

from penstock.text.tools.base import NAME
from penstock.text.tools.sections import SectionTools


class DeepSeekV31(SectionTools):
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    around = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    after_name = "<｜tool▁sep｜>"
    head = NAME + after_name
    markers = (*section, *around, after_name)
    signs = (around[0],)
