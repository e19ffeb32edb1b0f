"""What the way through HTTP, frontend and master adds to the time to the first token.

    python tools/hop_bench.py [--prompt-tokens 64] [--requests 200]

Four ways to the same engine options, asked in turn, one request at a time, so that whatever else the machine does
befalls all of them alike:

    engine    in this process, tokens in, tokens out
    serve     penstock serve: HTTP, frontend with the master inside, an engine process
    up        penstock up with one instance: the master and the KV pool server are processes of their own too
    1P+1D     penstock up, prefill apart from decode

"hop" is what frontend, master and the messages between the processes take: from the request's arrival at the frontend
to its first token there, less the time that the engine says it had the request. What is left of the difference to the
client's own view is HTTP, on both sides.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

OPTIONS = {"device": "cpu", "dtype": "float32", "max-model-len": 4096, "kv-cache-memory": "256M"}
OPTIONS |= {"max-num-batched-tokens": 512, "enable-prefix-caching": False}
TIMES = re.compile(r"ttft=([\d.]+)ms\s+.* queue=([\d.]+)ms\s+prefill=([\d.]+)ms")
WARM_UP = 10
READY = re.compile(r"ready: \S+ on http://([\d.]+):(\d+)/v1")


def in_process() -> Callable[[list[int]], float]:
    """Asks an engine that lives here."""
    from penstock.core.clock import SystemClock
    from penstock.core.request import Request
    from penstock.core.sampling import SamplingParams
    from penstock.engine.build import EngineOptions, build_engine
    from penstock.service.checkpoint import find_checkpoint

    options = EngineOptions(
        model=str(find_checkpoint("demo")), device="cpu", dtype="float32", max_model_len=4096,
        max_num_batched_tokens=512, kv_cache_memory=256 << 20, prefix_cache=False,
    )  # fmt: skip
    engine = build_engine(options, SystemClock()).engine

    def ask(prompt: list[int]) -> float:
        begin = time.perf_counter()
        params = SamplingParams(temperature=0.0)
        engine.add(Request(id="r", prompt=prompt, params=params, seed=0, stop_ids=frozenset(), max_tokens=2))
        while not engine.step()[0]:
            pass
        took = time.perf_counter() - begin
        while engine.has_work:
            engine.step()
        return took

    return ask


def over_http(stack: ExitStack, *command: str) -> tuple[Callable[[list[int]], float], Path]:
    """Starts a server and asks it over one connection that stays open; and where it writes its log."""
    log = Path(stack.enter_context(tempfile.TemporaryDirectory()), "log")
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *command, "--port", "0"],
            stderr=sink,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    stack.callback(server.wait, 60)
    stack.callback(server.send_signal, signal.SIGTERM)
    while (found := READY.search(log.read_text())) is None:
        if server.poll() is not None:
            raise SystemExit(f"penstock {command[0]} ended with {server.returncode}")
        time.sleep(0.05)
    connection = http.client.HTTPConnection(found[1], int(found[2]))

    def ask(prompt: list[int]) -> float:
        body = {"prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body)
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
        response = connection.getresponse()
        if not response.readline().startswith(b"data: {"):
            raise SystemExit("no tokens came")
        took = time.perf_counter() - begin
        response.read()
        return took

    return ask, log


def hops(log: Path) -> list[float]:
    """Milliseconds, of every request after the first ones."""
    rows = [tuple(map(float, found)) for found in TIMES.findall(log.read_text())]
    return [ttft - queue - prefill for ttft, queue, prefill in rows[WARM_UP:]]


def deployment(folder: str, name: str, instances: list[dict[str, object]]) -> str:
    file = Path(folder, name + ".yaml")
    file.write_text(yaml.safe_dump({"model": "demo", "engine": OPTIONS, "instances": instances}))
    return str(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # like the servers
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        flags = [f"--{k}={v}" if not isinstance(v, bool) else f"--no-{k}" for k, v in OPTIONS.items()]
        apart: list[dict[str, object]] = [{"role": "prefill"}, {"role": "decode"}]
        servers = {
            "serve": over_http(stack, "serve", "demo", *flags),
            "up": over_http(stack, "up", deployment(folder, "one", [{"count": 1}])),
            "1P+1D": over_http(stack, "up", deployment(folder, "apart", apart)),
        }
        ways = {"engine": in_process(), **{name: ask for name, (ask, _) in servers.items()}}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in track(range(args.requests + WARM_UP), "asking", transient=True):
            for name, ask in ways.items():
                took = ask([300 + i, *range(500, 500 + args.prompt_tokens - 1)])
                if i >= WARM_UP:
                    times[name].append(took * 1e3)
        time.sleep(0.5)  # until the last lines are written
        between = {name: statistics.median(hops(log)) for name, (_, log) in servers.items()}
    table = Table("way", "TTFT p50", "p90", "more than engine", "hop p50", title=f"{args.prompt_tokens} prompt tokens")
    base = statistics.median(times["engine"])
    for name, values in times.items():
        median, p90 = statistics.median(values), sorted(values)[int(0.9 * (len(values) - 1))]
        hop = f"{between[name]:.2f} ms" if name in between else ""
        table.add_row(name, f"{median:.2f} ms", f"{p90:.2f} ms", f"{median - base:+.2f} ms", hop)
    Console().print(table)


if __name__ == "__main__":
    main()
