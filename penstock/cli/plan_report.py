"""What `penstock plan` found: for people, as JSON, and as a file that `penstock up` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.output import as_json, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.sim.plan import Candidate, Estimate, Search, Verdict
    from penstock.sim.scenario import Scenario
    from penstock.workload.requests import WorkRequest

SHOWN = 4  # candidates in the table that were not simulated
PARALLEL = "tensor-parallel-size"  # the engine's option for it
HOPELESS = 4  # times the misses that are allowed; then a simulation is given up
DEMO_LENGTH = 4096  # tokens: the longest sequence of the demo model, whose tokenizer a modelled deployment has


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be planned; it can be sent to another process.

    Attributes:
        scenario: without the candidate's instances.
        policy: the name of a bundle.
        scale: factor on the workload's own rate.
        rate: requests per second at that.
    """

    scenario: Scenario
    trace: Sequence[WorkRequest] | None
    policy: str
    seed: int
    scale: float
    rate: float
    target: float
    requests: Sequence[WorkRequest]


def plan_rows(search: Search) -> list[tuple[Candidate, Verdict | None]]:
    """Those that were tried, and the cheapest of the others that might do, by cost."""
    rows: list[tuple[Candidate, Verdict | None]] = [*search.verdicts.items()]
    rows += [(candidate, None) for candidate in search.untried()[:SHOWN]]
    return sorted(rows, key=lambda row: (row[0].cost, row[0].title))


def _seen(guess: Estimate, verdict: Verdict | None) -> dict[str, float | None]:
    """TTFT and TPOT, as simulated, or else as estimated."""
    if verdict is not None and verdict.result is not None:
        return {f"{n}_p{p}_ms": verdict.result.get(f"{n}_p{p}_ms") for n in ("ttft", "tpot") for p in (50, 90)}  # type: ignore[misc]
    values = {
        "ttft_p50_ms": guess.ttft_p50,
        "ttft_p90_ms": guess.ttft_p90,
        "tpot_p50_ms": guess.tpot_p50,
        "tpot_p90_ms": guess.tpot_p90,
    }
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def explained(search: Search, candidate: Candidate, verdict: Verdict | None, asked: Any) -> str:
    import numpy as np

    ttft, tpot = (float(np.median(targets)) * 1e3 for targets in (asked.ttft, asked.tpot))
    return explain(search.estimates[candidate], verdict, ttft, tpot)


def explain(guess: Estimate, verdict: Verdict | None, ttft_ms: float, tpot_ms: float) -> str:
    """One sentence: what limits a candidate."""
    if verdict is not None and verdict.result is None:
        return f"no scheduler could keep more than {verdict.bound:.0%} of the requests"
    if guess.sequences > guess.room:
        what = "memory has" if guess.room_by_memory else "max-num-seqs leaves"
        cause = f"{what} room for {guess.room:,.0f} sequences per instance, and more would decode at once"
    else:
        bound = "compute" if guess.compute >= guess.memory else "memory bandwidth"
        cause = (
            f"prompts take {min(guess.prefilling, 9.99):.0%} of the prefillers' time, and decoding is bound by {bound}"
        )
    seen = _seen(guess, verdict)
    ttft, tpot = seen["ttft_p90_ms"], seen["tpot_p90_ms"]
    over_ttft = (guess.ttft_p90 if ttft is None else ttft) / ttft_ms
    over_tpot = (guess.tpot_p90 if tpot is None else tpot) / tpot_ms
    name, ratio = ("TTFT", over_ttft) if over_ttft >= over_tpot else ("TPOT", over_tpot)
    how = f"{ratio:.0%} of its target" if ratio < 10 else "far beyond its target"
    if verdict is None:
        return f"not simulated; expected {name} p90 is {how}; {cause}"
    return f"{'kept, ' if verdict.kept else 'missed: '}{name} p90 is {how}; {cause}"


def plan_table(search: Search, problem: Problem) -> Any:
    from rich.table import Table

    table = Table(title=f"{problem.rate:.4g} requests/s, {problem.target:.0%} within both limits", title_justify="left")
    table.add_column("candidate", overflow="fold")
    for name in ("cost/h", "TTFT p50", "p90 ms", "TPOT p50", "p90 ms", "attained"):
        table.add_column(name, justify="right", no_wrap=True)
    for candidate, verdict in plan_rows(search):
        guess = search.estimates[candidate]
        simulated = verdict is not None and verdict.result is not None
        about = "" if simulated else "~"
        seen = [about + shown(value) if value is not None else "-" for value in _seen(guess, verdict).values()]
        style = "bold green" if candidate is search.winner else None if simulated else "dim"
        cells = [candidate.title, f"{candidate.cost:.2f}", *seen, _attained(search, candidate, verdict)]
        table.add_row(*cells, style=style)
    return table


def _attained(search: Search, candidate: Candidate, verdict: Verdict | None) -> str:
    if verdict is None:
        return f"~{search.estimates[candidate].attainment:.0%}"
    if verdict.result is None:
        return f"<= {verdict.bound:.0%}"
    if not verdict.result["complete"]:
        return f"< {1 - min(1.0, HOPELESS * (1 - search.target)):.0%}"
    return f"{verdict.result['attainment']:.1%}"


def summary(search: Search, problem: Problem) -> str:
    winner = search.winner
    if winner is None:
        return f"No candidate was found that keeps {problem.target:.0%}: more devices, more --tries or a lower --rate."
    used = " and ".join(f"{count} {device}" for device, count in winner.devices.items())
    text = f"Cheapest: {winner.title}, {used}, {winner.cost:.2f} an hour."
    rest = search.untried()
    if rest:
        text += f" {len(rest)} cheaper ones might do as well and were not simulated (--tries)."
    return text


def write_plan(path: str | None, search: Search, problem: Problem, asked: Any) -> None:
    if path is None:
        return
    winner = search.winner
    rows = [
        {
            "candidate": candidate.title,
            "instances": [
                {"device": p.kind.device, "tensor_parallel": p.kind.size, "role": p.role, "count": p.count}
                for p in candidate.parts
            ],
            "policy": problem.policy,
            "devices": candidate.devices,
            "cost_per_hour": candidate.cost,
            "simulated": verdict is not None and verdict.result is not None,
            "kept": None if verdict is None else verdict.kept,
            "attainment": None if verdict is None or verdict.result is None else verdict.result["attainment"],
            "complete": None if verdict is None or verdict.result is None else verdict.result["complete"],
            "bound": None if verdict is None else verdict.bound,
            "predicted_attainment": search.estimates[candidate].attainment,
            **_seen(search.estimates[candidate], verdict),
            "why": explained(search, candidate, verdict, asked),
        }
        for candidate, verdict in plan_rows(search)
    ]
    content = {
        "rate": problem.rate,
        "target": problem.target,
        "seed": problem.seed,
        "winner": None if winner is None else winner.title,
        "candidates": rows,
    }
    Path(path).write_text(as_json(content), encoding="utf-8")


def deployment_text(candidate: Candidate, policy: str) -> str:
    """A file for `penstock up`, with modelled devices."""
    first = candidate.groups[0]
    head = f"""\
# {candidate.title}, as found by `penstock plan`; on modelled devices, so on any machine.
#
# For real ones give `model` a checkpoint and each group its device, and leave out geometry, noise and kv-blocks.

model: demo                     # its tokenizer and vocabulary
host: 127.0.0.1
port: 8000

policy: {policy}

engine:
  geometry: {first.geometry}
  noise: {first.noise:g}
  max-model-len: {min(first.max_model_len, DEMO_LENGTH)}           # {DEMO_LENGTH} is the demo model's limit
  max-num-seqs: {first.max_num_seqs}
  enable-prefix-caching: {str(first.prefix_cache).lower()}

instances:
"""
    lines = []
    for part, group in zip(candidate.parts, candidate.groups, strict=True):
        lines += [
            f"  - name: {group.name}",
            f"    role: {group.role}",
            f"    count: {group.count}",
            f"    device: {group.device}",
            *([f"    {PARALLEL}: {part.kind.size}"] if part.kind.size > 1 else []),
            *([f"    kv-cache-dtype: {group.kv_cache_dtype}"] if group.kv_cache_dtype != "auto" else []),
            f"    max-num-batched-tokens: {group.token_budget}",
            f"    kv-blocks: {group.num_blocks}",
            *([f"    host-cache-memory: {group.host_blocks * group.block_bytes}"] if group.host_blocks else []),
        ]
    tail = ["", "transport:", "  kind: shared", "  lease: 5"] if candidate.disaggregated else []
    return head + "\n".join([*lines, *tail]) + "\n"
