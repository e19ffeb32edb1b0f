"""Phi 4 mini: functools and a list of objects."""

from __future__ import annotations

from penstock.text.tools.json_tools import JsonTools


class Phi4Mini(JsonTools):
    begin = "functools"
    signs = (begin,)
