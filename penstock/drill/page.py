"""The result of a drill as one self-contained page: what was broken when, and what clients and processes did then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.sim.page import figure, folded, page, table
from penstock.sim.svg import COLOURS, WIDTH, Axis, Line, Mark, Strip, line_chart, short, strip_chart

Document = Mapping[str, Any]

WIDE = 2 * WIDTH + 40
TIME = Axis("time (s)", low=0.0)
CLASSES = {"serves": "decode", "starts": "other", "gone": "down"}
LEGEND = (("serves", "decode"), ("starts", "other"), ("does not run", "down"), ("fault", "prefill"))
COLOUR = {"kill": 3, "freeze": 0, "slow": 5, "partition": 4, "disk-full": 6, "unmount": 9}
UNHIT = 8  # colour of what no fault accounts for
LEAST = 0.35  # seconds of a fault, as it is drawn
MOST_LINES = 10  # processes whose memory is drawn


def drill_page(document: Document) -> str:
    broken = document["broken"]
    title = f"{document['name']}: {'promises were broken' if broken else 'every promise was kept'}"
    done = [fault for fault in document["faults"] if fault["began_s"] is not None]
    subtitle = (
        f"{document['streams']:,} streams in {short(document['duration_s'])} s at {short(document['requests_per_s'])} "
        f"requests/s, {len(done)} faults, seed {document['seed']}"
    )
    figures = [
        figure("Broken promises", table(("what",), [[line] for line in broken]), wide=True),
        figure("Processes", _strips(document), "over time; a fault lasts until it is undone", wide=True),
        figure("Gaps of streams", _gaps(document), "each dot: seconds that a stream had no token, by when they began "
               "and what had met it; grey: with no fault, from 0.25 s on", wide=True),
        figure("Tokens", _tokens(document), "that clients received in each second; lines: faults", wide=True),
        figure("Recovery", _recovery(document), "the longest gap in ms of each stream that was met, by kind of fault"),
        figure("Latency in ms", _latency(document), "of all streams that completed; the undisturbed run had as many "
               "requests at once as are good for throughput"),
        figure("Memory", _memory(document), "MiB that each process has to itself"),
        figure("Not as it should be", _findings(document)),
        figure("Faults", _faults(document), wide=True),
    ]  # fmt: skip
    return page(title, subtitle, _numbers(document), figures)


def _numbers(document: Document) -> list[tuple[str, str]]:
    streams = document["streams"]
    shown = [
        ("streams completed", f"{document['completed']:,} of {streams:,}"),
        ("with the same tokens", f"{document['identical']:,}"),
        ("recovery p50", _ms(document["recovery_p50_ms"])),
        ("recovery p99", _ms(document["recovery_p99_ms"])),
        ("leaks", f"{document['leaks']:,}"),
    ]
    if document["excused"]:
        shown.insert(1, ("ended with their frontend", f"{document['excused']:,}"))
    return shown


def _strips(document: Document) -> str:
    end = max([document["duration_s"], *(rows[-1][0] for rows in document["states"].values() if rows)])
    rows = []
    for name in sorted(document["states"], key=_in_order):
        stretches = _stretches(document["states"][name], end)
        for fault in document["faults"]:
            if fault["target"] == name and fault["began_s"] is not None:
                stretches.append(_stretch(fault))
        rows.append(Strip(name, stretches))
    return strip_chart(rows, TIME, LEGEND, width=WIDE)


def _in_order(name: str) -> tuple[str, int]:
    group, _, number = name.rpartition("-")
    return (group, int(number)) if number.isdigit() else (name, 0)


def _stretches(rows: Sequence[tuple[float, str]], end: float) -> list[tuple[float, float, str, str]]:
    ends = [*(time for time, _ in rows[1:]), end]
    found = []
    for (since, state), until in zip(rows, ends, strict=True):
        begin = max(since, 0.0)
        if until > begin:
            found.append((begin, until, CLASSES[state], f"{state}, {begin:.1f} to {until:.1f} s"))
    return found


def _stretch(fault: Document) -> tuple[float, float, str, str]:
    begin, end = fault["began_s"], fault["ended_s"] if fault["ended_s"] is not None else fault["began_s"]
    title = f"{fault['kind']} at {begin:.1f} s, met {fault['met']} streams"
    return begin, max(end, begin + LEAST), "prefill", title


def _gaps(document: Document) -> str:
    by_kind: dict[str, list[tuple[float, float | None]]] = {}
    taken = set()
    for number, _, at, gap in document["hits"]:
        by_kind.setdefault(document["faults"][number]["kind"], []).append((at, gap))
        taken.add((at, gap))
    free = [(at, gap) for at, gap in document["waits"] if (at, gap) not in taken]
    lines = [Line("no fault", free, UNHIT, joined=False, dots=True)] if free else []
    for kind, points in sorted(by_kind.items()):
        lines.append(Line(kind, sorted(points), COLOUR[kind] % COLOURS, joined=False, dots=True))
    return line_chart(lines, TIME, Axis("gap (s)", low=0.0), width=WIDE)


def _tokens(document: Document) -> str:
    points = [(float(second), float(tokens)) for second, tokens in enumerate(document["tokens_per_s"])]
    marks = [
        Mark(fault["began_s"], f"{fault['kind']} {fault['target']}", COLOUR[fault["kind"]])
        for fault in document["faults"]
        if fault["began_s"] is not None
    ]
    return line_chart([Line("tokens/s", points, 2, steps=True)], TIME, Axis("tokens/s", low=0.0), marks, width=WIDE)


def _recovery(document: Document) -> str:
    rows = [
        [kind, f"{stats['count']:,}", *(short(stats[key]) for key in ("p50", "p90", "p99", "max"))]
        for kind, stats in document["recovery"].items()
    ]
    return table(("fault", "streams met", "p50", "p90", "p99", "most"), rows)


def _latency(document: Document) -> str:
    rows = []
    for key, label in (("ttft_ms", "first token"), ("itl_ms", "between tokens"), ("e2e_ms", "all of it")):
        for run in ("undisturbed", "disturbed"):
            stats = document[run][key] or {}
            rows.append([f"{label}, {run}", *(short(stats.get(name)) for name in ("p50", "p90", "p99", "max"))])
    return table(("", "p50", "p90", "p99", "most"), rows)


def _memory(document: Document) -> str:
    sizes = sorted(document["memory"].items(), key=lambda item: -max((size for _, size in item[1]), default=0))
    lines = [
        Line(name, [(max(0.0, time), size / 2**20) for time, size in rows], number % COLOURS)
        for number, (name, rows) in enumerate(sorted(sizes[:MOST_LINES], key=lambda item: _in_order(item[0])))
    ]
    return line_chart(lines, TIME, Axis("MiB", low=0.0))


def _findings(document: Document) -> str:
    rows = [["errors", f"{kind}: {count:,}"] for kind, count in document["errors"].items()]
    rows += [["failed", line] for line in document["failed"]]
    rows += [["other tokens", line] for line in document["wrong_streams"]]
    rows += [["leak", line] for line in document["leaks_found"]]
    rows += [["exception", f"{line} ({count:,})"] for line, count in document["exceptions"].items()]
    return table(("kind", "what"), rows)


def _faults(document: Document) -> str:
    rows = [
        [
            f"{fault['began_s']:.1f}" if fault["began_s"] is not None else f"({fault['planned_s']:.1f})",
            fault["kind"],
            fault["target"],
            short(fault["lasts_s"]) if fault["lasts_s"] else "",
            f"{fault['met']:,}",
            short(fault["longest_gap_ms"]),
            _after(fault),
        ]
        for fault in document["faults"]
    ]
    head = ("at (s)", "fault", "target", "lasts (s)", "streams met", "longest gap (ms)", "serves again after (s)")
    return table(head, rows[:20]) + folded("all", table(head, rows) if len(rows) > 20 else "")


def _after(fault: Document) -> str:
    if fault["began_s"] is None:
        return f"not done: {fault['why_not']}"
    return "never" if fault["back_s"] is None else f"{fault['back_s'] - fault['began_s']:.1f}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"
