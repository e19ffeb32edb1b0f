"""The measured parts of docs/scheduling.md, and its plots, made of what `penstock sim compare --json` wrote.

    python tools/scheduling_report.py            # writes them
    python tools/scheduling_report.py --check     # 1 when the page is not what the results say

Results are docs/scheduling/results/SCENARIO[.WORD...].json; see `scheduling_results`. What has no result is said to be
not measured. Everything outside the page's markers is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tools`, when run as a file

from penstock.core.errors import ConfigError
from penstock.sim.svg import short
from tools.scheduling_claims import CLAIMS, Claim, change, times
from tools.scheduling_plots import plots
from tools.scheduling_results import Measured, Results, Row

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end of results -->", re.DOTALL)
PLOTS = "scheduling"  # the folder beside the page
NONE = "–"
NOT_MEASURED = "not measured yet"
LATENCIES = {"ttft_p50_ms": "TTFT p50", "ttft_p95_ms": "TTFT p95", "tpot_p50_ms": "TPOT p50"}
FIELDS = {
    "attainment": "kept",
    "mean_latency_s": "latency",
    "instance_seconds": "cost",
    "ttft_p95_ms": "TTFT p95",
    "reused_tokens": "reuse",
}

Column = tuple[str, Callable[[str, Row], str]]  # its head, and what it says of a variant's row
SEEDS: Column = ("seeds", lambda name, row: str(len(row["seeds"])) if row.get("seeds") else NONE)


# --- the page


def page(text: str, results: Results) -> str:
    """The page as it should be. Raises ConfigError when a part has no place, or a place no part."""
    parts = {claim.key: _claim(claim, results) for claim in CLAIMS}
    parts |= {"unified": _unified(results), "sensitivity": _sensitivity(results)}
    found = MARKED.findall(text)
    if sorted(found) != sorted(parts):
        odd = sorted(set(found) ^ set(parts)) or [key for key in found if found.count(key) > 1]
        raise ConfigError(f"the page's markers: {', '.join(odd)}, there must be one for each of {', '.join(parts)}")

    def fill(match: re.Match[str]) -> str:
        content = "\n\n".join(parts[match[1]])
        return f"<!-- results: {match[1]} -->\n\n{content}\n\n<!-- end of results -->"

    return MARKED.sub(fill, text)


def drawn(results: Results) -> dict[str, str]:
    """File name -> content of each plot."""
    return {name: content for measured in results.measured for name, _, content in plots(measured)}


def _claim(claim: Claim, results: Results) -> Iterator[str]:
    here = [comparison.here(results) for comparison in claim.comparisons]
    told = [(NOT_MEASURED, NONE) if found is None else (found[0], str(found[1])) for found in here]
    rows = [[c.what, c.paper or NONE, *cells] for c, cells in zip(claim.comparisons, told, strict=True)]
    yield _markdown(["", "the paper", "here", "seeds"], rows, right=False)
    missing = [f"`{scenario}`" for scenario in claim.scenarios if scenario not in results.scenarios]
    if missing:
        yield f"No results yet of {', '.join(missing)}."
    for scenario in claim.scenarios:
        searched = results.search(scenario)
        for measured in (*([] if searched is None else [searched]), *results.rated(scenario)):
            yield from _tables(claim, measured, results)


def _tables(claim: Claim, measured: Measured, results: Results) -> Iterator[str]:
    """Everything about one comparison."""
    document = measured.document
    yield f"**`{measured.scenario}`**, {document.get('description') or 'as its file has it'}"
    yield f"```sh\n{_command(measured, results)}\n```"
    if not measured.rates:
        yield _searched(claim, measured, results)
    elif len(measured.rates) == 1:
        yield _rated(claim, measured, results, measured.rates)
    else:
        yield _kept(measured)
        everything = _rated(claim, measured, results, measured.rates)
        yield f"<details><summary>everything at each rate</summary>\n\n{everything}\n\n</details>"
    yield _note(measured)
    for name, title, _ in plots(measured):
        yield f"![{measured.scenario}: {title}]({PLOTS}/{name})"


def _command(measured: Measured, results: Results) -> str:
    """That measures it."""
    document = measured.document
    seeds = document.get("seeds") or [0]
    words = ["penstock sim compare", f"scenarios/{measured.scenario}.yaml", f"--seeds {len(seeds)}"]
    if seeds[0] != results.seed(measured.scenario):
        words.append(f"--seed {seeds[0]}")
    if measured.rates:
        words.append(f"--rates {','.join(f'{rate:g}' for rate in measured.rates)}")
    lines = [" ".join(words), f"    --policies {','.join(measured.policies)}"]
    return " \\\n".join(lines)


def _note(measured: Measured) -> str:
    document = measured.document
    if measured.rates:
        return "Medians over the seeds, in brackets the lowest and the highest. Multiples are over the seeds of both."
    finer = document.get("tolerance")
    told = f" A rate {finer:.1%} higher was missed." if finer and document.get("vary") != "offline" else ""
    return (
        "Each row is of the seed in the middle, the spread is over all of them; multiples are over the seeds of both. "
        f"Target: {document['target']:.0%} of requests keep both limits.{told}"
    )


# --- tables


def _searched(claim: Claim, measured: Measured, results: Results) -> str:
    """A row for each variant, at the greatest rate that it keeps up with."""
    offline = measured.document.get("vary") == "offline"
    columns: list[Column] = [
        ("policy", lambda name, row: f"`{name}`"),
        ("offline tokens/s" if offline else "greatest rate (/s)", lambda name, row: _figure(measured, row)),
        *(_multiple(measured, results, Measured.figure, baseline) for baseline in claim.baselines),
        SEEDS,
        ("spread", lambda name, row: _spread(row)),
        ("of the bound", lambda name, row: _percent(row.get("share_of_bound"))),
        ("offline requests/s", partial(_cell, "max_offline_rate")),
        *_served(offline),
    ]
    return _filled(columns, list(measured.policies.items()))


def _figure(measured: Measured, row: Row) -> str:
    figure = row.get(measured.field)
    open_end = figure is not None and "missed_rate" in row and row["missed_rate"] is None
    return f"{'≥ ' if open_end and measured.field == 'max_rate_90' else ''}{_number(figure)}"


def _rated(claim: Claim, measured: Measured, results: Results, rates: Sequence[float]) -> str:
    """A row for each variant and rate."""
    rows = [(name, measured.at(name, rate)) for rate in rates for name in measured.policies]
    columns: list[Column] = [
        ("policy", lambda name, row: f"`{name}`"),
        ("rate (/s)", partial(_cell, "rate")),
        ("kept", lambda name, row: _with_spread(row)),
        SEEDS,
        *(_rated_multiple(measured, results, *pair) for pair in claim.rated),
        *_served(offline=False),
    ]
    return _filled(columns, rows)


def _served(offline: bool) -> Iterator[Column]:
    for field, head in LATENCIES.items():
        yield f"{head} (ms)", partial(_cell, field)
    yield "latency (s)", partial(_cell, "mean_latency_s")
    yield "cost (instance-s)", partial(_cell, "instance_seconds")
    yield "reused tokens a request", lambda name, row: _number(_reused(row))
    if not offline:
        yield "offline tokens/s", partial(_cell, "offline_tokens_per_s")


def _cell(field: str, name: str, row: Row) -> str:
    return _number(row.get(field))


def _reused(row: Row) -> float | None:
    """None also when nothing is: not every workload has anything to reuse."""
    return row["reused_tokens"] / row["requests"] if row.get("reused_tokens") and row.get("requests") else None


def _multiple(
    measured: Measured, results: Results, value: Callable[[Measured, str], float | None], baseline: str
) -> Column:
    """Of the baseline on the same devices: in the file's own layout if it has them, else in the first."""

    def cell(name: str, row: Row) -> str:
        base = next(iter(results.alike(measured, baseline, name)), None)
        if base is None:
            return NONE
        both = measured.together((name, base))
        ours, theirs = value(both, name), value(both, base)
        return times(ours, theirs) if ours is not None and theirs else NONE

    return f"× `{baseline}`", cell


def _rated_multiple(measured: Measured, results: Results, field: str, baseline: str) -> Column:
    def cell(name: str, row: Row) -> str:
        def value(both: Measured, variant: str) -> float | None:
            return both.at(variant, row.get("rate", -1.0)).get(field)

        return _multiple(measured, results, value, baseline)[1](name, row)

    return f"{FIELDS[field]} × `{baseline}`", cell


def _kept(measured: Measured) -> str:
    """Attainment by policy and rate."""
    rows = [[f"`{name}`", *(_with_spread(measured.at(name, r)) for r in measured.rates)] for name in measured.policies]
    return _markdown(["kept, by requests/s", *(f"{rate:g}" for rate in measured.rates)], rows)


def _with_spread(row: Row) -> str:
    told = _percent(row.get("attainment"))
    low_high = row.get("spread")
    return told if not low_high or low_high[0] == low_high[1] else f"{told} ({_range(low_high, _percent)})"


# --- ours against all others, and what changes change


def _unified(results: Results) -> Iterator[str]:
    """`unified` beside the best of all others on the same devices, by every search."""
    rows, equal, better, missing = [], 0, 0, []
    for scenario in (scenario for claim in CLAIMS for scenario in claim.scenarios):
        measured = results.search(scenario)
        found = [] if measured is None else list(_ours(measured, results))
        if not found:
            missing.append(f"`{scenario}`")
        for workload, ratio, row in found:
            finer = 1 + (measured.document.get("tolerance") or 0.0) if measured else 1.0
            equal += ratio * finer >= 1 - 1e-9
            better += ratio >= finer - 1e-9
            rows.append([workload, *row])
    if rows:
        yield (
            f"At least as good on {equal} of {len(rows)} workloads, strictly better on {better}. A step of the search "
            "is the least difference that counts."
        )
        head = ["workload", "best of the others", "theirs", "ours", "ratio", "seeds", "spread of ours", "of the bound"]
        yield _markdown([*head, "cost"], rows)
    if missing:
        yield f"{NOT_MEASURED.capitalize()}: {', '.join(missing)}."


def _ours(measured: Measured, results: Results) -> Iterator[tuple[str, float, list[str]]]:
    """(workload, ratio, cells) for each kind of devices, with and without scaling."""
    for variant in measured.policies:
        policy, _, layout = variant.partition("@")
        if policy not in ("unified", "unified_scaling"):
            continue
        scales = policy.endswith("_scaling")
        alike = [v for other in _policies(measured) for v in results.alike(measured, other, variant)]
        others = [v for v in alike if not v.startswith("unified") and _scales(v) == scales and measured.figure(v)]
        if not others or results.alike(measured, policy, variant)[0] != variant:
            continue
        found = measured.hardest(variant, others)
        if found is None:
            continue
        best, ours, theirs = found.other, found.ours, found.theirs
        row, other = found.both.policies[variant], found.both.policies[best]
        cost = NONE
        if scales and row.get("instance_seconds") and other.get("instance_seconds"):
            cost = times(row["instance_seconds"], other["instance_seconds"])
        workload = f"`{measured.scenario}`" + f" on {layout}" * bool(layout) + ", with scaling" * scales
        cells = [f"`{best}`", _number(theirs), _number(ours), times(ours, theirs), SEEDS[1](variant, row)]
        yield workload, ours / theirs, [*cells, _spread(row), _percent(row.get("share_of_bound")), cost]


def _policies(measured: Measured) -> list[str]:
    return list(dict.fromkeys(variant.partition("@")[0] for variant in measured.policies))


def _scales(variant: str) -> bool:
    return variant.partition("@")[0].endswith("_scaling")


def _sensitivity(results: Results) -> Iterator[str]:
    """Every scenario of which something was changed, beside the unchanged one."""
    rows = [row for measured in results.measured if measured.changed for row in _changed(measured, results)]
    if not rows:
        yield f"{NOT_MEASURED.capitalize()}."
        return
    yield _markdown(["scenario", "changed", "policy", "what", "changed", "unchanged", "", "seeds"], rows)


def _changed(measured: Measured, results: Results) -> Iterator[list[str]]:
    usual = results.rated(measured.scenario) if measured.rates else [results.search(measured.scenario)]
    for name in measured.policies:
        head = [f"`{measured.scenario}`", measured.changed, f"`{name}`"]
        same = next((m for m in usual if m is not None and m.seeds(name) & measured.seeds(name)), None)
        seeds = measured.seeds(name) & (same.seeds(name) if same else measured.seeds(name))
        after, before = measured.together([name], seeds), same.together([name], seeds) if same else None
        for rate in measured.rates:
            rows = [m.at(name, rate) if m else {} for m in (after, before)]
            for what, value, shown in _changing(measured.changed):
                pair = [value(row) for row in rows]
                yield [*head, f"{what} at {rate:g}/s", *map(shown, pair), _change(*pair), str(len(seeds))]
        if not measured.rates:
            pair = [m.figure(name) if m else None for m in (after, before)]
            what = "offline tokens/s" if measured.field == "offline_tokens_per_s" else "greatest rate (/s)"
            yield [*head, what, *map(_number, pair), _change(*pair), str(len(seeds))]


def _changing(changed: str) -> Iterator[tuple[str, Callable[[Row], float | None], Callable[[float | None], str]]]:
    """What is looked at when a scenario was changed so: its name, where it is in a row, and how it is written."""
    if changed.startswith("host-"):  # more cache
        yield "TTFT p95 (ms)", lambda row: row.get("ttft_p95_ms"), _number
        yield "reused tokens a request", _reused, _number
    else:
        yield "kept", lambda row: row.get("attainment"), _percent


def _change(after: float | None, before: float | None) -> str:
    return change(after, before) if after is not None and before else NONE


# --- cells


def _filled(columns: Sequence[Column], rows: Sequence[tuple[str, Row]]) -> str:
    """Without the columns in which there is nothing."""
    cells = [[told(name, row) for _, told in columns] for name, row in rows]
    used = [i for i in range(len(columns)) if any(line[i] != NONE for line in cells)]
    return _markdown([columns[i][0] for i in used], [[line[i] for i in used] for line in cells])


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    rule = ["---", *(["---:" if right else "---"] * (len(head) - 1))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}" if abs(value) >= 100 else short(value)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def _spread(row: Row) -> str:
    """Of a search's figure; one seed has none."""
    return _range(row.get("spread"), short) if len(row.get("seeds") or ()) > 1 else NONE


def _range(low_high: Sequence[float] | None, told: Callable[[float], str]) -> str:
    return NONE if not low_high else f"{told(low_high[0])} to {told(low_high[1])}"


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when --check finds something that is not as it should be, 2 when the results cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and tell what would be written")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of scheduling.md")
    args = parser.parse_args(arguments)
    target, folder = args.docs / "scheduling.md", args.docs / PLOTS
    try:
        results = Results.read(folder / "results", ROOT / "scenarios")
        text = target.read_text(encoding="utf-8")
        wanted = {target: page(text, results), **{folder / name: content for name, content in drawn(results).items()}}
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    stale = [path for path in sorted(folder.glob("*.svg")) if path not in wanted]
    differing = [p for p, content in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != content]
    if args.check:
        for path in (*differing, *stale):
            print(f"{path}: not what the results say, run python tools/scheduling_report.py", file=sys.stderr)
        return 1 if differing or stale else 0
    for path in stale:
        path.unlink()
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
