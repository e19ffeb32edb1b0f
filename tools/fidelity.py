"""How far the simulator can be believed: the same slice of a trace through servers and through the simulator.

    python tools/fidelity.py real      # the demo model on this machine's CPU, behind `penstock serve`
    python tools/fidelity.py paced     # sixteen engines of a modelled device, behind `penstock up`

Arrivals, lengths, limits and policies are the same on both sides, and nothing is fitted to what is compared. What the
simulator has to know of this machine is measured before, on other traffic, which the simulated servers have served too
when the slice begins:

    steps      real: `penstock doctor --save --model demo`, the engine by itself; paced: none, its steps are modelled
    messages   one short request at a time to idle servers: what its first token takes beyond its step, shared out over
               the messages that it waits for. HTTP, at both ends, is part of that.

Every repetition sends the slice with other tokens to the same servers, so that nothing is found in a cache, and
simulates it with another seed of the noise. Exit code 1: some figure differs by more than the tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from penstock.bench.document import host_facts
from penstock.cli.scenario_file import TRACES
from penstock.workload.lengths import Independent, log_normal
from penstock.workload.requests import WorkRequest, between, limit_context, offered_rate, scale_rate
from penstock.workload.synthetic import synthesise
from penstock.workload.traces import read_trace

TRACE = "azure2023_conv.csv.gz"
MAX_MODEL_LEN = 4096
SLO = {"ttft-ms": 2000, "tpot-ms": 150}  # of every request; policies use them, nothing here is judged by them
READY = re.compile(r'ready: \S+ on (http://[^\s"]+)/v1')
LATE = "this host cannot keep the pace"  # in the log of a paced engine
MESSAGES = 4  # until a first token: a place is asked for, and given, the request is sent, and its token
OTHERS = 0.3  # cores that may be busy while nothing is sent; idle engines look around, too
PROBE_EVERY, PAUSE = 0.15, 2.0  # seconds: about what a probe takes, and a load generator until it sends
PROBING = [WorkRequest(number=i, at=i * PROBE_EVERY, prompt_tokens=64, output_tokens=2) for i in range(40)]
TOLERANCE = {"real": 0.15, "paced": 0.10}
FIGURES = {
    "ttft_p50_ms": "TTFT p50 (ms)",
    "ttft_p90_ms": "TTFT p90 (ms)",
    "tpot_p50_ms": "TPOT p50 (ms)",
    "output_tokens_per_s": "output tokens/s",
}
Figures = dict[str, float]
console = Console(stderr=True)


# --- the slice


def take_slice(
    trace: Sequence[WorkRequest], *, start: float, seconds: float, rate: float, length_scale: float
) -> list[WorkRequest]:
    """What arrives from `start` on, as fast or as slowly as makes it `rate` requests/s on the average of the whole
    trace, for `seconds`; so bursts stay bursts. Lengths are scaled and then cut to MAX_MODEL_LEN."""
    factor = rate / offered_rate(trace)
    chosen = scale_rate(between(trace, start, start + seconds * factor), factor)
    if not chosen:
        raise SystemExit(f"no request of the trace lies in the {seconds * factor:g} s from {start:g} s on")
    scaled = [
        replace(
            request,
            number=number,
            at=request.at - chosen[0].at,
            prompt_tokens=max(2, round(request.prompt_tokens * length_scale)),
            output_tokens=max(2, round(request.output_tokens * length_scale)),
        )
        for number, request in enumerate(chosen)
    ]
    return limit_context(scaled, MAX_MODEL_LEN)[0]


def stand_in() -> list[WorkRequest]:
    """An hour of requests like the trace's, in rate and in means: Poisson arrivals, log-normal lengths."""
    lengths = Independent(log_normal(1155, 1000), log_normal(211, 170))
    return synthesise(20_000, lengths, np.random.default_rng(0), rate=5.5, cv=1.0, prefixes=0, prefix_tokens=1, zipf=0)


def write_slice(requests: Sequence[WorkRequest], file: Path) -> None:
    """As a trace that load generator and simulator both read."""
    rows = [f"{r.at:.6f},{r.prompt_tokens},{r.output_tokens}" for r in requests]
    file.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")


# --- what came of it


def measured_figures(document: Mapping[str, Any]) -> Figures:
    """Of a document of `penstock bench serve`."""
    summary = document["summary"]
    if summary["failed"]:
        raise SystemExit(f"{summary['failed']} of {summary['requests']} requests failed: {summary['failures']}")
    return {
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "ttft_p90_ms": summary["ttft_ms"]["p90"],
        "tpot_p50_ms": summary["tpot_ms"]["p50"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
    }


def simulated_figures(document: Mapping[str, Any], skipped: int = 0) -> Figures:
    """Of a document of `penstock sim run --save-requests`, but for its first requests."""
    if document["failed"]:
        raise SystemExit(f"{document['failed']} simulated requests failed: {document['errors']}")
    rows = [row for row in document["per_request"] if row["number"] >= skipped]
    ttft = [1e3 * (row["first"] - row["arrival"]) for row in rows]
    tpot = [1e3 * (row["ended"] - row["first"]) / (row["output_tokens"] - 1) for row in rows]
    seconds = max(row["ended"] for row in rows) - min(row["arrival"] for row in rows)
    return {
        "ttft_p50_ms": float(np.percentile(ttft, 50)),
        "ttft_p90_ms": float(np.percentile(ttft, 90)),
        "tpot_p50_ms": float(np.percentile(tpot, 50)),
        "output_tokens_per_s": sum(row["output_tokens"] for row in rows) / seconds,
    }


def compare(measured: Sequence[Figures], simulated: Sequence[Figures], tolerance: float) -> dict[str, dict[str, Any]]:
    """By figure: medians of the repetitions, from where to where they went, and how far the simulated median is off, as
    a share of the measured one."""
    rows = {}
    for name in FIGURES:
        real, simulation = [run[name] for run in measured], [run[name] for run in simulated]
        gap = statistics.median(simulation) / statistics.median(real) - 1
        rows[name] = {
            "measured": statistics.median(real),
            "measured_range": [min(real), max(real)],
            "simulated": statistics.median(simulation),
            "simulated_range": [min(simulation), max(simulation)],
            "gap": gap,
            "within": abs(gap) <= tolerance,
        }
    return rows


# --- servers, load generator and simulator, each as its users start it


@dataclass(frozen=True)
class Workspace:
    """A folder, and the environment of every process there: one thread each, and devices that are measured here."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder / "cache")}

    def penstock(self, *words: str) -> None:
        """Run a command to its end. SystemExit with its output when it fails."""
        command = [sys.executable, "-m", "penstock.cli.main", *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    @contextlib.contextmanager
    def serving(self, *words: str) -> Iterator[str]:
        """The URL of servers that are ready, all of them; they are stopped at the end."""
        log = self.folder / "server.log"
        command = [sys.executable, "-m", "penstock.cli.main", *words, "--port", "0"]
        with log.open("w") as sink:
            server = subprocess.Popen(command, stderr=sink, env=self.environment)
        try:
            yield self._url(server, log)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)

    def _url(self, server: subprocess.Popen[bytes], log: Path) -> str:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.05)
            if found := READY.search(log.read_text()):
                with urllib.request.urlopen(found[1] + "/health", timeout=30) as answer:
                    states = [instance["state"] for instance in json.load(answer).get("instances", [])]
                if all(state == "ready" for state in states):
                    return found[1]
        raise SystemExit(f"the servers are not ready:\n{log.read_text()}")

    def bench(self, url: str, *words: str) -> Figures:
        file = self.folder / "bench.json"
        targets = json.dumps({"slo": {name.replace("-", "_"): value for name, value in SLO.items()}})
        self.penstock("bench", "serve", "--base-url", url, "--json", str(file), "--extra-body", targets, *words)
        return measured_figures(json.loads(file.read_text()))

    def simulate(self, scenario: Mapping[str, Any], requests: Sequence[WorkRequest], seed: int) -> Figures:
        """Of these requests, on servers that know of the probes what the real ones do."""
        file, result = self.folder / "scenario.yaml", self.folder / "simulation.json"
        shifted = [replace(request, at=request.at + len(PROBING) * PROBE_EVERY + PAUSE) for request in requests]
        write_slice([*PROBING, *shifted], self.folder / "slice.csv")
        content = {
            **scenario,
            "workload": {"trace": "slice.csv", "max-tokens": MAX_MODEL_LEN, "exact": True},
            "slo": SLO,
        }
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        options = ("--traces", str(self.folder), "--seed", str(seed), "--save-requests", "--json", str(result))
        self.penstock("sim", "run", str(file), *options)
        return simulated_figures(json.loads(result.read_text()), len(PROBING))

    def message_ms(self, url: str, scenario: Mapping[str, Any]) -> float:
        """What a message takes: of one request at a time, what its first token takes beyond its step."""
        alone = self.bench(
            *(url, "--num-prompts", str(len(PROBING)), "--max-concurrency", "1", "--seed", "1000"),
            *("--random-input-len", str(PROBING[0].prompt_tokens)),
            *("--random-output-len", str(PROBING[0].output_tokens)),
        )
        without = self.simulate({**scenario, "latency-ms": 0}, PROBING, 0)
        return max(0.0, (alone["ttft_p50_ms"] - without["ttft_p50_ms"]) / MESSAGES)


# --- the two comparisons: what is served, and the same as a scenario


Setup = tuple[list[str], dict[str, Any]]  # the command that serves; its scenario without what is sent and messages


def real(work: Workspace, options: argparse.Namespace) -> Setup:
    """One engine of the demo model. Measures this machine."""
    console.print("measuring this machine and steps of the demo model")
    work.penstock("doctor", "--save", "--model", "demo")  # where the engine looks, to predict its own steps by it
    measured = json.loads(next(work.folder.rglob("this-machine.json")).read_text())
    limits = {"max-model-len": MAX_MODEL_LEN, "max-num-seqs": 128, "max-num-batched-tokens": 512}
    flags = [word for name, value in limits.items() for word in (f"--{name}", str(value))]
    engine = {
        "device": "modelled:this-machine",
        "geometry": "demo",
        "noise": min(1.0, round(measured["steps"]["noise"], 3)),
        "kv-blocks": 8192,
        "scheduling-policy": "slack",
        **limits,
    }
    return (
        ["serve", "demo", "--device", "cpu", "--kv-cache-memory", "1G", "--scheduling-policy", "slack", *flags],
        {"policy": "least_loaded", "engine": engine, "instances": [{"count": 1}]},
    )


def paced(work: Workspace, options: argparse.Namespace) -> Setup:
    """Engines whose steps last long enough for many of them to share a few cores, as on an L4 or slowed down."""
    engine = {"device": f"modelled:{options.device}", "geometry": "qwen3-8b", "noise": 0.05}
    engine |= {"slowdown": options.slowdown}
    engine |= {"max-model-len": MAX_MODEL_LEN, "max-num-seqs": 128}
    roles = [{"role": role, "count": options.instances // 2} for role in ("prefill", "decode")]
    groups = roles if options.split else [{"count": options.instances}]
    same = {"policy": options.policy, "engine": engine, "instances": groups}
    file = work.folder / "up.yaml"
    file.write_text(yaml.safe_dump({"model": "demo", **same}, sort_keys=False))
    return ["up", str(file)], same


# --- all of it


def run(mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The document that --json writes."""
    requests = read_slice(options)
    work = Workspace(folder)
    command, scenario = (real if mode == "real" else paced)(work, options)
    measured: list[Figures] = []
    others: list[float] = []
    with work.serving(*command) as url:
        latency = work.message_ms(url, scenario)
        console.print(f"a message takes {latency:.2f} ms; now {len(requests)} requests, {options.repetitions} times")
        for seed in range(options.repetitions):
            others.append(busy_cores())
            write_slice(requests, folder / "slice.csv")  # probes were there
            trace = ("--dataset-name", "trace", "--dataset-path", str(folder / "slice.csv"))
            measured.append(work.bench(url, *trace, "--num-prompts", str(len(requests)), "--seed", str(seed)))
            console.print(f"measured  {shown(measured[-1])}", soft_wrap=True)
        others.append(busy_cores())
    scenario = {**scenario, "latency-ms": round(latency, 3)}
    simulated = [work.simulate(scenario, requests, seed) for seed in range(options.repetitions)]
    for found in simulated:
        console.print(f"simulated {shown(found)}", soft_wrap=True)
    return {
        "mode": mode,
        "host": host_facts(),
        "slice": {
            "trace": "synthetic stand-in" if options.trace is None else options.trace.name,
            "requests": len(requests),
            "seconds": requests[-1].at,
        },
        "scenario": scenario,
        "busy_cores_without_load": others,
        "late": (folder / "server.log").read_text().count(LATE),
        "figures": compare(measured, simulated, TOLERANCE[mode]),
    }


def busy_cores(seconds: float = 2.0) -> float:
    """How many cores are at work while nothing is sent: what is above some hundredths is somebody else."""

    def busy() -> int:
        user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
        return user + nice + system + sum(rest)

    before = busy()
    time.sleep(seconds)
    return (busy() - before) / os.sysconf("SC_CLK_TCK") / seconds


def read_slice(options: argparse.Namespace) -> list[WorkRequest]:
    options.trace = options.traces / options.trace
    if not options.trace.exists():
        console.print(f"[yellow]{options.trace} is not there: a synthetic stand-in takes its place[/]")
        options.trace = None
    trace = stand_in() if options.trace is None else read_trace(options.trace)
    wanted = {name: getattr(options, name) for name in ("start", "seconds", "rate", "length_scale")}
    return take_slice(trace, **wanted)


def shown(found: Figures) -> str:
    return ", ".join(f"{label} {short(found[name])}" for name, label in FIGURES.items())


def short(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def show(document: Mapping[str, Any]) -> Table:
    part = document["slice"]
    title = f"{document['mode']}: {part['requests']} requests in {part['seconds']:.0f} s of {part['trace']}"
    table = Table(title=title, title_justify="left", caption_justify="left", caption="\n".join(doubts(document)))
    for column in ("", "measured", "simulated", "gap"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in FIGURES.items():
        row = document["figures"][name]
        medians = []
        for side in ("measured", "simulated"):
            low, high = map(short, row[f"{side}_range"])
            medians.append(f"{short(row[side])} ({low} to {high})")
        table.add_row(label, *medians, f"[{'green' if row['within'] else 'red'}]{row['gap']:+.1%}[/]")
    return table


def doubts(document: Mapping[str, Any]) -> Iterator[str]:
    """Why this measurement may mean nothing."""
    if (others := max(document["busy_cores_without_load"])) > OTHERS:
        yield f"[yellow]other processes used up to {others:.1f} of the {document['host']['cores_usable']} cores[/]"
    if late := document["late"]:
        yield f"[yellow]engines reported {late} times that this host cannot keep their pace[/]"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="real | paced")
    for mode, rate, scale in (("real", 4.0, 0.5), ("paced", 8.0, 1.0)):
        one = modes.add_parser(mode, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.add_argument("--traces", type=Path, default=TRACES, help="the folder of traces")
        one.add_argument("--trace", default=TRACE, help="its file")
        one.add_argument("--start", type=float, default=600.0, help="seconds into the trace")
        one.add_argument("--seconds", type=float, default=60.0, help="for which requests arrive")
        one.add_argument("--rate", type=float, default=rate, help="requests/s")
        one.add_argument("--length-scale", type=float, default=scale, help="factor on the trace's lengths")
        one.add_argument("--repetitions", type=int, default=3)
        one.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
        if mode == "paced":
            one.add_argument("--policy", default="unified")
            one.add_argument("--instances", type=int, default=16)
            one.add_argument("--split", action="store_true", help="half of them for prefill, half for decode")
            one.add_argument("--device", default="l4")
            one.add_argument("--slowdown", type=float, default=1.0, help="of it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        document = run(options.mode, options, Path(folder))
    Console().print(show(document))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["within"] for row in document["figures"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
