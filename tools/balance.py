"""How even load is kept on many devices, simulated: prints the figures of docs/experts.md.

python -m tools.balance experts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from penstock.sched.parallel.rebalancing import ExpertRanks
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.expert_load import simulate_experts, zipf

MODEL, DEVICE = "deepseek-v3", "h200"
CONTEXT = 4000  # tokens of a sequence that decodes


def experts(args: argparse.Namespace) -> None:
    """DeepSeek-V3's experts on so many ranks, each a data-parallel group."""
    shape = GEOMETRIES[MODEL]
    assert shape.experts is not None
    device = DEVICES[args.device].parallel(1, data=args.ranks, experts=True)
    for slots in args.slots:
        for skew in args.skew:
            rng = np.random.default_rng(args.seed)
            ranks = ExpertRanks(experts=shape.experts.count, layers=shape.expert_layers, ranks=args.ranks, slots=slots)
            found = simulate_experts(
                ranks,
                zipf(ranks.layers, ranks.experts, skew, rng),
                StepTime(device, shape),
                rng,
                intervals=args.intervals,
                tokens=args.tokens,
                work=(args.batch, args.batch * CONTEXT),
                drift=args.drift,
            )
            for number, row in enumerate(found):
                print(
                    f"{slots} slots, skew {skew:g}, interval {number}: busiest rank {row.fixed:.2f} of the mean as "
                    f"first placed, {row.moved:.3f} as placed now (worst layer {row.worst:.3f}); step "
                    f"{row.fixed_ms:.1f} ms, {row.moved_ms:.1f} ms, even {row.even_ms:.1f} ms; then "
                    f"{row.switches} layers switch, at most "
                    f"{row.loads} experts a rank"
                )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parser.add_argument("--seed", type=int, default=0)
    of_experts = commands.add_parser("experts", help=experts.__doc__)
    of_experts.add_argument("--device", choices=DEVICES, default=DEVICE)
    of_experts.add_argument("--ranks", type=int, default=64)
    of_experts.add_argument("--slots", type=int, nargs="*", default=[5, 6], help="experts that a rank holds of a layer")
    of_experts.add_argument("--skew", type=float, nargs="*", default=[0.3, 0.6, 1.0], help="exponents of Zipf's law")
    of_experts.add_argument("--batch", type=int, default=128, help="sequences that decode on a rank")
    of_experts.add_argument("--tokens", type=int, default=1_000_000, help="in an interval")
    of_experts.add_argument("--intervals", type=int, default=3)
    of_experts.add_argument("--drift", type=float, default=0.0, help="share of experts that exchange their popularity")
    of_experts.set_defaults(run=experts)
    args = parser.parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
