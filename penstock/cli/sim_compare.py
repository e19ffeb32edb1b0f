"""`penstock sim compare`: policies side by side, in all processes that there are cores for."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.document import check_writable
from penstock.cli.options import Option, number
from penstock.cli.output import as_json, lost_processes, make_progress, write
from penstock.cli.scenario_file import Given, read_given
from penstock.cli.sim_workers import Offered, Run, Workers, layout_of, scales
from penstock.core.errors import ConfigError
from penstock.sim.baselines import POLICIES
from penstock.sim.report import compare_page, compare_rows, figure_of, run_page
from penstock.sim.search import STEP, Found, Ladder, SearchStep, Trial, at_rate, searched

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Result = Mapping[str, Any]

# of the workload, seen by the rough search: at least so much of it, so many seconds, and so many requests
SHORT, SHORT_SECONDS, SHORT_REQUESTS = 0.1, 60.0, 500
WHOLE = 0.5  # a share from which on the rough search is not worth it
FIRST_SEARCH, NEXT_SEARCH = 12, 4  # simulations that it usually takes, for the bars
WIDTH = 120  # columns of a table that no terminal shows
FIELDS = {  # of a policy, and what they are called in the result of one simulation
    "attainment": "attainment",
    "ttft_p50_ms": "ttft_p50_ms",
    "ttft_p95_ms": "ttft_p95_ms",
    "tpot_p50_ms": "tpot_p50_ms",
    "mean_latency_s": "latency_mean_s",
    "instance_seconds": "instance_seconds",
    "offline_tokens_per_s": "offline_tokens_per_s",
    "reused_tokens": "reused_tokens",
    "share_of_ideal": "share_of_ideal",
    "requests": "requests",
    "failed": "failed",
}


@lost_processes()
def compare(args: argparse.Namespace) -> int:
    """Search for each policy, or simulate given rates. Raises ConfigError before anything is written."""
    from rich.console import Console

    for flag in ("json", "html"):
        check_writable(getattr(args, flag), f"--{flag}")
    if args.save is not None:
        _check_folder(args.save)
    wanted = _read_wanted(args)
    console = Console(stderr=True)
    with (
        Workers(wanted.given, wanted.jobs, saves=wanted.saves) as workers,
        make_progress(console) as bars,
    ):
        document, results = asyncio.run(_compare(workers, bars, wanted))
    out = Console()
    Console(width=out.width if out.is_terminal else WIDTH).print(_table(document))
    if args.save is not None:
        _save(Path(args.save), wanted.given.scenario.name, results)
    if args.json is not None:
        write(args.json, as_json(document))
    if args.html is not None:
        write(args.html, compare_page(document))
    return 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        rates: instead of a search; () searches.
        saves: whether results are kept whole.
    """

    given: Given
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    bound: bool
    saves: bool
    jobs: int

    @property
    def varies_offline(self) -> bool:
        return self.given.scenario.workload.vary == "offline"

    def head(self) -> dict[str, Any]:
        """The document without its policies."""
        scenario = self.given.scenario
        return {
            "scenario": scenario.name,
            "description": scenario.description,
            "target": scenario.target,
            "vary": scenario.workload.vary,
            "seeds": list(self.seeds),
            "tolerance": round(STEP - 1, 6),
        } | ({"rates": list(self.rates)} if self.rates else {})


def _read_wanted(args: argparse.Namespace) -> Wanted:
    given = read_given(args)
    names = args.policies or tuple(POLICIES)
    for name in names:
        given.scenario.choose(name)  # raises before anything is simulated
    rate = Option("rates", number(0, 1e6), 1.0, "")
    return Wanted(
        given=given,
        variants=tuple(dict.fromkeys(names)),
        seeds=tuple(range(given.seed, given.seed + args.seeds)),
        rates=tuple(sorted({rate.read(each, "--rates") for each in args.rates or ()})),
        bound=args.bound and not args.rates and given.scenario.workload.vary == "online",
        saves=args.save is not None,
        jobs=args.jobs or len(os.sched_getaffinity(0)),
    )


# --- all policies at once


async def _compare(workers: Workers, bars: Progress, wanted: Wanted) -> tuple[dict[str, Any], dict[str, Result]]:
    """(the document, whole results by name)."""
    if wanted.rates:
        found = await asyncio.gather(*(_rated(workers, bars, wanted, name) for name in wanted.variants))
    else:
        bounds = _Bounds(workers, bars) if wanted.bound else None
        found = await asyncio.gather(*(_searched(workers, bars, wanted, name, bounds) for name in wanted.variants))
    document = wanted.head()
    document["policies"] = {name: row for name, (row, _) in zip(wanted.variants, found, strict=True)}
    return document, {name: result for _, results in found for name, result in results.items()}


class _Bounds:
    """Upper bounds on any policy's rate, once for each layout and seed, with scaling and without."""

    def __init__(self, workers: Workers, bars: Progress) -> None:
        self._workers, self._bars = workers, bars
        self._bar: TaskID | None = None
        self._found: dict[tuple[str, bool, int], asyncio.Task[float | None]] = {}

    def of(self, variant: str, seed: int) -> asyncio.Task[float | None]:
        """In requests/s; begun when it is first asked for."""
        key = (layout_of(variant), scales(variant), seed)
        if key not in self._found:
            if self._bar is None:
                self._bar = self._bars.add_task("bound", total=0)
            self._found[key] = asyncio.ensure_future(self._rate(variant, seed))
            self._bars.update(self._bar, total=len(self._found))
        return self._found[key]

    async def _rate(self, variant: str, seed: int) -> float | None:
        offered = await self._workers.offered(variant, seed)
        scale = await self._workers.bound(variant, seed)
        assert self._bar is not None
        self._bars.advance(self._bar)
        return None if scale is None else scale * offered.native_rate


# --- a search


@dataclass(frozen=True, slots=True)
class Sought:
    """What was found for one policy and seed.

    Attributes:
        row: what is reported of it.
        probes: every simulation that the search asked for, for the document.
        rung: see `Found`.
        result: at the greatest scale; None when there is none.
    """

    row: dict[str, Any]
    probes: list[dict[str, Any]]
    rung: int
    result: Result | None = None


def _row(
    found: Found, result: Result | None, native_rate: float, bound_rate: float | None, vary: str
) -> dict[str, Any]:
    """What is reported of a search."""
    at_best = result or {}
    rate = at_best.get("rate")
    return {
        "max_rate_90": rate if vary == "online" else None,
        **{name: at_best.get(key) for name, key in FIELDS.items()},
        "share_of_bound": rate / bound_rate if rate is not None and bound_rate else None,
        "bound_rate": bound_rate,
        "max_scale": found.best,
        "missed_scale": found.missed,
        "missed_rate": None if found.missed is None else found.missed * native_rate,
    } | ({"max_offline_rate": rate} if vary == "offline" else {})


@dataclass(frozen=True, slots=True)
class _Lab:
    """Simulates one policy with one seed; see `search.Lab`."""

    workers: Workers
    wanted: Wanted
    variant: str
    seed: int
    results: dict[tuple[float, float], Result | None] = field(default_factory=dict)

    async def measure(self, scale: float, share: float) -> Trial:
        result = await self.workers.run(Run(self.variant, self.seed, scale, share))
        self.results[scale, share] = result
        if result is None or result["attainment"] is None:
            return Trial(kept=False, attainment=0.0, worth=0.0)
        kept = result["complete"] and result["attainment"] >= self.wanted.given.scenario.target
        worth = result["offline_tokens_per_s"] if self.wanted.varies_offline else scale
        return Trial(kept, result["attainment"], worth or 0.0)

    def guess(self, scale: float, share: float) -> None:
        self.workers.guess(Run(self.variant, self.seed, scale, share))


async def _searched(
    workers: Workers, bars: Progress, wanted: Wanted, variant: str, bounds: _Bounds | None
) -> tuple[dict[str, Any], dict[str, Result]]:
    """One policy: the first seed's result is the starting point of the others. (Its row, its result at the figure by
    its name.)"""
    first, *others = wanted.seeds
    total = FIRST_SEARCH + NEXT_SEARCH * len(others)
    bar = bars.add_task(variant, total=total)

    def tell(rate: float, probe: SearchStep) -> None:
        kept = "kept" if probe.outcome.kept else "missed"
        bars.update(bar, advance=1, description=f"{variant} {'' if probe.share == 1 else '~'}{rate:.3g}/s {kept}")

    sought = {first: await _seek(workers, wanted, variant, first, None, bounds, tell)}
    near = sought[first].rung
    found = await asyncio.gather(*(_seek(workers, wanted, variant, seed, near, bounds, tell) for seed in others))
    sought |= dict(zip(others, found, strict=True))
    bars.update(bar, total=total, completed=total, description=variant)
    rows = {seed: sought[seed].row for seed in wanted.seeds}
    row = searched(rows, "offline_tokens_per_s" if wanted.varies_offline else "max_rate_90")
    row["probes"] = [probe for seed in wanted.seeds for probe in sought[seed].probes]
    result = sought[row["seed"]].result
    return row, {} if result is None else {f"{variant}-seed{row['seed']}": result}


async def _seek(
    workers: Workers,
    wanted: Wanted,
    variant: str,
    seed: int,
    near: int | None,
    bounds: _Bounds | None,
    tell: Callable[[float, SearchStep], None],
) -> Sought:
    """`near`: see `Ladder.search`."""
    offered = await workers.offered(variant, seed)
    bound = bounds.of(variant, seed) if bounds is not None else None
    workload = wanted.given.scenario.workload
    lab = _Lab(workers, wanted, variant, seed)
    ladder = Ladder(
        lab,
        start=min(workload.scale, workload.most_scale),
        target=wanted.given.scenario.target,
        most=workload.most_scale,
        told=lambda probe: tell(probe.scale * offered.native_rate, probe),
    )
    found = await ladder.search(_short(offered), near)
    probes = [_probe(seed, probe, lab.results[probe.scale, probe.share], offered) for probe in found.probes]
    result = None if found.best is None else lab.results[found.best, 1.0]
    bound_rate = await bound if bound is not None else None
    return Sought(_row(found, result, offered.native_rate, bound_rate, workload.vary), probes, found.rung, result)


def _short(offered: Offered) -> float:
    """The share of the workload that the rough search sees."""
    share = max(SHORT, SHORT_SECONDS / offered.seconds, SHORT_REQUESTS / offered.requests)
    return share if share < WHOLE else 1.0


def _probe(seed: int, probe: SearchStep, result: Result | None, offered: Offered) -> dict[str, Any]:
    """The attainment of one that is not complete is of what was over when it was given up."""
    return {
        "seed": seed,
        "scale": probe.scale,
        "rate": probe.scale * offered.native_rate,
        "share": probe.share,
        "attainment": None if result is None else result["attainment"],
        "offline_tokens_per_s": None if result is None else result.get("offline_tokens_per_s"),
        "complete": result is not None and result["complete"],
        "kept": probe.outcome.kept,
    }


# --- given rates


async def _rated(
    workers: Workers, bars: Progress, wanted: Wanted, variant: str
) -> tuple[dict[str, Any], dict[str, Result]]:
    """One policy at every rate, with every seed. (Its row, results of the first seed by name.)"""
    first = wanted.seeds[0]
    pairs = [(rate, seed) for rate in wanted.rates for seed in wanted.seeds]
    bar = bars.add_task(variant, total=len(pairs))

    async def simulate(rate: float, seed: int) -> Result:
        offered = await workers.offered(variant, seed)
        result = await workers.run(Run(variant, seed, rate / offered.native_rate, patient=True))
        if result is None:
            raise ConfigError(f"--rates: {rate:g}, at which nobody comes in the scenario's time")
        bars.advance(bar)
        return result

    results = dict(zip(pairs, await asyncio.gather(*(simulate(*pair) for pair in pairs)), strict=True))
    joins = len({task.start for task in wanted.given.scenario.workload.tasks}) > 1
    rates = []
    for rate in wanted.rates:
        rates.append(at_rate(rate, {seed: _figures(results[rate, seed]) for seed in wanted.seeds}))
        if joins:  # what changes when others join
            rates[-1]["tasks_over_time"] = results[rate, first]["tasks_over_time"]
    nothing = dict.fromkeys(("max_rate_90", *FIELDS, "share_of_bound"))
    kept = {f"{variant}-{rate:g}-seed{first}": results[rate, first] for rate, seed in results if seed == first}
    return {**nothing, "rates": rates}, kept


def _figures(result: Result) -> dict[str, Any]:
    return {name: result.get(key) for name, key in FIELDS.items()}


# --- output


def _table(document: Result) -> Any:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    title = f"{document['scenario']}: " + ("by rate" if document.get("rates") else figure_of(document)[1])
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE)
    head, rows = compare_rows(document["policies"])
    for i, name in enumerate(head):
        table.add_column(name.replace(" ", "\n"), justify="right" if i else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    if len(document["seeds"]) > 1:
        told = "each row is of the seed in the middle" if not document.get("rates") else "medians"
        table.caption = f"seeds {', '.join(map(str, document['seeds']))}; {told}"
    return table


def _check_folder(path: str) -> None:
    """Raises ConfigError when no files could be written there."""
    folder = Path(path)
    if not folder.exists():
        check_writable(folder, "--save")
    elif not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--save: {path} is no folder that can be written to", "--save")


def _save(folder: Path, scenario: str, results: Mapping[str, Result]) -> None:
    """A JSON file and a page for each."""
    folder.mkdir(exist_ok=True)
    for name, result in results.items():
        write(folder / f"{name}.json", as_json(result))
        write(folder / f"{name}.html", run_page({"scenario": scenario, **result}))
