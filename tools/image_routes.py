"""The goodput of the routes that requests with images can take, and what repeated images save: real processes, the
bundled model that sees, three instances.

    python -m tools.image_routes [SECONDS]

Each route gets a deployment of its own, whose greatest rate within the limits `penstock bench slo` finds, by bisection
over probes of so many seconds each. Then one of them gets all that it can take in a closed loop, with images that are
all new, and with four of five that came before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.deployments import deployed

LIMITS = ("ttft:300", "tpot:20")  # ms
SHAPE = ("--endpoint", "chat", "--images", "4", "--random-input-len", "32", "--random-output-len", "32")
CLOSED = ("--max-concurrency", "8", "--num-prompts", "400")
ROUTES: dict[str, list[dict[str, Any]]] = {
    "E+P+D": [{"role": "encode"}, {"role": "prefill"}, {"role": "decode"}],
    "EP+D": [{"role": "prefill", "count": 2}, {"role": "decode"}],
    "ED+P": [{"role": "prefill"}, {"role": "decode", "count": 2}],
    "EPD": [{"count": 3}],
}


def content(route: str) -> dict[str, Any]:
    engine = {"device": "cpu", "dtype": "float32", "max-num-seqs": 64, "kv-cache-memory": "64M"}
    return {"model": "demo-vl", "engine": engine, "instances": ROUTES[route], "media-route": route}


def bench(kind: str, url: str, *flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        words = ("penstock.cli.main", "bench", kind, "--base-url", url, "--json", str(file), *SHAPE, *flags)
        done = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.DEVNULL, check=False)
        if not file.exists():
            raise SystemExit(f"penstock bench {kind} failed ({done.returncode})")
        return json.loads(file.read_text())


def main(seconds: str = "5") -> None:
    for route in ROUTES:
        with deployed(content(route)) as up:
            flags = ("--num-prompts", "20", "--probe-seconds", seconds, "--start", "10", "--tolerance", "0.2")
            found = bench("slo", up.url, *flags, "--goodput", *LIMITS)
            print(f"{route}: {found['best']} requests/s kept, {found['missed']} missed; load {os.getloadavg()[0]:.1f}")
    for repeats in ("0", "0.8"):
        with deployed(content("E+P+D")) as up:
            found = bench("serve", up.url, *CLOSED, "--image-repeats", repeats)["summary"]
            rate, first = found["requests_per_s"], found["ttft_ms"]
            print(f"repeats {repeats}: {rate:.1f} requests/s, TTFT p50 {first['p50']:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
