"""Scenario files for commands: what their settings may be, and what is to be simulated with which trace and seed."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cli.deployment import GROUP, TABLES
from penstock.cli.devices import load_device, load_factors, load_geometry
from penstock.cli.options import LARGEST_SCALE, Option, between, integer, number, one_of, read_text, size, switch, text
from penstock.sim.baselines import ENGINE_POLICIES, POLICIES
from penstock.sim.cluster import Cluster
from penstock.sim.scenario import Scenario, ScenarioTables, parse
from penstock.sim.simulate import simulate
from penstock.workload.requests import WorkRequest
from penstock.workload.traces import read_trace

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"  # beside the project
TARGET = 0.9  # share of requests that keep both limits


def modelled(text: str) -> str:
    """The way to name a device in a scenario; whether there is such a one is seen when it is loaded."""
    if not text.removeprefix("modelled:") or not text.startswith("modelled:"):
        raise ValueError("modelled:NAME, as modelled:h200, modelled:this-machine or modelled:FILE.json")
    return text


def make_tables() -> ScenarioTables:
    engine = {option.name: option for option in TABLES.modelled if isinstance(option, Option)}
    names = (
        *("max-num-seqs", "max-num-batched-tokens", "step-time-limit-ms", "kv-blocks", "kv-cache-dtype"),
        *("enable-prefix-caching", "disk-cache-size", "disk-cache-gbps", "remote-cache-gbps"),
    )
    needed = partial(Option, default=None)
    targets = (
        needed("ttft-ms", number(0), help="time to first token"),
        needed("tpot-ms", number(0), help="mean time per token after it"),
    )
    return ScenarioTables(
        load_device=load_device,
        load_factors=load_factors,
        load_geometry=load_geometry,
        top=(
            Option("description", str, "", "what it is about"),
            Option("policy", one_of(*POLICIES), "least_loaded", "what decides"),
            Option("live-roles", switch, False, "roles change under any policy, as in a deployment file"),
            Option("seed", integer(0), 0, "of traffic, step times and lots"),
            Option("target", number(0, 1), TARGET, "share of online requests that have to keep their targets"),
            Option("latency-ms", between(0, 10_000), 0.2, "of messages between frontend, master and instances"),
            Option("slow-after", between(0, 86_400), 60.0, "seconds of work after which a slow instance is restarted"),
        ),
        workload=(
            Option("trace", text, "", "a file in the folder of traces"),
            Option("rate-scale", number(0, LARGEST_SCALE), 1.0, "factor on the workload's own rate"),
            Option("vary", one_of("online", "offline"), "online", "whose rate other scales than the file's are for"),
            Option("most-scale", number(0, LARGEST_SCALE), LARGEST_SCALE, "beyond which no greater one is sought"),
            Option("start", between(0, 1e9), 0.0, "seconds of the trace that are left out"),
            Option("duration", number(0, 1e9), None, "seconds of arrivals; by default all of it once"),
            Option("spread", between(0, 3600), 0.0, "seconds over which a tick of the trace's clock is spread"),
            Option("chats", switch, False, "requests that share a beginning are turns of a chat"),
            Option("tide", between(1, 1e6), None, "highest rate over lowest, of a day that takes the duration"),
            Option("image-repeats", between(0, 1), 0.0, "share of the images that came before"),
            Option("max-tokens", integer(1), 4096, "limit on outputs that clients set"),
            Option("exact", switch, False, "clients set the limit of each output to its length"),
        ),
        synthetic=(
            Option("requests", integer(2, 10**8), 1000, "how many"),
            Option("rate", number(0, 1e6), 1.0, "requests per second"),
            Option("burstiness", between(0, 100), 1.0, "coefficient of variation of the gaps; 1 is Poisson"),
            Option("prompt", integer(1), 1024, "mean tokens that a prompt has to itself"),
            Option("prompt-cv", between(0, 10), 1.0, "coefficient of variation of that"),
            Option("output", integer(1), 128, "mean tokens of an output"),
            Option("output-cv", between(0, 10), 1.0, "coefficient of variation of that"),
            Option("prefixes", integer(0, 1 << 29), 0, "shared beginnings"),
            Option("prefix-tokens", integer(1), 512, "tokens of each"),
            Option("prefix-zipf", between(0, 10), 0.0, "how unevenly they are taken"),
            Option("images", between(0, 1000), 0.0, "mean images of a request"),
            Option("image-tokens", integer(1), 650, "mean tokens of an image"),
            Option("image-cv", between(0, 10), 0.5, "coefficient of variation of that"),
        ),
        tasks=(
            needed("name", text, help="of the class of requests"),
            needed("rate", number(0, 1e6), help="requests per second at a rate-scale of 1"),
            needed("prompt", number(0, 1e7), help="mean tokens of a prompt"),
            Option("prompt-sd", between(0, 1e7), 0.0, "standard deviation of that"),
            needed("output", between(0, 1e7), help="mean tokens of an output; 0 embeds the prompts"),
            Option("output-sd", between(0, 1e7), 0.0, "standard deviation of that"),
            *targets,
            Option("priority", integer(0, 1000), 0, "lower runs first"),
            Option("priority-only", switch, False, "the cluster is told the priority and not the targets"),
            Option("start", between(0, 1e9), 0.0, "seconds until they begin to come"),
            Option("duration", number(0, 1e9), None, "seconds for which they come; by default to the end"),
        ),
        offline=(
            needed("rate", number(0, 1e6), help="requests per second"),
            needed("backlog", integer(1, 10**8), help="requests that are there from the start"),
            Option("like-online", switch, False, "lengths are drawn from those of the online requests"),
            Option("prompt", number(0, 1e7), 4096.0, "mean tokens of a prompt"),
            Option("prompt-sd", between(0, 1e7), 2048.0, "standard deviation of that"),
            Option("output", number(0, 1e7), 512.0, "mean tokens of an output"),
            Option("output-sd", between(0, 1e7), 256.0, "standard deviation of that"),
        ),
        slo=targets,
        engine=(
            Option("device", modelled, "modelled:h200", "what the instances run on"),
            Option("tensor-parallel-size", integer(1, 64), 1, "devices that every layer is spread over"),
            Option("efficiency", number(0, 1), 1.0, "share of its data sheet that a device reaches"),
            Option("geometry", text, "llama-3.1-8b", "the model whose times are modelled: a name, a folder, or demo"),
            Option(
                "scheduling-policy", one_of(*ENGINE_POLICIES), None, "of the engines, instead of what the policy has"
            ),
            Option("max-model-len", integer(2), 16384, "prompt and output tokens of one sequence"),
            Option("noise", between(0, 1), 0.05, "standard deviation of a step's time, relative to it"),
            Option("slowdown", between(0.01, 100), 1.0, "factor on all times of the device"),
            Option("step-time-error", between(0.01, 100), 1.0, "factor by which steps are believed to take longer"),
            *(engine[name] for name in names),
            Option("stage-scheduling", switch, True, "images and prompts in steps of some length; else all at once"),
            Option("host-cache-memory", size, None, "of a tier of KV cache in the host's memory, such as 64G"),
            Option("remote-cache-size", size, None, "of a store that all instances share"),
        ),
        instances=(
            *GROUP,
            Option("encodes", switch, False, "of role decode: they look at the images of prompts, the route ED+P"),
        ),
        scaling=(
            needed("least", integer(1, 4096), help="instances that serve"),
            needed("most", integer(1, 4096), help="instances that run, start or drain"),
            Option("devices", integer(1), None, "that all instances may take together; by default any number"),
            Option("start-seconds", between(0, 86_400), 2.05, "from the decision until one serves that reads a disk"),
            Option("interval", number(0, 86_400), None, "seconds between decisions; by default the policy's"),
            Option("cooldown-out", between(0, 86_400), None, "between growths of a stage; by default the policy's"),
            Option("cooldown-in", between(0, 86_400), None, "from a stage's change to a cut; by default the policy's"),
            Option("per-host", integer(1), 8, "instances that share a host, in the order of their names"),
            Option("warm-pool", integer(0, 4096), 0, "processes without weights that wait on each host"),
            Option("warm-seconds", between(0, 86_400), 5.0, "until one that was taken from there is replaced"),
        ),
        start_paths=(
            needed("host", between(0, 86_400), help="of one whose host has the files in memory; by default as disk"),
            needed("tcp", between(0, 86_400), help="with weights of a peer on another host; by default as host"),
            needed("map", between(0, 86_400), help="with weights of a peer on its host; by default as tcp"),
            needed("warm", between(0, 86_400), help="of a warm process, with a peer's weights; by default as map"),
        ),
        status_reports=(
            Option("every-ms", number(0, 60_000), 50.0, "between snapshots while the load changes"),
            Option("delay-ms", between(0, 60_000), 5.0, "by which the master hears of them later"),
        ),
        transport=(
            Option(
                "kind", one_of("shared", "copy"), "copy", "shared: blocks change their holder; copy: they are copied"
            ),
            Option("gbps", number(0, 1e6), 400.0, "gigabits per second into and out of each instance"),
            Option("latency-us", between(0, 1e6), 20.0, "of every message between instances"),
            Option("lease", number(0, 3600), 5.0, "seconds of silence that end a hand-off"),
        ),
        failures=(
            needed("instance", text, help="which dies"),
            needed("at", between(0, 1e9), help="seconds from the start"),
            needed("restart-after", between(0, 1e9), help="seconds until it lives again; by default never"),
            needed("slow", between(1, 1000), help="it does not die: its steps take so many times as long from then on"),
        ),
    )


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line asks to be simulated; it can be sent to another process."""

    scenario: Scenario
    trace: Sequence[WorkRequest] | None
    seed: int

    def simulate(self, variant: str, scale: float, **more: Any) -> tuple[dict[str, Any], Cluster]:
        """More: see `simulate`."""
        rng = random.Random(self.seed)
        return simulate(self.scenario, variant, self.trace, rng, seed=self.seed, scale=scale, **more)


def read_given(args: argparse.Namespace) -> Given:
    """Raises ConfigError on a file, a trace or a flag that cannot be used."""
    scenario = parse(args.scenario, read_text(args.scenario, f"{args.scenario}:"), make_tables())
    seed = scenario.seed if args.seed is None else args.seed
    file = args.trace or scenario.workload.trace
    if not file:
        return Given(scenario, None, seed)
    folder = Path(args.traces) if args.traces else TRACES
    return Given(scenario, read_trace(file if args.trace else folder / file), seed)
