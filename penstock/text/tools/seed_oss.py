"""Seed OSS: <seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>."""

from __future__ import annotations

from penstock.text.tools.function_tags import FunctionTags


class SeedOss(FunctionTags):
    around = ("<seed:tool_call>", "</seed:tool_call>")
    function = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    markers = around
    signs = (around[0],)
