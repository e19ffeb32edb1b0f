"""`penstock plan`: the cheapest deployment of given devices that keeps the targets of a trace or a scenario.

Every way to use the devices is estimated by the step-time model; the most promising are simulated, until none that
costs less is left to try. With --objective it is instead about one model on all devices: how many share a layer, and
how many groups share the experts; with --objective images which stages of a trace's requests are together, one device
to an instance.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import plan_layout, plan_route
from penstock.cli.options import Option, add_flag, integer, number, one_of, read_text
from penstock.cli.output import lost_processes, make_progress
from penstock.cli.plan_report import (
    HOPELESS,
    PARALLEL,
    Problem,
    deployment_text,
    explained,
    plan_rows,
    plan_table,
    summary,
    write_plan,
)
from penstock.core.errors import ConfigError
from penstock.core.layout import KV_DTYPES

if TYPE_CHECKING:
    from penstock.sim.plan import Candidate, Kind, Search, Verdict
    from penstock.sim.scenario import InstanceGroup, Scenario

# of a device for an hour, as a customer of a cloud without a contract may pay in dollars; only their ratios matter
PRICES = {"h200": 3.5, "h100": 2.5, "a100": 1.6, "ascend-910b": 1.5, "h20": 1.2, "l40s": 0.9, "l4": 0.5}
SIZES = (1, 2, 4, 8)  # devices that a layer is spread over

POLICY = "unified"  # the default of deployments: it changes the roles that are planned when others are needed

FLAGS = (
    Option("geometry", str, None, "the model (default: the scenario's, or llama-3.1-8b)"),
    Option("kv-cache-dtype", one_of(*KV_DTYPES), None, "data type of KV (default: the scenario's, or auto)"),
    Option("ttft-ms", number(0), None, "time to first token"),
    Option("tpot-ms", number(0), None, "mean time per token after it"),
    Option("rate", number(0, 1e6), None, "requests per second (default: the trace's or the scenario's own)"),
    Option("target", number(0, 1), None, "share of requests that must keep both limits"),
    Option("max-model-len", integer(2), None, "prompt and output tokens of one sequence"),
    Option("duration", number(0, 1e6), 120.0, "seconds of arrivals that are simulated"),
    Option("policy", str, None, f"what decides (default: {POLICY})"),
    Option("tries", integer(1, 10_000), 12, "candidates that are simulated at most"),
    Option("jobs", integer(1, 1024), None, "processes at once (default: as many as there are cores)"),
    Option("seed", integer(0), None, "of traffic and step times"),
)


def add_parser(commands: Any) -> None:
    """Adds `plan` to the command line."""
    parser = commands.add_parser(
        "plan", allow_abbrev=False, help="find the cheapest deployment for a workload", description=__doc__
    )
    parser.add_argument("--trace", metavar="FILE", help="recorded traffic")
    parser.add_argument("--scenario", metavar="FILE", help="or the workload of a scenario, without its instances")
    parser.add_argument("--traces", metavar="DIR", help="the folder of a scenario's traces")
    parser.add_argument("--devices", metavar="NAME:COUNT,...", required=True, help="what there is, as h200:16,l4:8")
    parser.add_argument(
        "--price", metavar="NAME=NUMBER", action="append", default=[], help="of a device for an hour, as h200=3.5"
    )
    for option in (*FLAGS, *plan_layout.FLAGS):
        described = "" if option.default is None else f" (default: {option.default:g})"
        add_flag(parser, option.name, option.convert, option.default, option.help + described)
    parser.add_argument("--json", metavar="OUT", help="write everything that was found there")
    parser.add_argument("--write", metavar="FILE", help="write a deployment file for the winner there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, show what was found, and write it. 1 when no candidate keeps the target. Raises ConfigError."""
    from rich.console import Console

    from penstock.bench.document import check_writable
    from penstock.sim.plan import Search, candidates, demands, estimate

    check_writable(args.json, "--json")
    check_writable(args.write, "--write")
    values = {option.key: getattr(args, option.key) for option in (*FLAGS, *plan_layout.FLAGS)}
    available = _devices(args.devices)
    if values["objective"] not in (None, plan_layout.IMAGES):
        _refuse_beside_objective(args)
        return plan_layout.choose(values, available, args.json)
    prices = PRICES | _prices(args.price, available)
    document = _document(args, values)
    if values["objective"] == plan_layout.IMAGES:
        return _choose_route(args, values, available, document, prices)
    kinds, unfit = _kinds(document, args.scenario or "plan", available, prices, args.write is not None)
    problem = _problem(args, values, document, kinds)
    asked = demands(problem.requests, problem.rate, problem.scenario.workload.max_tokens)
    if not len(asked.at):
        raise ConfigError("--scenario: it has no online requests, and only those have targets", "scenario")
    known: dict[tuple[str, int], Any] = {}
    found = candidates(kinds, available)
    search = Search(found, {c: estimate(c, asked, known) for c in found}, problem.target, values["tries"])
    console = Console(stderr=True)
    console.print(f"[dim]{len(found):,} candidates at {problem.rate:.3g} requests/s[/dim]")
    _simulate_all(search, problem, values["jobs"] or os.cpu_count() or 1, console)
    out = Console()
    out.print(plan_table(search, problem))
    for candidate, verdict in plan_rows(search):
        out.print(f"{candidate.title}: {explained(search, candidate, verdict, asked)}", highlight=False)
    for reason in unfit:
        out.print(f"left out: {reason}", highlight=False)
    winner = search.winner
    out.print(summary(search, problem), highlight=False)
    write_plan(args.json, search, problem, asked)
    if winner is not None and args.write is not None:
        Path(args.write).write_text(deployment_text(winner, problem.policy), encoding="utf-8")
    return 0 if winner is not None else 1


def _choose_route(
    args: argparse.Namespace,
    values: Mapping[str, Any],
    available: Mapping[str, int],
    document: Mapping[str, Any],
    prices: Mapping[str, float],
) -> int:
    if len(available) > 1:
        raise ConfigError(f"--devices: {', '.join(available)}, allowed with --objective is one kind", "devices")
    if args.write is not None:
        raise ConfigError(f"--write: {args.write}, allowed only without --objective", "write")
    ((device, count),) = available.items()
    kinds, _ = _kinds(document, args.scenario or "plan", {device: 1}, prices, False)
    return plan_route.choose(_problem(args, values, document, kinds), kinds[0], count, args.json)


# --- what was asked


def _refuse_beside_objective(args: argparse.Namespace) -> None:
    for name in ("trace", "scenario", "write", "rate", "policy"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name}: {getattr(args, name)}, allowed only without --objective", name)


def _devices(text: str) -> dict[str, int]:
    """Name -> how many. Raises ConfigError."""
    from penstock.sched.steptime import DEVICES

    found: dict[str, int] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, _, count = part.partition(":")
        one_of_them = Option("devices", one_of(*DEVICES), None, "")
        found[one_of_them.read(name, f"--devices: {part!r}")] = Option("devices", integer(1, 1024), 1, "").read(
            count or "1", f"--devices: {part!r}"
        )
    if not found:
        raise ConfigError(f"--devices: {text!r}, allowed is a list such as h200:16,l4:8", "devices")
    return found


def _prices(texts: Sequence[str], available: Mapping[str, int]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, equals, amount = text.partition("=")
        if not equals or name not in available:
            raise ConfigError(f"--price: {text!r}, allowed is NAME=NUMBER of {', '.join(available)}", "price")
        found[name] = Option("price", number(0), 1.0, "").read(amount, f"--price: {text!r}")
    return found


def _document(args: argparse.Namespace, values: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario file's content with everything in it but instances."""
    import yaml

    from penstock.sched.steptime import GEOMETRIES

    if (args.trace is None) == (args.scenario is None):
        raise ConfigError("--trace: one of --trace and --scenario is needed, and not both", "trace")
    if args.scenario is None:
        missing = [name for name in ("ttft-ms", "tpot-ms") if values[name.replace("-", "_")] is None]
        if missing:
            raise ConfigError(f"--{missing[0]}: needed with --trace", missing[0])
        document: dict[str, Any] = {"workload": {"trace": str(args.trace)}}
    else:
        document = yaml.safe_load(_checked_scenario(args.scenario))
    for name in ("layouts", "failures", "scaling", "policy"):
        document.pop(name, None)
    engine = {str(k).replace("_", "-"): v for k, v in (document.get("engine") or {}).items()}
    for name in ("kv-blocks", "max-num-batched-tokens", "device"):  # what fits one device does not fit another
        engine.pop(name, None)
    geometry = Option("geometry", one_of(*GEOMETRIES), None, "")
    if values["geometry"] is not None:
        engine["geometry"] = geometry.read(values["geometry"], "--geometry")
    for name in ("kv-cache-dtype", "max-model-len"):
        if (value := values[name.replace("-", "_")]) is not None:
            engine[name] = value
    document["engine"] = engine
    slo = {str(k).replace("_", "-"): v for k, v in (document.get("slo") or {}).items()}
    slo |= {name: values[name.replace("-", "_")] for name in ("ttft-ms", "tpot-ms") if values[name.replace("-", "_")]}
    if slo:
        document["slo"] = slo
    document["workload"]["duration"] = values["duration"]
    return document


def _checked_scenario(file: str) -> str:
    """Its text, after all that is wrong with it was said, with its own lines. Raises ConfigError."""
    from penstock.cli.scenario_file import make_tables
    from penstock.sim.scenario import parse

    text = read_text(file, f"--scenario: {file}")
    parse(file, text, make_tables())
    return text


def _kinds(
    document: Mapping[str, Any], name: str, available: Mapping[str, int], prices: Mapping[str, float], deploys: bool
) -> tuple[list[Kind], list[str]]:
    """Every way to make an instance, and why others cannot be.

    Args:
        deploys: only those that a deployment file can have.

    Raises:
        ConfigError: there is none.
    """
    from penstock.cli.deployment import TABLES
    from penstock.sim.plan import Kind

    kinds, unfit = [], []
    sizes: tuple[int, ...] = SIZES
    if deploys and PARALLEL not in [setting.name for setting in TABLES.modelled]:
        sizes = SIZES[:1]
        unfit.append("layers spread over several devices: a deployment file (--write) cannot have them yet")
    for device, count in available.items():
        for size in sizes:
            if size > count:
                break
            spread = {PARALLEL: size} if size > 1 else {}
            try:
                scenario = _parse(document, name, {"device": f"modelled:{device}", **spread})
            except ConfigError as error:
                reason = str(error).splitlines()[0].partition(": ")[2]
                unfit.append(f"{size} x {device}: {reason}")
                continue
            (group,) = scenario.layouts[""]
            kinds.append(Kind(device=device, size=size, price=prices[device], group=group))
    if not kinds:
        raise ConfigError(f"--devices: none can be an instance; {'; '.join(unfit)}", "devices")
    return kinds, unfit


def _parse(document: Mapping[str, Any], name: str, instance: Mapping[str, Any]) -> Scenario:
    import yaml

    from penstock.cli.scenario_file import make_tables
    from penstock.sim.scenario import parse

    text = yaml.safe_dump({**document, "instances": [{"role": "any", "count": 1, **instance}]}, sort_keys=False)
    return parse(name, text, make_tables())


def _problem(
    args: argparse.Namespace, values: Mapping[str, Any], document: Mapping[str, Any], kinds: Sequence[Kind]
) -> Problem:
    import numpy as np

    from penstock.cli.scenario_file import TRACES
    from penstock.service.policies import STEADY
    from penstock.sim.simulate import TRAFFIC_STREAM
    from penstock.sim.traffic import make_traffic
    from penstock.workload.traces import read_trace

    scenario = _parse(document, args.scenario or "plan", {"device": kinds[0].group.device})
    workload, trace = scenario.workload, None
    if workload.trace:
        folder = Path(args.traces) if args.traces else TRACES
        trace = read_trace(args.trace or folder / workload.trace)
    seed = scenario.seed if values["seed"] is None else values["seed"]
    longest = min(kind.group.max_model_len for kind in kinds)

    def traffic(scale: float) -> Any:
        rng = np.random.default_rng((seed, TRAFFIC_STREAM))
        return make_traffic(workload, trace, rng, scale=scale, max_model_len=longest)

    native = traffic(1.0).native_rate
    scale = workload.rate_scale if values["rate"] is None else values["rate"] / native
    if not 0 < scale < math.inf:
        raise ConfigError("--rate: all requests of this workload come at once, there is no rate to scale", "rate")
    target = values["target"] if values["target"] is not None else scenario.target
    policy = Option("policy", one_of(*STEADY), POLICY, "").read(values["policy"] or POLICY, "--policy")
    return Problem(scenario, trace, policy, seed, scale, native * scale, target, traffic(scale).requests)


# --- simulations


_problem_here: Problem | None = None  # in a worker process


def _keep(problem: Problem) -> None:
    global _problem_here  # noqa: PLW0603
    _problem_here = problem


def _judge(groups: tuple[InstanceGroup, ...], policy: str) -> Verdict:
    """In a worker process: what becomes of these instances."""
    from penstock.sim.bound import bound_attainment
    from penstock.sim.plan import Verdict
    from penstock.sim.simulate import simulate

    problem = _problem_here
    assert problem is not None
    scenario = replace(problem.scenario, layouts={"": groups})
    bound = bound_attainment(problem.requests, groups, max_tokens=scenario.workload.max_tokens)
    if bound < problem.target:
        return Verdict(False, bound, None)
    result, _ = simulate(
        scenario,
        policy,
        problem.trace,
        random.Random(problem.seed),
        seed=problem.seed,
        scale=problem.scale,
        allowed_misses=min(1.0, HOPELESS * (1 - problem.target)),
    )
    small = {key: value for key, value in result.items() if key not in ("timeline", "instances")}
    return Verdict(bool(result["complete"]) and result["attainment"] >= problem.target, bound, small)


@lost_processes()
def _simulate_all(search: Search, problem: Problem, jobs: int, console: Any) -> None:
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, context, initializer=_keep, initargs=(problem,)) as pool,
        make_progress(console) as bars,
    ):
        task = bars.add_task("simulations", total=search.tries)
        running: dict[Future[Verdict], Candidate] = {}
        while True:
            while len(running) < jobs and (candidate := search.next()) is not None:
                running[pool.submit(_judge, candidate.groups, problem.policy)] = candidate
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                candidate = running.pop(future)
                search.tell(candidate, future.result())
                bars.update(task, completed=search.simulated - len(running), description=candidate.title)
