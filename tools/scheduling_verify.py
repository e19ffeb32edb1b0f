"""Simulate again what docs/scheduling.md reports, and see whether it still comes out.

    python tools/scheduling_verify.py                     # of every result one simulation: hours of one core
    python tools/scheduling_verify.py hfx-4task.rates     # of these, named as in scheduling_measure.py

A simulation is a function of scenario, policy and seed, to the byte, so a result that comes out otherwise is older than
the code that decides, or than the engine's reports that decisions are made of. Of every policy it is the first seed, at
the greatest of the given rates or where the search ended. What differs is to be measured anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tools`, when run as a file

from penstock.cli.sim_compare import FIELDS
from penstock.sim.seeds import rows_of
from tools.scheduling_measure import ROOT, Measurement, measurements, scenario_file

Row = Mapping[str, Any]


def differences(one: Measurement, traces: str | None) -> list[str]:
    """What comes out otherwise than its result says, or why that cannot be said, in words.

    Raises:
        RuntimeError: it cannot be simulated.
    """
    reported = json.loads(one.target.read_text(encoding="utf-8"))
    policy = reported["policies"][one.policy]
    seed = reported["seeds"][0]
    if rates := policy.get("rates"):
        entry = max(rates, key=lambda each: float(each["rate"]))
        return _unlike(rows_of(entry)[seed], _at_rate(one, entry["rate"], seed, traces))
    row = rows_of(policy)[seed]
    if row["max_scale"] is None:
        return ["cannot be said: no load was kept, so there are no figures"]
    return _unlike(row, _at_scale(one, row["max_scale"], seed, traces))


def _at_rate(one: Measurement, rate: float, seed: int, traces: str | None) -> Row:
    options = ["--policies", one.policy, "--rates", repr(rate), "--no-bound", "--jobs", "1"]
    policy = _simulated(one, ["compare", *options], seed, traces)["policies"][one.policy]
    return rows_of(policy["rates"][0])[seed]


def _at_scale(one: Measurement, scale: float, seed: int, traces: str | None) -> Row:
    result = _simulated(one, ["run", "--policy", one.policy, "--rate-scale", repr(scale)], seed, traces)
    return {name: result.get(key) for name, key in FIELDS.items()}


def _simulated(one: Measurement, command: Sequence[str], seed: int, traces: str | None) -> dict[str, Any]:
    """What `penstock sim` writes."""
    with scenario_file(one.of) as scenario, tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "result.json"
        kind, *options = command
        options += ["--seed", str(seed), "--json", str(written)]
        if traces is not None:
            options += ["--traces", traces]
        words = [sys.executable, "-m", "penstock.cli.main", "sim", kind, str(scenario), *options]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}")
        document: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        return document


def _unlike(reported: Row, found: Row) -> list[str]:
    return [
        f"{name} {_shown(found[name])}, not {_shown(reported[name])}"
        for name in FIELDS
        if found[name] != reported[name]
    ]


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:,.6g}"


def verify(every: Sequence[Measurement], jobs: int, traces: str | None) -> dict[str, list[str]]:
    """By title, what differs of it, or why it cannot be said; nothing for what comes out as reported."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, list[str]] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("simulated again", total=len(every))

        def work(one: Measurement) -> list[str]:
            try:
                return differences(one, traces)
            except RuntimeError as error:
                return [str(error)]

        for one, unlike in zip(every, pool.map(work, every), strict=True):
            progress.advance(bar)
            if unlike:
                found[one.title] = unlike
                progress.console.print(f"[red]{one.title}[/red]: {'; '.join(unlike)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="of what scheduling_measure.py lists, or how they begin (default: all)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (default: one for each core)")
    parser.add_argument("--traces", help="the folder of traces, as for `penstock sim`")
    args = parser.parse_args(arguments)
    results = ROOT / "docs" / "scheduling" / "results"
    every = [one for one in measurements(results, args.names) if one.target.exists()]
    found = verify(every, args.jobs, args.traces)
    table = Table(f"{len(every) - len(found)} of {len(every)} come out as reported", "first difference")
    for title, unlike in found.items():
        table.add_row(title, unlike[0])
    Console().print(table)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
