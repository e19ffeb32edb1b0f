"""What the cluster's index of prefixes costs: memory for each block that an instance has, and the time of a match.

    python tools/index_bench.py [--blocks 10000000] [--instances 1000] [--holders 200] [--store] [--host]

Each instance tells of its share of the blocks, as caches have them: prompts that no other instance has, and the prompt
of 131,072 tokens that is looked up, of which each of the holders has a part of its own length. With `--host` half of
the holders have their part below the device; with `--store` all instances share a remote store that has the prompt.
CPU times are medians: of a match, of what is asked after it (what is to be loaded), and of the ideal's question.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import CacheDelta
from penstock.kv.ideal import IdealCache
from penstock.kv.index import ClusterIndex

PROMPT = 131_072 // BLOCK_TOKENS
REPEATS = 51


def keys(count: int, rng: random.Random) -> list[bytes]:
    return [rng.randbytes(16) for _ in range(count)]


def resident() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def deltas(args: argparse.Namespace, prompt: list[bytes], rng: random.Random) -> Iterator[tuple[str, CacheDelta]]:
    """What the instances tell, one after another."""
    each = args.blocks // args.instances
    for number in range(args.instances):
        part = PROMPT * (number + 1) // args.holders if number < args.holders else 0
        below = args.host and number % 2
        own = keys(max(0, each - (0 if below else part)), rng)
        yield f"e{number}", CacheDelta(1, 1, own + ([] if below else prompt[:part]), [], whole=True)
        if below:
            yield f"e{number}", CacheDelta(1, 1, prompt[:part], [], "host", whole=True)
    if args.store:
        yield "e0", CacheDelta(1, 1, prompt, [], "remote", whole=True)


def median_ms(call: Callable[[], object]) -> float:
    took = []
    for _ in range(REPEATS):
        began = time.thread_time()
        call()
        took.append(time.thread_time() - began)
    return statistics.median(took) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="of all instances together")
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--holders", type=int, default=200, help="instances that have a part of the prompt")
    parser.add_argument("--host", action="store_true", help="half of these have it below the device")
    parser.add_argument("--store", action="store_true", help="a remote store that all share has the prompt")
    args = parser.parse_args()
    rng = random.Random(0)
    prompt, index, told = keys(PROMPT, rng), ClusterIndex(), 0
    if args.store:
        for number in range(args.instances):
            index.share(f"e{number}", "store")
    before, began = resident(), time.perf_counter()
    for name, delta in deltas(args, prompt, rng):
        told += len(delta.added)
        assert index.apply(name, delta)
    took, memory = time.perf_counter() - began, resident() - before
    found = index.match(prompt)
    ideal = IdealCache()
    ideal.ask(prompt, PROMPT * BLOCK_TOKENS)
    print(
        f"{told:,} blocks of {args.instances:,} instances: {memory / told:.0f} bytes a block, {took:.0f} s to tell; "
        f"{len(found):,} instances have a part of {PROMPT * BLOCK_TOKENS:,} tokens: "
        f"match {median_ms(lambda: index.match(prompt)):.2f} ms, "
        f"loads {median_ms(lambda: index.loads(prompt, found)):.2f} ms, "
        f"ideal {median_ms(lambda: ideal.ask(prompt, PROMPT * BLOCK_TOKENS)):.2f} ms"
    )


if __name__ == "__main__":
    main()
