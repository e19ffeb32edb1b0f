"""What serving costs beside the model: time to start, time to the first token, CPU time of every process.

    python tools/service_bench.py start [MODEL] [-n 5] [flags of `penstock serve`]
    python tools/service_bench.py hops [--prompt-tokens 64] [--requests 200]
    python tools/service_bench.py load [--streams 64] [--requests 800] [--slowdown 10] [--against PYTHON]

start   seconds from the command to /ready and to the first token, and CPU seconds of the processes until /ready.
hops    the same requests, one at a time and in turn: to the offline API in this process, to `penstock serve`, to
        `penstock up` with one instance, and with prefill apart from decode. "frontend and master" is the time from a
        request's arrival at the frontend to its first token there, less the time that the engine had it; the rest is
        HTTP.
load    many streams over HTTP from `penstock bench serve`, and microseconds of CPU per output token of every process. A
        modelled device computes nothing and is far faster than the way around it; slowed down ten times it is about as
        fast, and no events are merged. `--device cpu` is the demo model itself. `--output 1` measures requests, not
        tokens; "of the frontend alone" are requests per second of its CPU time, whatever share of the machine others
        have. With --against the same load goes in turn to a server of another checkout, whose interpreter is given.
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
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

READY = re.compile(r"ready: \S+ on http://([\d.]+):(\d+)/v1")
PROCESS = re.compile(r"(\S+) is process (\d+)")
TIMES = re.compile(r"ttft=([\d.]+)ms\s+.* queue=([\d.]+)ms\s+prefill=([\d.]+)ms")
TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP = 10  # requests to each way, which are not counted


class Server:
    """`penstock serve` or `penstock up`, ready when it is made; ends with the stack.

    Attributes:
        processes: name -> process id.
        ready: seconds from its start until /ready was answered.
    """

    def __init__(self, stack: ExitStack, *command: str, python: str = sys.executable, **environment: str) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.log = folder / "log"
        self.began = time.perf_counter()
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                [python, "-m", "penstock.cli.main", *command, "--port", "0"],
                stderr=sink, cwd=folder, env={**os.environ, **environment},
            )  # fmt: skip
        stack.callback(self.process.wait, 60)
        stack.callback(self.process.send_signal, signal.SIGTERM)
        while (found := READY.search(self.log.read_text())) is None or not self._answers(found):
            if self.process.poll() is not None:
                raise SystemExit(f"penstock {command[0]} ended: {self.log.read_text()[-1000:]}")
            time.sleep(0.02)
        self.ready = time.perf_counter() - self.began
        self.host, self.port = found[1], int(found[2])
        named = PROCESS.findall(self.log.read_text())
        self.processes = {name: int(pid) for name, pid in named} | {"server": self.process.pid}

    def _answers(self, found: re.Match[str]) -> bool:
        try:
            urllib.request.urlopen(f"http://{found[1]}:{found[2]}/ready", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def cpu_seconds(self) -> dict[str, float]:
        """Of all threads of each process, in user and system together."""
        return {name: _cpu_seconds(pid) for name, pid in self.processes.items()}

    def client(self) -> Callable[[list[int]], float]:
        """Prompt -> seconds to its first token, over one connection that stays open."""
        connection = http.client.HTTPConnection(self.host, self.port)

        def ask(prompt: list[int]) -> float:
            body = {"prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True}
            begin = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if not response.readline().startswith(b"data: {"):
                raise SystemExit("no tokens came")
            took = time.perf_counter() - begin
            response.read()
            return took

        return ask


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


# --- start


def start(args: argparse.Namespace, flags: list[str]) -> Table:
    rounds = []
    for _ in track(range(args.n), "starting", transient=True):
        with ExitStack() as stack:
            server = Server(stack, "serve", args.model, *flags)
            used = server.cpu_seconds()
            server.client()([100, 101])
            first = time.perf_counter() - server.began
            rounds.append({"ready": server.ready, "first token": first, **{f"CPU, {n}": t for n, t in used.items()}})
    table = Table("seconds", "median", "least", "most", title=f"penstock serve {args.model}")
    for part in rounds[0]:
        values = [times[part] for times in rounds]
        table.add_row(part, *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))))
    return table


# --- hops


def hops(args: argparse.Namespace, flags: list[str]) -> Table:
    import torch

    from penstock import LLM, SamplingParams

    torch.set_num_threads(1)  # like the servers
    engine = {"device": "cpu", "dtype": "float32", "max-model-len": 4096, "kv-cache-memory": "256M"}
    engine |= {"max-num-batched-tokens": 512, "enable-prefix-caching": False}
    llm = LLM("demo", device="cpu", dtype="float32", max_model_len=4096, kv_cache_memory=256 << 20, prefix_cache=False)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def offline(prompt: list[int]) -> float:
        begin = time.perf_counter()
        llm.generate([prompt], one_token)
        return time.perf_counter() - begin

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def up(name: str, instances: list[dict[str, object]]) -> Server:
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump({"model": "demo", "engine": engine, "instances": instances}))
            return Server(stack, "up", str(file), OMP_NUM_THREADS="1")

        options = [f"--{k}={v}" if not isinstance(v, bool) else f"--no-{k}" for k, v in engine.items()]
        servers = {
            "serve": Server(stack, "serve", "demo", *options, OMP_NUM_THREADS="1"),
            "up": up("one", [{"count": 1}]),
            "1P+1D": up("apart", [{"name": role, "role": role} for role in ("prefill", "decode")]),
        }
        ways = {"offline": offline, **{name: server.client() for name, server in servers.items()}}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for i in track(range(WARM_UP + args.requests), "asking", transient=True):
            for name, ask in ways.items():
                times[name].append(1e3 * ask([300 + i, *range(500, 500 + args.prompt_tokens - 1)]))
        time.sleep(0.5)  # until the last lines are written
        between = {name: _between(server.log) for name, server in servers.items()}
    table = Table("way", "TTFT p50 ms", "p90", "more than offline", "frontend and master p50")
    base = statistics.median(times["offline"][WARM_UP:])
    for name, values in times.items():
        counted = sorted(values[WARM_UP:])
        median, p90 = statistics.median(counted), counted[int(0.9 * (len(counted) - 1))]
        hop = f"{between[name]:.2f}" if name in between else ""
        table.add_row(name, f"{median:.2f}", f"{p90:.2f}", f"{median - base:+.2f}", hop)
    return table


def _between(log: Path) -> float:
    """Milliseconds, of the requests after the warm-up, as the frontend logs them."""
    rows = [tuple(map(float, found)) for found in TIMES.findall(log.read_text())]
    return statistics.median(ttft - queue - prefill for ttft, queue, prefill in rows[WARM_UP:])


# --- load


def load(args: argparse.Namespace, flags: list[str]) -> Table:
    engine: dict[str, object] = {"device": args.device, "max-num-seqs": max(args.streams, 64)}
    engine |= {"slowdown": args.slowdown} if args.device.startswith("modelled:") else {}
    pythons = {"here": sys.executable} | ({"against": args.against} if args.against else {})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "one.yaml"
        file.write_text(yaml.safe_dump({"model": "demo", "engine": engine, "instances": [{"count": 1}]}))
        servers = {name: Server(stack, "up", str(file), python=python) for name, python in pythons.items()}
        table = Table("server", "requests/s", "of the frontend alone", "tokens/s", "tokens an event", "TTFT p50")
        table.add_column("ITL p50, p99 ms")
        table.add_column("CPU us/token")
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for i in range(args.rounds):
            for name, server in list(servers.items())[:: 1 if i % 2 else -1]:
                row, speed, alone = _loaded(server, args, folder / "result")
                found[name].append((speed, alone))
                table.add_row(name, *row)
    if args.against:
        pairs = list(zip(found["here"], found["against"], strict=True))
        speed, alone = (statistics.median(here[i] / there[i] for here, there in pairs) for i in (0, 1))
        table.caption = f"here over {args.against}, medians: requests/s {speed:.3f}, of the frontend alone {alone:.3f}"
    return table


def _loaded(server: Server, args: argparse.Namespace, result: Path) -> tuple[list[str], float, float]:
    """A row, requests per second, and those per CPU second of the frontend."""
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "serve", "--port", str(server.port)]
    command += [f"--num-prompts={args.requests}", f"--max-concurrency={args.streams}", f"--num-warmups={args.streams}"]
    command += [f"--random-input-len={args.input}", f"--random-output-len={args.output}", f"--json={result}"]
    before, client = server.cpu_seconds(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    used = {name: seconds - before[name] for name, seconds in server.cpu_seconds().items()}
    now = os.times()
    used["client"] = now.children_user + now.children_system - client.children_user - client.children_system
    seen: dict[str, Any] = json.loads(result.read_text())["summary"]
    requests, itl = args.requests + args.streams, seen["itl_ms"]  # the warm-up's, too
    alone = requests / used["frontend-0"]
    return (
        [
            f"{seen['requests_per_s']:.0f}",
            f"{alone:.0f}",
            f"{seen['output_tokens_per_s']:.0f}",
            f"{seen['tokens_per_event']:.2f}",
            f"{seen['ttft_ms']['p50']:.0f}",
            f"{itl['p50']:.1f}, {itl['p99']:.1f}" if itl else "",
            ", ".join(f"{name} {seconds / requests / args.output * 1e6:.1f}" for name, seconds in used.items()),
        ],
        seen["requests_per_s"],
        alone,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="start | hops | load")
    kind = kinds.add_parser("start")
    kind.add_argument("model", nargs="?", default="demo")
    kind.add_argument("-n", type=int, default=5, help="how often")
    kind = kinds.add_parser("hops")
    kind.add_argument("--prompt-tokens", type=int, default=64)
    kind.add_argument("--requests", type=int, default=200)
    kind = kinds.add_parser("load")
    kind.add_argument("--streams", type=int, default=64, help="at once")
    kind.add_argument("--requests", type=int, default=800)
    kind.add_argument("--input", type=int, default=128, help="tokens of each prompt")
    kind.add_argument("--output", type=int, default=64, help="tokens of each answer")
    kind.add_argument("--device", default="modelled:h200")
    kind.add_argument("--slowdown", type=float, default=1.0, help="of the modelled device")
    kind.add_argument("--rounds", type=int, default=3)
    kind.add_argument("--against", metavar="PYTHON", help="of an environment with another checkout")
    args, flags = parser.parse_known_args()
    if flags and args.kind != "start":
        parser.error(f"unknown: {' '.join(flags)}")
    console = Console()
    console.width = max(console.width, 160)
    console.print({"start": start, "hops": hops, "load": load}[args.kind](args, flags))


if __name__ == "__main__":
    main()
