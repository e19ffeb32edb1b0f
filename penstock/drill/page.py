"""The result of a drill as one self-contained page: what was broken when, and what clients and processes did then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.drill.faults import is_process
from penstock.sim.page import figure, folded, page, table
from penstock.sim.svg import COLOURS, NAMES, WIDTH, Axis, Line, Mark, Strip, line_chart, short, strip_chart

Document = Mapping[str, Any]

WIDE = 2 * WIDTH + 40
LETTER = 6.4  # pixels, of the names of strips
CLASSES = {"serves": "decode", "starts": "decode b1", "gone": "down"}
LEGEND = (("serves", "decode"), ("starts, or is not reached", "decode b1"), ("does not run", "down"))
COLOUR = {"kill": 3, "freeze": 0, "slow": 5, "partition": 4, "disk-full": 6, "unmount": 9}
UNHIT = 8  # colour of what no fault accounts for
LEAST = 0.35  # seconds of a fault, as it is drawn
SHOWN = 20  # faults; more are shown when they are asked for
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
        figure("Broken promises", table(("what",), [[line] for line in broken], words=True), wide=True),
        figure("Not as it should be", _findings(document), wide=True),
        figure("Processes", _strips(document), "and what else was struck; a fault lasts until it is undone", wide=True),
        figure("Streams", _streams(document), "that run, and those of them that have had no token for 0.25 s or more; "
               "lines: faults", wide=True),
        figure("Gaps of streams", _gaps(document), "each dot: seconds that a stream had no token, by when they began "
               "and what had met it; grey: with no fault, from 0.25 s on", wide=True),
        figure("Tokens", _tokens(document), "that clients received in each second; lines: faults", wide=True),
        figure("Recovery", _recovery(document), "the longest gap in ms of each stream that was met, by kind of fault"),
        figure("Latency in ms", _latency(document), "of all streams that completed; the undisturbed run had as many "
               "requests at once as are good for throughput"),
        figure("Faults", _faults(document), wide=True),
        figure("Memory", _memory(document), "MiB that each process has to itself", wide=True),
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


def _end(document: Document) -> float:
    """Of what is shown, in s."""
    followed = [*document["states"].values(), *document["memory"].values(), document["running"]]
    ends = [rows[-1][0] for rows in followed if rows]
    return float(max(document["duration_s"], len(document["tokens_per_s"]), *ends))


def _chart(document: Document, lines: Sequence[Line], label: str, marks: Sequence[Mark] = ()) -> str:
    """Over the same time as all wide ones, one below the other."""
    return line_chart(lines, _time(document), Axis(label, low=0.0), marks, width=WIDE, left=_left(document))


def _time(document: Document) -> Axis:
    return Axis("time (s)", low=0.0, high=_end(document))


def _left(document: Document) -> int:
    return max(NAMES, round(LETTER * max(map(len, [*_struck(document), *document["states"]]), default=0)) + 10)


def _struck(document: Document) -> list[str]:
    """Targets of faults."""
    return sorted({fault["target"] for fault in document["faults"] if fault["began_s"] is not None})


def _strips(document: Document) -> str:
    end = _end(document)
    things: dict[str, list[tuple[float, str]]] = {
        name: [] for name in _struck(document) if not is_process(name)
    }  # have no states
    rows = []
    for name, states in sorted({**document["states"], **things}.items(), key=lambda item: _in_order(item[0])):
        stretches = _stretches(states, end) if states else [(0.0, end, "decode", "works")]
        for fault in document["faults"]:
            if fault["target"] == name and fault["began_s"] is not None:
                stretches.append(_stretch(fault))
        rows.append(Strip(name, stretches))
    kinds = sorted({fault["kind"] for fault in document["faults"] if fault["began_s"] is not None})
    legend = [*LEGEND, *((kind, f"c{COLOUR[kind]}") for kind in kinds)]
    return strip_chart(rows, _time(document), legend, width=WIDE, left=_left(document))


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
    title = f"{fault['kind']} at {begin:.1f} s, met {fault['met']} streams, serves again after {_after(fault)} s"
    return begin, max(end, begin + LEAST), f"c{COLOUR[fault['kind']]}", title


def _streams(document: Document) -> str:
    running = [(row[0], float(row[1])) for row in document["running"]]
    waiting = [(row[0], float(row[2])) for row in document["running"]]
    lines = [Line("run", running, 2, steps=True), Line("without a token", waiting, 3, steps=True)]
    return _chart(document, lines, "streams", _marks(document))


def _marks(document: Document) -> list[Mark]:
    return [
        Mark(fault["began_s"], f"{fault['kind']} {fault['target']}", COLOUR[fault["kind"]])
        for fault in document["faults"]
        if fault["began_s"] is not None
    ]


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
    return _chart(document, lines, "gap (s)")


def _tokens(document: Document) -> str:
    points = [(float(second), float(tokens)) for second, tokens in enumerate(document["tokens_per_s"])]
    return _chart(document, [Line("tokens/s", points, 2, steps=True)], "tokens/s", _marks(document))


def _recovery(document: Document) -> str:
    rows = [
        [kind, f"{stats['count']:,}", *(short(stats[key]) for key in ("p50", "p90", "p99", "max"))]
        for kind, stats in document["recovery"].items()
    ]
    return table(("fault", "streams met", "p50", "p90", "p99", "most"), rows, [COLOUR[row[0]] for row in rows])


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
    return _chart(document, lines, "MiB")


def _findings(document: Document) -> str:
    rows = [["errors", f"{kind}: {count:,}"] for kind, count in document["errors"].items()]
    rows += [["failed", line] for line in document["failed"]]
    rows += [["other tokens", line] for line in document["wrong_streams"]]
    rows += [["leak", line] for line in document["leaks_found"]]
    rows += [["exception", f"{line} ({count:,})"] for line, count in document["exceptions"].items()]
    return table(("kind", "what"), rows, words=True)


def _faults(document: Document) -> str:
    rows = [
        [
            f"{fault['kind']} {fault['target']}",
            f"{fault['began_s']:.1f}" if fault["began_s"] is not None else f"({fault['planned_s']:.1f})",
            short(fault["lasts_s"]) if fault["lasts_s"] else "",
            f"{fault['met']:,}",
            short(fault["longest_gap_ms"]),
            _after(fault),
        ]
        for fault in document["faults"]
    ]
    colours = [COLOUR[fault["kind"]] for fault in document["faults"]]
    head = ("fault", "at (s)", "lasts (s)", "streams met", "longest gap (ms)", "serves again after (s)")
    more = table(head, rows[SHOWN:], colours[SHOWN:])
    return table(head, rows[:SHOWN], colours) + folded(f"{len(rows) - SHOWN} more", more)


def _after(fault: Document) -> str:
    if fault["began_s"] is None:
        return f"not done: {fault['why_not']}"
    return "never" if fault["back_s"] is None else f"{fault['back_s'] - fault['began_s']:.1f}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"
