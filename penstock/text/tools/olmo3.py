"""OLMo 3: <function_calls> and a line name(key=value, ...) for each call."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.text.tools.pythonic import Pythonic


class Olmo3(Pythonic):
    around = ("<function_calls>", "</function_calls>")
    markers = around
    signs = around
    inner = around

    @classmethod
    def openings(cls, names: Iterable[str]) -> list[str]:
        return [cls.around[0]]
