"""The tables of docs/deployment.md, made of the settings themselves.

usage: python tools/deployment_reference.py [--write]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.deployment import TABLES
from penstock.service.settings_file import Setting

PAGE = Path(__file__).parents[1] / "docs" / "deployment.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"
SECTIONS = (
    ("At the top", TABLES.top),
    ("of a model: at the top too, or in each entry of `models`", TABLES.model),
    ("an entry of `models`, besides", TABLES.models),
    ("`limits`", TABLES.limits),
    ("`priorities`, a list of targets by priority", TABLES.priorities),
    ("`instances`, a list of groups", TABLES.instances),
    ("`engine`, and each group of `instances`, on `cpu` and `cuda`", TABLES.engine),
    ("the same, on `modelled:` devices", TABLES.modelled),
    ("a group of `instances` that is a running vLLM server", TABLES.adopted),
    ("`transport`", TABLES.transport),
    ("`transport.tls`, with kind `tcp`", TABLES.tls),
    ("`transport.faults`, for tests", TABLES.faults),
    ("`transport.faults.partition`", TABLES.partition),
    ("`kv-pool`", TABLES.kv_pool),
    ("`restart`", TABLES.restart),
    ("`scaling`", TABLES.scaling),
    ("`cluster`", TABLES.cluster),
    ("`ray`, with `launcher: ray`", TABLES.ray),
)


def tables() -> str:
    """Markdown."""
    return "\n".join(_section(title, settings) for title, settings in SECTIONS)


def _section(title: str, settings: Sequence[Setting]) -> str:
    lines = [f"**{title}**\n", "| setting | default | |", "|---|---|---|"]
    for setting in settings:
        value = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
        value = ",".join(value) if isinstance(value, tuple) else value
        shown = "" if value in (None, "") else f"`{value}`"
        lines.append(f"| `{setting.name}` | {shown} | {getattr(setting, 'help', '')} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + tables() + "\n" + END + after


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(tables())
