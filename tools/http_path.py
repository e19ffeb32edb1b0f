"""What the way around the model costs: CPU time per token of every process, with many streams at once over HTTP.

    python tools/http_path.py [--streams 64] [--requests 800] [--slowdown 10] [--rounds 3]
    python tools/http_path.py --device cpu

A deployment of one engine, loaded by `penstock bench serve`, all on this machine. A modelled device is far faster than
the path around it; slowed down ten times it is about as fast as the path, and no events are merged. With `--device cpu`
it is the demo model itself. "held back" is how long the oldest token of an event waited for the others in it, as the
client sees it (`bench.record`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

READY = re.compile(r"ready: \S+ on http://([\d.]+):(\d+)/v1")
PROCESS = re.compile(r"(\S+) is process (\d+)")
TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def deployment(engine: dict[str, object], folder: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """(port, process ids by name) of a server that is ready."""
    file, log = folder / "one.yaml", folder / "log"
    file.write_text(yaml.safe_dump({"model": "demo", "engine": engine, "instances": [{"count": 1}]}))
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "up", str(file), "--port", "0"], stderr=sink
        )
    try:
        while (found := READY.search(log.read_text())) is None:
            if server.poll() is not None:
                raise SystemExit(f"penstock up ended with {server.returncode}: {log.read_text()[-1000:]}")
            time.sleep(0.05)
        yield int(found[2]), {name: int(pid) for name, pid in PROCESS.findall(log.read_text())}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def cpu_seconds(pid: int) -> float:
    """Of all threads, in user and system together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def load(port: int, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], float]:
    """What the client reports, and the CPU seconds that it took itself."""
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "serve", "--port", str(port)]
    command += [f"--num-prompts={args.requests}", f"--max-concurrency={args.streams}", f"--num-warmups={args.streams}"]
    command += [f"--random-input-len={args.input}", f"--random-output-len={args.output}", f"--json={folder / 'result'}"]
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads((folder / "result").read_text())["summary"], used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--input", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--device", default="modelled:h200")
    parser.add_argument("--slowdown", type=float, default=1.0, help="of the modelled device")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engine: dict[str, object] = {"device": args.device, "max-num-seqs": max(args.streams, 64)}
    engine |= {"slowdown": args.slowdown} if args.device.startswith("modelled:") else {}
    with tempfile.TemporaryDirectory() as scratch, deployment(engine, Path(scratch)) as (port, processes):
        table = Table("tokens/s", "tokens an event", "held back p99, max ms", "TTFT p50", "ITL p50, p99 ms", *processes)
        table.add_column("client")
        for _ in range(args.rounds):
            before = {name: cpu_seconds(pid) for name, pid in processes.items()}
            seen, client = load(port, args, Path(scratch))
            used = [cpu_seconds(pid) - before[name] for name, pid in processes.items()] + [client]
            held, itl = seen["held_back_ms"], seen["itl_ms"]
            tokens = (args.requests + args.streams) * args.output
            table.add_row(
                f"{seen['output_tokens_per_s']:.0f}",
                f"{seen['tokens_per_event']:.2f}",
                f"{held['p99']:.1f}, {held['max']:.1f}",
                f"{seen['ttft_ms']['p50']:.0f}",
                f"{itl['p50']:.1f}, {itl['p99']:.1f}",
                *(f"{seconds / tokens * 1e6:.1f}" for seconds in used),
            )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    print("below the processes' names: microseconds of CPU per output token, prompts and requests included")


if __name__ == "__main__":
    main()
