"""Seconds from starting `penstock serve` to /ready and to the first token, and where they go.

usage: python tools/startup.py [MODEL] [-n 5] [--port 18470] [flags of `penstock serve`]

"engine begins" is when its process is made, "loaded" when model and cache are there; "imports" is what the engine
imports, torch above all, timed by itself. The two CPU times are those of the processes when /ready is answered: on a
machine that is busy with other things they say more than the rest.
"""

from __future__ import annotations

import argparse
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
from datetime import datetime
from pathlib import Path

MILESTONES = {"engine begins": "engine-0 is process", "loaded": "of KV cache"}  # -> what the log says then
IMPORTS = "import penstock.cli.engine, penstock.engine.server, penstock.engine.build"
TICKS = os.sysconf("SC_CLK_TCK")


def once(model: str, port: int, flags: list[str]) -> dict[str, float]:
    """Seconds of each part since the start."""
    command = [sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", str(port), *flags]
    with tempfile.NamedTemporaryFile("w+") as log:
        wall, begin = time.time(), time.perf_counter()
        server = subprocess.Popen(command, stderr=log)
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    if server.poll() is not None:
                        raise SystemExit(f"the server ended with {server.returncode}") from None
                    time.sleep(0.02)
            ready = time.perf_counter() - begin
            text = Path(log.name).read_text()
            engine = int(re.findall(r"engine-0 is process (\d+)", text)[-1])
            used = {"CPU of server": cpu_seconds(server.pid), "CPU of engine": cpu_seconds(engine)}
            body = json.dumps({"prompt": "import os", "max_tokens": 1}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=60).close()
            first = time.perf_counter() - begin
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    parts = {name: said(text, words) - wall for name, words in MILESTONES.items()}
    return parts | {"ready": ready, "first token": first} | used


def said(log: str, words: str) -> float:
    """When the log said so, in seconds since 1970."""
    line = next(line for line in log.splitlines() if words in line)
    return datetime.fromisoformat(line.split()[0]).timestamp()


def cpu_seconds(pid: int) -> float:
    """Of all threads, in user and system together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def imports() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-n", type=int, default=5, help="how often")
    parser.add_argument("--port", type=int, default=18470)
    options, flags = parser.parse_known_args()
    rounds = [once(options.model, options.port + i, flags) | {"imports": imports()} for i in range(options.n)]
    for part in rounds[0]:
        values = [times[part] for times in rounds]
        print(f"{part:<14} median {statistics.median(values):.2f} s, from {min(values):.2f} to {max(values):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
