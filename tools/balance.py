"""How even load is kept on many devices, simulated: prints the figures of docs/experts.md.

python -m tools.balance experts
python -m tools.balance groups --lengths FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.sched.parallel.rebalancing import ExpertRanks
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.expert_load import simulate_experts, zipf
from penstock.sim.group_load import simulate_groups
from penstock.workload.lengths import Independent, LengthPairs, LogNormal, read_lengths

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


def groups(args: argparse.Namespace) -> None:
    """DeepSeek-V3 decodes in so many data-parallel groups, whose sequences have unlike lengths."""
    lengths: LengthPairs = Independent(LogNormal(*args.prompt), LogNormal(*args.output))
    if args.lengths is not None:
        lengths = read_lengths(args.lengths)
    device = DEVICES[args.device].parallel(1, data=args.groups, experts=True)
    ways = {"in turn": (False, False), "by free KV": (True, False), "by free KV, and sequences move": (True, True)}
    for name, (by_room, moves) in ways.items():
        found = simulate_groups(
            lengths,
            StepTime(device, GEOMETRIES[MODEL]),
            np.random.default_rng(args.seed),
            groups=args.groups,
            sequences=args.batch,
            room=args.room,
            units=args.units,
            steps=args.steps,
            by_room=by_room,
            moves=moves,
        )
        print(
            f"{name}: {found.apart:,.0f} tokens between the fullest and the emptiest group; step {found.step_ms:.2f} "
            f"ms, of which a group waits {found.wait_ms:.2f} ms; {found.moved:.0f} moves for 1,000 sequences that end; "
            f"busiest unit of the fullest group {found.in_turn:,.0f} tokens in turn, {found.spread:,.0f} spread, "
            f"{found.mean:,.0f} in the mean",
            flush=True,
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
    of_groups = commands.add_parser("groups", help=groups.__doc__)
    of_groups.add_argument("--device", choices=DEVICES, default=DEVICE)
    of_groups.add_argument("--groups", type=int, default=80)
    of_groups.add_argument("--batch", type=int, default=32, help="sequences of a group, in the mean")
    of_groups.add_argument("--room", type=int, default=1_500_000, help="tokens of KV of a group")
    of_groups.add_argument("--units", type=int, default=132, help="of a device, that attend")
    of_groups.add_argument("--lengths", help="file of observed lengths, plain or .gz, rather than these two")
    shape: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("MEAN", "CV")}
    of_groups.add_argument("--prompt", **shape, default=[2000, 1.5], help="tokens, and their coefficient of variation")
    of_groups.add_argument("--output", **shape, default=[8000, 1.0], help="the same")
    of_groups.add_argument("--steps", type=int, default=4000)
    of_groups.set_defaults(run=groups)
    args = parser.parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
