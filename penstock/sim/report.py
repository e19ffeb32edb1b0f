"""Results of `penstock sim` as pages for people: of one simulation, and of policies compared. What a result lacks is
left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import Any

import numpy as np

from penstock.sim.page import figure, folded, page, table
from penstock.sim.result import Outcomes
from penstock.sim.svg import COLOURS, WIDTH, Axis, Bar, Line, Mark, Strip, bar_chart, line_chart, short, strip_chart

Result = Mapping[str, Any]

WIDE = 2 * WIDTH + 40
MOST_STRIPS = 128  # instances in the timeline
LOADS = (0.25, 0.5, 0.75)  # of the most that ran on any instance: shades
ROLES = {"any": "any", "prefill": "prefill", "decode": "decode", "encode": "other"}
TIME = Axis("time (s)", low=0.0)
SHARE = Axis("share of requests", low=0.0, high=1.0, percent=True)
KEPT = Axis("kept their targets", low=0.0, high=1.0, percent=True)
QUANTILES = ("mean", "p50", "p90", "p95", "p99")
TASK_COLUMNS = {
    "ttft_p50_ms": "TTFT p50 (ms)",
    "ttft_p95_ms": "TTFT p95 (ms)",
    "tpot_p50_ms": "TPOT p50 (ms)",
    "latency_mean_s": "mean latency (s)",
}
POINTS = 201  # of a cumulative distribution
MOST_BINS = 300  # of requests over time


def curves(these: Outcomes) -> dict[str, Any]:
    """What a page shows of single online requests: by measure and task evenly spaced quantiles, and each task's targets
    (null without), all in ms."""
    quantiles: dict[str, dict[str, list[float]]] = {"ttft_ms": {}, "tpot_ms": {}}
    for task in sorted(these.targets):
        good = these.online & these.good & (these.task == task)
        for name, column in (("ttft_ms", these.ttft), ("tpot_ms", these.tpot)):
            known = 1e3 * column[good & ~np.isnan(column)]
            quantiles[name][task] = np.quantile(known, np.linspace(0, 1, POINTS)).tolist() if len(known) else []
    targets = {
        task: {"ttft_ms": _finite_ms(ttft), "tpot_ms": _finite_ms(tpot)}
        for task, (ttft, tpot) in sorted(these.targets.items())
    }
    return {"quantiles": quantiles, "targets": targets}


def _finite_ms(seconds: float) -> float | None:
    return seconds * 1e3 if isfinite(seconds) else None


# --- one simulation


def run_page(result: Result) -> str:
    """A page about the result of `simulate`, with its `curves` if they are known."""
    rate, slices = result.get("rate"), result.get("slices")
    offered = f" at {short(rate)} requests/s" if rate is not None else ""
    title = f"{result.get('scenario') or 'Simulation'}: {result['policy']}{offered}"
    subtitle = (
        f"{result['requests']:,} requests in {short(result['duration'])} simulated seconds, "
        f"scale {short(result['scale'])}, seed {result['seed']}"
        + ("" if result.get("complete", True) else "; given up before its end, as too many had missed their targets")
        + (f"; in {slices['count']:,} slices that began {short(slices['warm_up'])} s early" if slices else "")
    )
    figures = [
        figure("Latency", _latencies(result), "of requests that did not fail"),
        _tasks(result),
        *_distributions(result),
        _tasks_over_time(result),
        _traffic(result),
        _queue(result),
        _strips(result),
        _cost(result),
        _changes(result),
        _regret(result),
        figure("Failures", table(("error", "requests"), _counts(result.get("errors") or {}))),
        _instances(result),
    ]
    return page(title, subtitle, list(_run_numbers(result)), figures)


def _run_numbers(result: Result) -> Iterator[tuple[str, str]]:
    yield "kept their targets", _percent(result.get("attainment"))
    if result.get("rate") is not None:
        yield "requests/s offered", short(result["rate"])
    yield "mean latency", f"{short(result.get('latency_mean_s'))} s"
    yield "output tokens/s", short(result.get("output_tokens_per_s"))
    if result.get("offline_tokens_per_s") is not None:
        yield "offline tokens/s", short(result["offline_tokens_per_s"])
    if result.get("prompt_tokens"):
        yield "of prompt tokens reused", _percent(result["reused_tokens"] / result["prompt_tokens"])
        if result.get("share_of_ideal") is not None:
            yield "of what a cache without end finds", _percent(result["share_of_ideal"])
        if result.get("loaded_tokens"):
            yield "loaded from below the devices", _percent(result["loaded_tokens"] / result["prompt_tokens"])
    yield "instance-seconds", short(result.get("instance_seconds"))
    if result.get("failed"):
        yield "requests failed", f"{result['failed']:,}"


def _latencies(result: Result) -> str:
    rows = []
    for name, unit, label in (("ttft", "ms", "TTFT"), ("tpot", "ms", "TPOT"), ("latency", "s", "latency")):
        rows.append([f"{label} ({unit})", *(short(result.get(f"{name}_{q}_{unit}")) for q in QUANTILES)])
    shares = [
        [f"{label} target", _percent(result[key])]
        for key, label in (("ttft_attainment", "TTFT"), ("tpot_attainment", "TPOT"), ("attainment", "both"))
        if result.get(key) is not None
    ]
    return table(("", *QUANTILES), rows) + table(("kept", "share of requests"), shares)


def _tasks(result: Result) -> str:
    tasks = result.get("tasks") or {}
    if len(tasks) < 2:
        return ""
    bars = [Bar(name, row.get("attainment"), i % COLOURS) for i, (name, row) in enumerate(tasks.items())]
    rows = [
        [name, f"{row.get('requests', 0):,}", *(short(row.get(key)) for key in TASK_COLUMNS)]
        for name, row in tasks.items()
    ]
    head = ("task", "requests", *TASK_COLUMNS.values())
    content = bar_chart(bars, Axis("kept their targets", high=1.0, percent=True))
    return figure("Tasks", content + table(head, rows, [bar.colour for bar in bars]))


def _tasks_over_time(result: Result) -> str:
    lines = task_lines(result.get("tasks_over_time"))
    return figure("Tasks over time", line_chart(lines, TIME, KEPT) if lines else "", "by arrival")


def task_lines(over_time: Result | None) -> list[Line]:
    """What `tasks_over_time` says, as lines in steps."""
    if not over_time:
        return []
    wide = over_time["seconds"]
    return [
        Line(task, [(i * wide, share) for i, share in enumerate(shares)], colour, steps=True)
        for colour, (task, shares) in enumerate(over_time["tasks"].items())
    ]


def _distributions(result: Result) -> Iterator[str]:
    """Cumulative shares over a logarithmic time, of each task where there are several."""
    for name, label in (("ttft_ms", "Time to first token"), ("tpot_ms", "Time per token after the first")):
        found = (result.get("quantiles") or {}).get(name) or {}
        lines = [Line(task or "all", _rising(values), i) for i, (task, values) in enumerate(found.items()) if values]
        targets = {task: limits[name] for task, limits in (result.get("targets") or {}).items()}
        marks = _targets(targets, list(found))
        yield figure(label, line_chart(lines, Axis(f"{label.lower()} (ms)", log=True), SHARE, marks))


def _targets(targets: Mapping[str, float | None], curves: Sequence[str]) -> list[Mark]:
    """A line for each target; in its task's colour unless it is the only one."""
    known = {task: limit for task, limit in targets.items() if limit is not None}
    if len(set(known.values())) == 1:
        limit = next(iter(known.values()))
        return [Mark(limit, f"target {limit:g} ms")]
    return [
        Mark(limit, f"{task}: target {limit:g} ms", curves.index(task) if task in curves else None)
        for task, limit in known.items()
    ]


def _rising(values: Sequence[float]) -> list[tuple[float, float | None]]:
    """Evenly spaced quantiles, the least and the greatest among them, as a cumulative distribution."""
    last = max(1, len(values) - 1)
    return [(max(value, 1e-3), i / last) for i, value in enumerate(values)]


def _traffic(result: Result) -> str:
    series = result.get("series") or {}
    lines = []
    for i, (key, label) in enumerate((("arrivals", "arrived"), ("attained", "kept their targets"))):
        counts = series.get(key) or []
        wide = max(1, -(-len(counts) // MOST_BINS))
        starts = range(0, len(counts), wide)
        points: list[tuple[float, float | None]] = [
            (at, sum(counts[at : at + wide]) / len(counts[at : at + wide])) for at in starts
        ]
        lines.append(Line(label, points, i, steps=True))
    note = "by arrival: what is between the two missed a target"
    return figure("Requests", line_chart(lines, TIME, Axis("requests/s", low=0.0)), note)


def _queue(result: Result) -> str:
    timeline = result.get("timeline") or {}
    at, places = timeline.get("at") or [], list((timeline.get("instances") or {}).values())
    waiting = [sum(place["waiting"][i] for place in places) for i in range(len(at))]
    running = [sum(place["running"][i] for place in places) for i in range(len(at))]
    lines = [
        Line(label, list(zip(at, values, strict=True)), i, steps=True)
        for i, (label, values) in enumerate(
            (
                ("waiting at instances", waiting),
                ("waiting at the master", timeline.get("queued") or []),
                ("running", running),
            )
        )
        if values and len(values) == len(at)
    ]
    return figure("Queue", line_chart(lines, TIME, Axis("requests", low=0.0)))


def _strips(result: Result) -> str:
    timeline = result.get("timeline") or {}
    at, places = timeline.get("at") or [], timeline.get("instances") or {}
    if not at or not places:
        return ""
    names = list(places)
    every = -(-len(names) // MOST_STRIPS)
    most: dict[str | None, int] = {}  # that ran at once on an instance of a role
    for place in places.values():
        for role, running in zip(place["role"], place["running"], strict=True):
            most[role] = max(most.get(role, 1), running)
    end = max(result.get("duration") or 0.0, at[-1])
    strips = [Strip(name, list(_stretches(places[name], at, end, most))) for name in names[::every]]
    legend = [(name, kind) for name, kind in ROLES.items() if name in most] + [("down", "down")] * (None in most)
    note = "colour: role; the stronger, the more requests run (full: as many as ever with that role)"
    note += f"; every {every}th of {len(names)}" if every > 1 else ""
    return figure("Instances", strip_chart(strips, TIME, legend, width=WIDE), note, wide=True)


def _stretches(
    place: Result, at: Sequence[float], end: float, most: Mapping[str | None, int]
) -> Iterator[tuple[float, float, str, str]]:
    """Samples that look the same, together."""
    ends = [*at[1:], end]

    def look(i: int) -> tuple[str | None, int]:
        role = place["role"][i]
        return role, sum(place["running"][i] > load * most[role] for load in LOADS)

    for (role, shade), group in groupby(range(len(at)), look):
        samples = list(group)
        begin, until = at[samples[0]], ends[samples[-1]]
        running = [place["running"][i] for i in samples]
        kind = "down" if role is None else f"{ROLES.get(role, 'other')} b{shade}"
        told = role or "down"
        if role is not None:
            told += (
                f", {min(running)} to {max(running)} running, up to {max(place['waiting'][i] for i in samples)} waiting"
            )
        yield begin, until, kind, f"{short(begin)} to {short(until)} s: {told}"


def _cost(result: Result) -> str:
    timeline = result.get("timeline") or {}
    at, counts = timeline.get("at") or [], timeline.get("roles") or {}
    order = list(ROLES)
    lines = [
        Line(role, list(zip(at, values, strict=True)), order.index(role) if role in order else 4, steps=True)
        for role, values in counts.items()
    ]
    if len(lines) > 1:
        total = [sum(values[i] for values in counts.values()) for i in range(len(at))]
        lines.append(Line("all", list(zip(at, total, strict=True)), 8, steps=True, dashed=True))
    cost = result.get("instance_seconds")
    note = f"{cost:,.0f} instance-seconds are paid for, with those of starting" if cost is not None else ""
    return figure("Cost", line_chart(lines, TIME, Axis("instances that serve", low=0.0)), note)


def _changes(result: Result) -> str:
    """How the number of instances changed, and their roles."""
    starts = [[path, f"{row['count']:,}", short(row["mean_s"])] for path, row in (result.get("starts") or {}).items()]
    rows = []
    for row in result.get("changes") or []:
        to = f" to {row['role']}" if row["role"] else ""
        rows.append([short(row["at"]), f"{row['what']} {row['instance']}{to}", row["reason"]])
    if not rows:
        return ""
    paths = table(("started by", "instances", "seconds"), starts)
    return figure("Changes of instances", paths + folded(f"show {len(rows):,}", table(("s", "what", "why"), rows)))


def _regret(result: Result) -> str:
    regret = result.get("regret") or {}
    rows = [[stage, short(value)] for stage, value in regret.items()]
    return figure(
        "Regret",
        table(("stage", "mean"), rows),
        "cost of the choice above the best candidate's, in the policy's own costs",
    )


def _counts(counts: Mapping[str, int]) -> list[list[str]]:
    return [[name, f"{count:,}"] for name, count in counts.items()]


def _instances(result: Result) -> str:
    rows = [
        [name, _percent(row.get("busy_share")), f"{row.get('steps', 0):,}", str(row.get("lives", ""))]
        for name, row in (result.get("instances") or {}).items()
    ]
    return figure("Instances one by one", folded("show", table(("name", "busy", "steps", "lives"), rows)))


# --- policies compared


def compare_page(document: Result) -> str:
    """A page about the document that `penstock sim compare` writes."""
    policies = document["policies"]
    colours = {name: i % COLOURS for i, name in enumerate(policies)}
    seeds = document.get("seeds") or []
    title = f"{document['scenario']}: policies compared"
    subtitle = (
        f"{'seed' if len(seeds) == 1 else 'median of seeds'} {', '.join(map(str, seeds))}; target: "
        f"{document['target']:.0%} of requests keep both limits"
    )
    figures = [
        _ranking(document, colours),
        *(_by_rate(policies, colours) if document.get("rates") else [_probes(document, colours)]),
        figure("In numbers", _compare_table(policies, colours), wide=True),
        _seeds(policies),
    ]
    return page(title, subtitle, [], figures)


def figure_of(document: Result) -> tuple[str, str]:
    """What a comparison is about: (field of a policy, label with unit)."""
    if document.get("vary") == "offline":
        return "offline_tokens_per_s", f"offline tokens/s while {document['target']:.0%} keep their targets"
    return "max_rate_90", f"greatest rate with {document['target']:.0%} attainment (requests/s)"


def _ranking(document: Result, colours: Mapping[str, int]) -> str:
    field, label = figure_of(document)
    bars = []
    for name, row in document["policies"].items():
        low, high = row.get("spread") or (None, None)
        bars.append(Bar(name, row.get(field), colours[name], low, high, row.get("bound_rate")))
    bound = "nobody can do better" if any(bar.bound is not None for bar in bars) else ""
    several = len(document.get("seeds") or []) > 1
    return figure(label[0].upper() + label[1:], bar_chart(bars, Axis(label), bound=bound), "with spread" * several)


def _probes(document: Result, colours: Mapping[str, int]) -> str:
    """Attainment of the whole simulations that the search made. Only the first seed's cover a wide range."""
    lines = []
    for name, row in document["policies"].items():
        whole = [p for p in row.get("probes") or [] if p["share"] == 1 and p["attainment"] is not None]
        for seed in dict.fromkeys(p["seed"] for p in whole):
            ours = sorted((p for p in whole if p["seed"] == seed), key=lambda p: p["rate"])
            points = [(p["rate"], p["attainment"]) for p in ours]
            hollow = frozenset(i for i, p in enumerate(ours) if not p["complete"])
            first = seed == whole[0]["seed"]
            lines.append(Line(name, points, colours[name], joined=first, dots=True, hollow=hollow))
    offline = document.get("vary") == "offline"
    x = Axis("offline requests/s" if offline else "requests/s")
    marks = [Mark(document["target"], f"target {document['target']:.0%}", level=True)]
    note = "lines: the first seed; hollow: given up with too many misses, the share is of what was over by then"
    return figure(
        "Attainment against rate", line_chart(lines, x, Axis("share of requests", high=1.0, percent=True), marks), note
    )


def _by_rate(policies: Result, colours: Mapping[str, int]) -> Iterator[str]:
    for key, title, axis in (
        ("attainment", "Attainment against rate", SHARE),
        ("mean_latency_s", "Mean latency against rate", Axis("seconds", low=0.0)),
        ("instance_seconds", "Cost against rate", Axis("instance-seconds", low=0.0)),
        ("ttft_p95_ms", "TTFT p95 against rate", Axis("ms", log=True)),
        ("offline_tokens_per_s", "Offline work against rate", Axis("offline tokens/s", low=0.0)),
    ):
        lines = [
            Line(name, [(r["rate"], r.get(key)) for r in row["rates"]], colours[name], dots=True)
            for name, row in policies.items()
            if any(r.get(key) is not None for r in row["rates"])
        ]
        yield figure(title, line_chart(lines, Axis("requests/s"), axis))


COLUMNS = {
    "max_rate_90": "rate (/s)",
    "attainment": "kept",
    "ttft_p50_ms": "TTFT p50 (ms)",
    "ttft_p95_ms": "TTFT p95 (ms)",
    "tpot_p50_ms": "TPOT p50 (ms)",
    "mean_latency_s": "latency (s)",
    "instance_seconds": "instance-s",
    "offline_tokens_per_s": "offline tokens/s",
    "reused_tokens": "reused tokens",
    "share_of_ideal": "of the ideal",
    "share_of_bound": "of the bound",
}
SHARES = ("attainment", "share_of_ideal", "share_of_bound")


def compare_rows(policies: Result) -> tuple[list[str], list[list[str]]]:
    """(heads, a row for each policy, or for each of its rates), without empty columns."""
    entries = [(name, entry) for name, row in policies.items() for entry in (row.get("rates") or [row])]
    columns = [c for c in COLUMNS if c == "attainment" or any(entry.get(c) for _, entry in entries)]
    rated = any(row.get("rates") for row in policies.values())
    rows = []
    for name, entry in entries:
        cells = [_percent(entry.get(c)) if c in SHARES else short(entry.get(c)) for c in columns]
        rows.append([name, *([short(entry["rate"])] if rated else []), *cells])
    return ["policy", *(["rate (/s)"] if rated else []), *(COLUMNS[c] for c in columns)], rows


def _compare_table(policies: Result, colours: Mapping[str, int]) -> str:
    head, rows = compare_rows(policies)
    return table(head, rows, [colours[row[0]] for row in rows])


def _seeds(policies: Result) -> str:
    rows = [
        [
            name,
            str(seed["seed"]),
            short(seed.get("max_rate_90")),
            short(seed.get("missed_rate")),
            _percent(seed.get("attainment")),
            short(seed.get("offline_tokens_per_s")),
            _percent(seed.get("share_of_bound")),
        ]
        for name, row in policies.items()
        for seed in row.get("seeds") or []
    ]
    head = ("policy", "seed", "kept at (/s)", "missed at (/s)", "attainment", "offline tokens/s", "of the bound")
    return figure("Seeds one by one", folded("show", table(head, rows)), wide=True)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
