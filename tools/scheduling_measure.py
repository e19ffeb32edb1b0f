"""Measure what docs/scheduling.md reports: every comparison that it needs, each policy by itself.

    python tools/scheduling_measure.py                     # all that is missing: many hours of one core
    python tools/scheduling_measure.py roles hfx-4task     # of these scenarios only
    python tools/scheduling_measure.py hfx-4task.search    # of this one, only the greatest rates
    python tools/scheduling_measure.py --list              # what there is, and with how many seeds

The first seed of everything comes before the second of anything: a result grows by a seed whenever it is its turn. It
is written when that seed is whole, and simulations until then are kept in a journal, so measuring can be stopped at any
time and goes on where it was. Journals are of the code that wrote them: take them away when decisions change. What no
claim is about, such as splits that are far from the best, has one seed.
`scheduling_report.py` makes the page of what there is, `scheduling_verify.py` sees whether it still comes out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
JOURNALS = ROOT / "build" / "scheduling"
ROLES = ("least_loaded", "least_loaded@colocated", "xllm", "unified")
CACHE = ("round_robin", "least_loaded", "rtp_llm", "unified")
PROMPT_MACHINES = (
    *(f"round_robin@{layout}" for layout in ("prefill-3", "split-4-4")),  # to be under what is enough
    *(f"round_robin@prefill-{n}" for n in (5, 6, 8, 12, 16)),
    *(f"rtp_llm@{layout}" for layout in ("prefill-2", "prefill-3", "split-4-4", "prefill-5", "prefill-6", "prefill-8")),
)

COLOCATION = ("separate", "online_first", "separate@colocated", "online_first@colocated", "xllm", "unified")

Scenario = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    Attributes:
        rates: requests/s; none for a search.
        seeds: at most.
        changed: a word for what is changed about the scenario; "" when nothing is.
        change: changes its content.
    """

    scenario: str
    policies: tuple[str, ...]
    rates: tuple[float, ...] = ()
    seeds: int = 3
    changed: str = ""
    change: Callable[[Scenario], None] = lambda content: None


def slower_reports(content: Scenario) -> None:
    content["heartbeat"] = {"every-ms": 200, "delay-ms": 20}


def wrong_times(content: Scenario) -> None:
    content["engine"]["step-time-error"] = 1.3


def half_speed(content: Scenario) -> None:
    """One instance takes twice as long as everybody believes."""
    first = content["instances"][0]
    first["count"] -= 1
    content["instances"].append({**first, "name": "slow", "count": 1, "slowdown": 2.0})


def host_tier(content: Scenario) -> None:
    """Each instance has a tier of KV cache in its host's memory: an eighth of what such a host of eight devices has."""
    content["engine"]["host-cache-memory"] = "128G"


def splits(*prefills: int) -> tuple[str, ...]:
    """Of eight instances, so many read prompts."""
    return tuple(f"least_loaded@split-{count}-{8 - count}" for count in prefills)


def intervals(seconds: float) -> Callable[[Scenario], None]:
    def change(content: Scenario) -> None:
        content["scaling"]["interval"] = seconds

    return change


CHANGES = (("heartbeat-200", slower_reports), ("step-times-30-percent-off", wrong_times), ("half-speed", half_speed))
COMPARISONS = (
    Comparison("roles-azure-code", (*ROLES, *splits(6, 7))),
    Comparison("roles-azure-code", splits(1, 2, 3, 5), seeds=1),
    Comparison(
        "hfx-4task",
        ("round_robin", "scorpio", "hfx", "hfx_scaling", "unified", "unified_scaling", "round_robin@eight"),
        (60, 90),
    ),
    Comparison(
        "hfx-disaggregated", ("round_robin", "hfx", "hfx_scaling", "unified", "unified_scaling"), (30, 60, 90, 130)
    ),
    Comparison("hfx-priority", ("round_robin", "hfx", "unified"), (84, 96)),
    Comparison("cache-mooncake-conversation", CACHE, (6.8, 13.6)),
    Comparison("cache-mooncake-synthetic", CACHE, (7.8, 15.6)),
    Comparison("hfx-2task", ("round_robin", "scorpio", "hfx", "hfx_scaling", "unified"), (30, 40, 60)),
    *(
        Comparison(
            scenario,
            tuple(f"{policy}@qwen-32b" for policy in ("round_robin", "scorpio", "hfx", "hfx_scaling", "unified")),
            rates,
        )
        for scenario, rates in (("hfx-4task", (10, 20, 30, 40)), ("hfx-2task", (5, 10, 20, 30)))
    ),
    Comparison("colocation-azure-code", COLOCATION),
    Comparison("hfx-single", ("round_robin", "hfx", "aladdin", "annealing", "unified")),
    Comparison("cache-mooncake-conversation", PROMPT_MACHINES, (13.6,)),
    Comparison("cache-mooncake-synthetic", PROMPT_MACHINES, (15.6,)),
    Comparison("roles-azure-code", ("least_loaded", "least_loaded@split-7-1", "xllm", "unified"), (54, 81)),
    *(
        Comparison(scenario, policies, rates, changed=changed, change=change)
        for scenario, policies, rates in (
            ("roles-azure-code", ("xllm", "unified"), (81,)),
            ("cache-mooncake-conversation", ("rtp_llm", "unified"), (13.6,)),
            ("hfx-4task", ("hfx", "unified"), (90,)),
        )
        for changed, change in CHANGES
    ),
    *(
        Comparison(scenario, ("round_robin", "rtp_llm", "unified"), (rate,), changed="host-128-gib", change=host_tier)
        for scenario, rate in (("cache-mooncake-conversation", 13.6), ("cache-mooncake-synthetic", 15.6))
    ),
    *(
        Comparison(
            "hfx-4task", ("hfx_scaling",), (90,), changed=f"interval-{1e3 * seconds:g}-ms", change=intervals(seconds)
        )
        for seconds in (0.5, 2, 5)
    ),
    Comparison("roles-azure-conv", (*ROLES, *splits(6, 7))),
    Comparison("roles-azure-conv", splits(1, 2, 3, 5), seeds=1),
    Comparison("colocation-tidal", COLOCATION),
    Comparison("cache-mooncake-conversation", CACHE),
    Comparison("hfx-4task", ("round_robin", "hfx", "scorpio", "aladdin", "annealing", "unified")),
    Comparison("cache-mooncake-synthetic", CACHE),
    Comparison("hfx-disaggregated", ("round_robin", "hfx", "unified")),
    Comparison("hfx-priority", ("round_robin", "hfx", "unified")),
    Comparison("hfx-2task", ("round_robin", "hfx", "scorpio", "unified")),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One policy of a comparison, with its result's file."""

    of: Comparison
    policy: str
    target: Path

    @property
    def title(self) -> str:
        return self.target.name.removesuffix(".json")

    def seeds(self) -> int:
        """That its result has at all of the rates; 0 without one."""
        if not self.target.exists():
            return 0
        document = json.loads(self.target.read_text(encoding="utf-8"))
        return len(document["seeds"]) if set(self.of.rates) <= set(document.get("rates") or ()) else 0


def measurements(folder: Path, names: Sequence[str] = ()) -> Iterator[Measurement]:
    """Those whose titles begin with a name, in the order of the names, then in that in which they matter."""
    every = list(_every(folder))
    chosen = [one for name in names for one in every if one.title.startswith(name)] if names else every
    yield from dict.fromkeys(chosen)


def _every(folder: Path) -> Iterator[Measurement]:
    for of in COMPARISONS:
        words = [of.scenario, *([of.changed] if of.changed else []), "rates" if of.rates else "search"]
        for policy in of.policies:
            yield Measurement(of, policy, folder / f"{'.'.join((*words, policy))}.json")


@contextmanager
def scenario_file(of: Comparison) -> Iterator[Path]:
    """A comparison's scenario, for the time being; from the project's folder."""
    path = Path("scenarios") / f"{of.scenario}.yaml"
    if not of.changed:
        yield path
        return
    content = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    of.change(content)
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / f"{path.stem}.{of.changed}.yaml"
        changed.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        yield changed


def run(one: Measurement, seeds: int, traces: str | None, journals: Path, *, again: bool) -> str:
    """Measure it, going on with its result if it has one, unless all of it is wanted again. Returns what went wrong;
    "" when nothing did."""
    journals.mkdir(parents=True, exist_ok=True)
    journal = journals / f"{one.title}.jsonl"
    if again:  # perhaps because decisions have changed
        journal.unlink(missing_ok=True)
    with scenario_file(one.of) as scenario, tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "result.json"
        command = [sys.executable, "-m", "penstock.cli.main", "sim", "compare", str(scenario)]
        command += ["--policies", one.policy, "--seeds", str(seeds), "--jobs", "1", "--json", str(written)]
        command += ["--journal", str(journal)]
        if one.target.exists() and not again:
            command += ["--resume", str(one.target)]
        if one.of.rates:
            command += ["--rates", ",".join(f"{rate:g}" for rate in one.of.rates)]
        if traces is not None:
            command += ["--traces", traces]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        one.target.parent.mkdir(parents=True, exist_ok=True)
        beside = one.target.with_suffix(".part")
        document = written.read_text(encoding="utf-8")
        if one.of.changed:  # it was there for the time being
            document = document.replace(f"{scenario.parent}/", "")
        beside.write_text(document, encoding="utf-8")
        beside.replace(one.target)
        journal.unlink(missing_ok=True)
    return ""


def measure(
    every: Sequence[Measurement],
    seeds: int,
    jobs: int,
    traces: str | None,
    journals: Path = JOURNALS,
    *,
    again: bool = False,
) -> int:
    """What is missing, a seed after the other, so many measurements at once. Returns how many failed.

    Args:
        journals: a folder, of simulations whose measurements are not whole.
        again: the first seed also of what has a result.
    """
    console, failed = Console(stderr=True), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        for count in range(1, seeds + 1):
            afresh = again and count == 1
            wanted = [one for one in every if count <= one.of.seeds and (afresh or one.seeds() == count - 1)]
            bar = progress.add_task(f"seed {count} of {seeds}", total=len(wanted))

            def work(one: Measurement, count: int = count, afresh: bool = afresh, bar: TaskID = bar) -> str:
                task = progress.add_task(one.title, total=None)
                try:
                    return run(one, count, traces, journals, again=afresh)
                finally:
                    progress.remove_task(task)
                    progress.advance(bar)

            for one, problem in zip(wanted, pool.map(work, wanted), strict=True):
                if problem:
                    failed += 1
                    progress.console.print(f"[red]{one.title}: {problem}[/red]")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of what --list lists, or how they begin (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (default: one for each core)")
    parser.add_argument("--traces", help="the folder of traces, as for `penstock sim`")
    parser.add_argument(
        "--journals",
        type=Path,
        default=JOURNALS,
        help="the folder of what was simulated for measurements that were stopped (default: build/scheduling)",
    )
    parser.add_argument("--again", action="store_true", help="also what has a result, from the first seed on")
    parser.add_argument("--list", action="store_true", help="measure nothing, and tell what there is")
    args = parser.parse_args(arguments)
    every = list(measurements(ROOT / "docs" / "scheduling" / "results", args.names))
    if args.list:
        table = Table("", "seeds")
        for one in every:
            table.add_row(one.title, str(one.seeds() or "-"))
        Console().print(table)
        return 0
    return 1 if measure(every, args.seeds, args.jobs, args.traces, args.journals.resolve(), again=args.again) else 0


if __name__ == "__main__":
    sys.exit(main())
