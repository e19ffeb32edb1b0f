"""What one cache for the whole cluster is worth: a slice of a trace with its shared prefixes, once for each policy.

    python tools/cache_bench.py paced    # eight engines of modelled H200s, prompts of their true lengths
    python tools/cache_bench.py real     # two engines of the demo model on this CPU, lengths cut to what it serves

Each policy gets servers of its own behind `penstock up`, with empty caches, and the same requests. The ideal is what a
cache without end that all instances share would have found. Paced engines are slowed down, so that a few cores keep up
with them, and arrivals with them: `--rate-scale` is of the trace's own rate, for devices at their full speed. The
simulator runs the same slice on the same engines. Against the first policy, which should be one that knows nothing of
caches, the others are judged by the 95th percentile of the time to the first token and by the tokens that they reused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
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
from rich.console import Console
from rich.table import Table

import penstock
from penstock.cli.scenario_file import TRACES
from penstock.core.sizes import size
from penstock.sched.steptime import GEOMETRIES

READY = re.compile(r'ready: \S+ on (http://[^\s"]+)/v1')
LATE = "this host cannot keep the pace"  # in the log of a paced engine
LONGEST = 131_072  # tokens of a sequence; what is longer is cut
GEOMETRY = "llama-3.1-8b"
TIERS = "host-cache-memory", "disk-cache-size", "disk-cache-gbps", "remote-cache-gbps"  # also of the simulator
RECORD_BYTES = 2 * 4096  # of a block in a store, whose KV is modelled
SLO = {"ttft-ms": 10_000.0, "tpot-ms": 100.0}  # of every request, on devices at their full speed
SPREAD = 3.0  # seconds of a tick of the trace's clock
console = Console(stderr=True)
WIDE = 120  # columns, at least, of a table that is not for a terminal


@dataclass(frozen=True, slots=True)
class Found:
    """What came of the slice.

    Attributes:
        cached, ideal: prompt tokens that were found, and that would have been; of `prompt`.
        ttft_p95: seconds, at the speed that the engines ran at.
    """

    prompt: int
    cached: int
    ideal: int
    ttft_p95: float
    failed: int


def measured(document: Mapping[str, Any]) -> Found:
    """Of a document of `penstock bench serve --save-detailed`."""
    summary, rows = document["summary"], document["requests"]
    return Found(
        prompt=summary["prompt_tokens"],
        cached=summary["cached_tokens"],
        ideal=document["workload"]["reusable_tokens"],
        ttft_p95=float(np.percentile([row["ttft_ms"] for row in rows if row["ttft_ms"] is not None], 95)) / 1e3,
        failed=summary["failed"],
    )


def simulated(document: Mapping[str, Any]) -> Found:
    """Of a document of `penstock sim run`."""
    return Found(
        prompt=document["prompt_tokens"],
        cached=document["reused_tokens"],
        ideal=document["reusable_tokens"],
        ttft_p95=document["ttft_p95_ms"] / 1e3,
        failed=document["failed"],
    )


def penstock_command(folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    return [sys.executable, "-m", "penstock.cli.main", *words], environment


def run(folder: Path, *words: str) -> None:
    """SystemExit with the output of a command that fails."""
    command, environment = penstock_command(folder, *words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def serving(folder: Path, deployment: Mapping[str, Any]) -> Iterator[str]:
    """The URL of servers that are ready, all of them; they are stopped at the end."""
    file, log = folder / "up.yaml", folder / "server.log"
    file.write_text(yaml.safe_dump(dict(deployment), sort_keys=False))
    command, environment = penstock_command(folder, "up", str(file), "--port", "0")
    with log.open("w") as sink:
        server = subprocess.Popen(command, stderr=sink, env=environment)
    try:
        yield _url(server, log)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and server.poll() is None:
        time.sleep(0.1)
        if found := READY.search(log.read_text()):
            with urllib.request.urlopen(found[1] + "/health", timeout=30) as answer:
                states = [instance["state"] for instance in json.load(answer).get("instances", [])]
            if all(state == "ready" for state in states):
                return found[1]
    raise SystemExit(f"the servers are not ready:\n{log.read_text()}")


def long_model(folder: Path) -> Path:
    """The demo model's tokenizer, with room for long sequences: all that paced engines need."""
    demo, made = Path(penstock.__file__).parent / "demo", folder / "long"
    made.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (demo / name).exists():
            shutil.copy(demo / name, made / name)
    config = json.loads((demo / "config.json").read_text()) | {"max_position_embeddings": LONGEST}
    (made / "config.json").write_text(json.dumps(config))
    return made


def deployment_of(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Without its policy."""
    instances = [{"count": options.instances}]
    if options.mode == "real":
        memory = {"kv-cache-memory": options.kv_cache_memory} if options.kv_cache_memory else {}
        engine = {"device": "cpu", "max-model-len": options.max_model_len, "max-num-seqs": 64, **memory}
        return {"model": "demo", "engine": engine, "instances": instances}
    engine = modelled(options) | remote_tier(options, folder)
    return {"model": str(long_model(folder)), "engine": engine, "instances": instances}


def remote_tier(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of servers: a directory with room for as many blocks as the simulator's store has."""
    if options.remote_cache_size is None:
        return {}
    blocks = size(options.remote_cache_size) // GEOMETRIES[GEOMETRY].block_bytes
    (folder / "store").mkdir()
    return {"remote-cache": f"file://{folder / 'store'}?size={blocks * RECORD_BYTES}"}


def modelled(options: argparse.Namespace) -> dict[str, Any]:
    """Of servers and of the simulator."""
    engine = {"device": options.device, "geometry": GEOMETRY, "noise": 0.05, "slowdown": options.slowdown}
    tiers = {name: getattr(options, name.replace("-", "_")) for name in TIERS}
    given = {name: value for name, value in tiers.items() if value is not None}
    return engine | {"max-model-len": options.max_model_len, "max-num-seqs": 128, **given}


def measure(options: argparse.Namespace, policy: str, folder: Path) -> Found:
    file = folder / f"{policy}.json"
    slow = options.slowdown
    with serving(folder, {**deployment_of(options, folder), "policy": policy}) as url:
        slo = {name.replace("-", "_"): ms * slow for name, ms in SLO.items()}
        run(
            folder,
            *("bench", "serve", "--base-url", url, "--json", str(file), "--extra-body", json.dumps({"slo": slo})),
            *("--dataset-name", "trace", "--dataset-path", str(options.traces / options.trace)),
            *("--trace-start", str(options.start), "--trace-duration", str(options.seconds * options.rate_scale)),
            *("--trace-spread", str(SPREAD), "--trace-scale", str(options.rate_scale / slow)),
            *("--num-prompts", "1000000", "--num-warmups", "0", "--timeout", "3600", "--save-detailed"),
        )
    late = (folder / "server.log").read_text().count(LATE)
    if late:
        console.print(f"[yellow]engines reported {late} times that this host cannot keep their pace[/]")
    return measured(json.loads(file.read_text()))


def simulate(options: argparse.Namespace, policy: str, folder: Path) -> Found:
    slow, scale = options.slowdown, options.rate_scale / options.slowdown
    workload = {"trace": options.trace, "rate-scale": scale, "start": options.start, "spread": SPREAD}
    workload |= {"duration": options.seconds * slow, "max-tokens": 4096}
    store = {} if options.remote_cache_size is None else {"remote-cache-size": options.remote_cache_size}
    scenario = {
        "policy": policy,
        "workload": workload,
        "slo": {name: ms * slow for name, ms in SLO.items()},
        "engine": modelled(options) | store,
        "instances": [{"count": options.instances}],
    }
    file, result = folder / "scenario.yaml", folder / "simulation.json"
    file.write_text(yaml.safe_dump(scenario, sort_keys=False))
    run(folder, "sim", "run", str(file), "--traces", str(options.traces), "--json", str(result))
    return simulated(json.loads(result.read_text()))


def show(rows: Sequence[tuple[str, Found]], slowdown: float) -> Table:
    """The first row of a kind, measured or simulated, is what the others of that kind are compared with."""
    table = Table(title="reuse of prompt tokens", title_justify="left")
    heads = ("", "prompt tokens", "reused", "the ideal", "of the ideal", "TTFT p95 (s)", "against", "times the reuse")
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    first: dict[bool, Found] = {}
    for name, found in rows:
        base = first.setdefault(name.endswith("simulated"), found)
        table.add_row(
            name + (f", {found.failed} failed" if found.failed else ""),
            f"{found.prompt:,}",
            f"{found.cached / found.prompt:.1%}",
            f"{found.ideal / found.prompt:.1%}",
            f"{found.cached / found.ideal:.1%}" if found.ideal else "-",
            f"{found.ttft_p95 / slowdown:.2f}",
            f"{found.ttft_p95 / base.ttft_p95 - 1:+.0%}" if found is not base else "-",
            f"{found.cached / base.cached:.2f}" if found is not base and base.cached else "-",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="paced | real")
    defaults = {"paced": (8, 4.0, 4.0, LONGEST), "real": (2, 0.25, 1.0, 4096)}
    for mode, (instances, rate_scale, slowdown, longest) in defaults.items():
        one = modes.add_parser(mode, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.add_argument("--traces", type=Path, default=TRACES, help="the folder of traces")
        one.add_argument("--trace", default="mooncake_conversation.jsonl.gz", help="its file")
        one.add_argument("--start", type=float, default=600.0, help="seconds into the trace")
        one.add_argument("--seconds", type=float, default=100.0, help="for which requests arrive, at full speed")
        one.add_argument("--rate-scale", type=float, default=rate_scale, help="factor on the trace's own rate")
        one.add_argument("--instances", type=int, default=instances)
        one.add_argument("--max-model-len", type=int, default=longest, help="tokens; longer prompts are cut")
        one.add_argument("--policies", default="round_robin,unified")
        one.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
        if mode == "paced":
            one.add_argument("--slowdown", type=float, default=slowdown, help="of the devices, and of arrivals")
            one.add_argument("--device", default="modelled:h200", help="what is modelled")
            one.add_argument("--host-cache-memory", help="of a tier below each device, such as 512G; by default none")
            one.add_argument("--disk-cache-size", help="of one on a disk of each, such as 4T; by default none")
            one.add_argument("--disk-cache-gbps", type=float, help="there and back, in gigabits/s; by default 24")
            one.add_argument("--remote-cache-size", help="of a store that all share, such as 16T; by default none")
            one.add_argument("--remote-cache-gbps", type=float, help="of each engine, there and back; by default 100")
        else:
            one.set_defaults(slowdown=slowdown)
            one.add_argument("--kv-cache-memory", default="1G", help="of each engine")
    options = parser.parse_args(arguments)
    rows: list[tuple[str, Found]] = []
    for policy in options.policies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append((policy, measure(options, policy, Path(folder))))
        found = rows[-1][1]
        console.print(f"{policy}: {found.cached:,} of {found.prompt:,} prompt tokens reused")
    if options.mode == "paced":
        for policy in options.policies.split(","):
            with tempfile.TemporaryDirectory() as folder:
                rows.append((f"{policy}, simulated", simulate(options, policy, Path(folder))))
    out = Console()
    out.print(show(rows, options.slowdown), width=out.width if out.is_terminal else WIDE)
    if options.json is not None:
        content = {name: {field: getattr(found, field) for field in Found.__slots__} for name, found in rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
