"""Seconds from starting `penstock serve` to /ready and to the first token.

usage: python tools/startup.py [MODEL] [-n 5] [--port 18470]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def once(model: str, port: int) -> tuple[float, float]:
    """(seconds to ready, seconds to the first token)"""
    command = [str(Path(sys.executable).with_name("penstock")), "serve", model, "--port", str(port)]
    begin = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
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
        body = json.dumps({"prompt": "import os", "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).close()
        return ready, time.perf_counter() - begin
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description="measure the start of a server")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-n", type=int, default=5, help="how often")
    parser.add_argument("--port", type=int, default=18470)
    options = parser.parse_args()
    times = [once(options.model, options.port + i) for i in range(options.n)]
    for what, values in zip(("ready", "first token"), zip(*times, strict=True), strict=True):
        print(f"{what:<12} median {statistics.median(values):.2f} s, from {min(values):.2f} to {max(values):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
