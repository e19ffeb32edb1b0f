"""A self-contained HTML page of figures and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #5d6778; --rule: #e3e6eb;
  --axis: #9aa3b2; --c0: #2f6fde; --c1: #e8710a; --c2: #17916c; --c3: #c2334d; --c4: #7b4fd6; --c5: #b07d05;
  --c6: #0b8fa8; --c7: #d6409f; --c8: #6b7280; --c9: #5b8c00; --down: #eceef2; }
@media (prefers-color-scheme: dark) { :root { --back: #12151b; --card: #1a1f28; --ink: #e4e8ef; --soft: #98a2b3;
  --rule: #2a313d; --axis: #5a6577; --c0: #6ea2ff; --c1: #ff9d4d; --c2: #3ecf9f; --c3: #ff6f86; --c4: #ab8bff;
  --c5: #e3b341; --c6: #45c8df; --c7: #f47fc7; --c8: #a0a8b5; --c9: #9bcb3c; --down: #232935; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 32px 24px 48px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; }
h1 { font-size: 24px; margin: 0 0 4px; letter-spacing: -0.01em; }
.sub { color: var(--soft); margin: 0 0 24px; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 16px; }
.numbers div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.numbers div { padding: 12px 16px; }
.numbers b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: 13px; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; padding: 16px 18px; overflow-x: auto; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin: 0 0 6px; }
figcaption small { display: block; font-weight: 400; color: var(--soft); font-size: 13px; }
@media (max-width: 860px) { .figures { grid-template-columns: minmax(0, 1fr); } body { padding: 20px 12px; } }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
table.words td, table.words th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
td i, .legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
details summary { cursor: pointer; color: var(--soft); margin-top: 8px; }
.legend { margin: 0 0 4px; font-size: 13px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 2px 16px; }
.legend i.tick { width: 3px; height: 13px; border-radius: 0; background: var(--ink); vertical-align: -2px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
text.x, text.label { text-anchor: middle; } text.y, text.name, text.end { text-anchor: end; }
svg text.value { fill: var(--ink); font-weight: 600; } svg text.name { fill: var(--ink); }
.grid { stroke: var(--rule); } .axis { stroke: var(--axis); }
.line { fill: none; stroke: var(--k); stroke-width: 2; stroke-linejoin: round; } .dashed { stroke-dasharray: 5 4; }
.dot { fill: var(--k); stroke: var(--k); stroke-width: 1.5; } .hollow { fill: var(--card); }
.mark { stroke: var(--axis); stroke-dasharray: 3 3; } .own { stroke: var(--k); }
.bar { fill: var(--k); } .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.bound { stroke: var(--ink); stroke-width: 3; }
.band { fill: transparent; } .band:hover { fill: var(--axis); opacity: 0.15; }
.any { fill: var(--c0); background: var(--c0); } .prefill { fill: var(--c1); background: var(--c1); }
.decode { fill: var(--c2); background: var(--c2); } .other { fill: var(--c4); background: var(--c4); }
.down { fill: var(--down); background: var(--down); }
.c0 { fill: var(--c0); background: var(--c0); } .c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); }
.c6 { fill: var(--c6); background: var(--c6); } .c9 { fill: var(--c9); background: var(--c9); }
.b0 { opacity: 0.22; } .b1 { opacity: 0.45; } .b2 { opacity: 0.7; }
"""


def page(title: str, subtitle: str, numbers: Sequence[tuple[str, str]], figures: Iterable[str]) -> str:
    """
    Args:
        numbers: (what it is, value), shown large.
        figures: markup, see `figure`; "" is left out.
    """
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in numbers)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>'
        f'{f"""<div class="numbers">{shown}</div>""" if shown else ""}'
        f'<div class="figures">{"".join(figures)}</div></main></body></html>\n'
    )


def figure(title: str, content: str, note: str = "", *, wide: bool = False) -> str:
    """Content with a caption; "" when it has none."""
    if not content:
        return ""
    small = f"<small>{escape(note)}</small>" if note else ""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><figcaption>{escape(title)}{small}</figcaption>{content}</figure>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[int] = (), *, words: bool = False
) -> str:
    """Text in rows and columns, the rows beginning with a colour if there are any; "" without rows.

    Args:
        words: what is in it is sentences, and no numbers.
    """
    if not rows:
        return ""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for i, row in enumerate(rows):
        swatch = f'<i style="background:var(--c{colours[i]})"></i>' if colours else ""
        lines.append(f"<tr><td>{swatch}" + "</td><td>".join(escape(cell) for cell in row) + "</td></tr>")
    kind = ' class="words"' if words else ""
    return f"<table{kind}>{''.join(lines)}</table>"


def folded(summary: str, content: str) -> str:
    """Shown when it is asked for; "" without content."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""
