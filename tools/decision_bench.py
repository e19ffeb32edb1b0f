"""How long dispatch policies take to decide where one sequence goes, over few and over many instances.

    python tools/decision_bench.py [--policies A,B] [--instances 8,64,1000]

Every decision is over a view of its own, in which as much is new as between two decisions of a busy cluster: some
instances have reported their load since, and one has got the sequence before.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from statistics import median, quantiles

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from penstock.sched.cluster import DISPATCH, ClusterView, Decision, Demand, InstanceLoad, Instances, Later, Rates
from penstock.sched.cluster.base import Holder
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime

DECISIONS = 300  # that are measured of each policy
WARM_UP = 20
RENEWED = 0.03  # share of the instances of which something new is known in the next view
HITS = 4  # instances that have a beginning of the prompt
DEVICE, SHAPE = DEVICES["h200"], GEOMETRIES["llama-3.1-8b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(DISPATCH), help="names (default: all)")
    parser.add_argument("--instances", default="8,64,1000", help="how many (default: %(default)s)")
    args = parser.parse_args()
    sizes = [int(count) for count in args.instances.split(",")]
    table = Table(title="One dispatch decision, in ms of CPU time: median (99th percentile)")
    table.add_column("policy")
    for count in sizes:
        table.add_column(f"{count} instances", justify="right")
    for name in args.policies.split(","):
        row = []
        for count in sizes:
            spent = measure(name, count)
            row.append(f"{median(spent):.3f} ({quantiles(spent, n=100)[-1]:.3f})")
        table.add_row(name, *row)
    Console().print(table)


def measure(policy: str, count: int) -> list[float]:
    """ms of each decision."""
    rng = random.Random(0)
    dispatch = DISPATCH[policy]()
    loads = [_load(f"instance-{number}", rng, now=0.0) for number in range(count)]
    spent: list[float] = []
    history: list[int] = []
    for number in range(WARM_UP + DECISIONS):
        now = number * 5e-3
        for place in {rng.randrange(count) for _ in range(max(1, int(RENEWED * count)))}:
            loads[place] = _load(loads[place].name, rng, now)
            history.append(place)
        view = ClusterView(
            now=now,
            instances=Instances(loads, history),
            queue=[_demand(number, loads, rng, now)],
            rates=Rates(arrivals=2000, completions=2000, attained=2000, prompt_tokens=1200.0, output_tokens=200.0),
            shortest=16384,
        )
        began = time.process_time()
        verdict = dispatch.decide(view, rng)
        if number >= WARM_UP:
            spent.append((time.process_time() - began) * 1e3)
        assert isinstance(verdict, Decision | Later)
    return spent


def _load(name: str, rng: random.Random, now: float) -> InstanceLoad:
    """A few sequences decode there, and some instances have prompts to prefill; none is full."""
    requests, prefilling = rng.randrange(24), rng.randrange(3)
    held = requests * 1200
    factors = {"gemm:compute": rng.uniform(0.97, 1.03), "gemm:memory": rng.uniform(0.97, 1.03)}
    pending = prefilling * 1200
    return InstanceLoad(
        name=name,
        times=StepTime(DEVICE, SHAPE, factors),
        max_model_len=16384,
        num_blocks=13000,
        free_blocks=13000 - held // 64,
        prefilling=prefilling,
        pending_tokens=pending,
        requests=requests + prefilling,
        decoding=requests,
        held_tokens=held + pending,
        free_at=now + 0.03 * prefilling,
        idle_at=now + 0.03 * prefilling,
        ttft=1.0,
        tpot=0.05,
        fetches=True,
    )


def _demand(number: int, loads: Sequence[InstanceLoad], rng: random.Random, now: float) -> Demand:
    demand = Demand(
        key=("frontend", str(number)),
        prompt_tokens=rng.randrange(256, 4096),
        max_tokens=1024,
        arrived=now,
        ttft=1.0,
        tpot=0.05,
    )
    holders = rng.sample(range(len(loads)), min(HITS, len(loads)))
    hits = {loads[holder].name: 64 * rng.randrange(1, 5) for holder in holders}
    most = max(hits.values())
    lenders = [Holder(name, tokens) for name, tokens in hits.items() if tokens == most]
    return replace(demand, hits=hits, lenders=lenders[:2])


if __name__ == "__main__":
    main()
