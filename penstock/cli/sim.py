"""`penstock sim run | compare`: simulate a whole cluster, on recorded traffic, with the production policies."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.options import LARGEST_SCALE, add_flag, between, integer, number, words


def add_parser(commands: Any) -> None:
    """Adds `sim` to the command line."""
    parser = commands.add_parser("sim", allow_abbrev=False, help="simulate a cluster", description=__doc__)
    kinds = parser.add_subparsers(dest="sim_command", required=True, metavar="KIND")

    one = kinds.add_parser("run", allow_abbrev=False, help="simulate a scenario once")
    _common_flags(one)
    one.add_argument("--policy", metavar="NAME", help="instead of the file's; NAME@LAYOUT for one of its layouts")
    add_flag(
        one, "rate-scale", number(0, LARGEST_SCALE), help="factor on the workload's own rate, instead of the file's"
    )
    one.add_argument("--save-requests", action="store_true", help="keep every request in the --json file")
    add_flag(
        one, "slices", integer(1, 100_000), metavar="N", help="cut the time into so many, simulated beside each other"
    )
    add_flag(one, "warm-up", between(0, 1e6), metavar="S", help="seconds that a slice begins earlier (default: 60)")
    add_flag(one, "jobs", integer(1, 1024), help="processes for slices (default: as many as there are cores)")
    one.set_defaults(run=run)

    many = kinds.add_parser(
        "compare", allow_abbrev=False, help="find the greatest rate at which enough requests keep both of their targets"
    )
    _common_flags(many)
    add_flag(many, "policies", words, metavar="A,B", help="names, each with @LAYOUT if need be (default: all)")
    add_flag(
        many,
        "seeds",
        integer(1, 1000),
        1,
        metavar="N",
        help="so many, from --seed on; the median is reported (default: 1)",
    )
    add_flag(many, "rates", words, metavar="A,B", help="requests per second to simulate, instead of a search")
    many.add_argument(
        "--bound", action=argparse.BooleanOptionalAction, default=True, help="tell what nobody could do better than"
    )
    many.add_argument("--save", metavar="FOLDER", help="write each policy's result and its page there")
    add_flag(many, "jobs", integer(1, 1024), help="processes at once (default: as many as there are cores)")
    many.set_defaults(run=compare)


def _common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a YAML file; scenarios/ has some to start from")
    parser.add_argument("--json", metavar="OUT", help="write the result there")
    parser.add_argument("--html", metavar="OUT", help="write a page about it there")
    add_flag(parser, "seed", integer(0), help="of traffic, step times and lots, instead of the file's")
    parser.add_argument(
        "--traces", metavar="DIR", help="the folder of traces (default: ../shared/traces beside the project)"
    )
    parser.add_argument("--trace", metavar="FILE", help="another trace of the same columns")


def run(args: argparse.Namespace) -> int:
    """Simulate once and show the result. Raises ConfigError."""
    from penstock.cli.sim_run import run

    return run(args)


def compare(args: argparse.Namespace) -> int:
    """Search for each policy, all at once. Raises ConfigError."""
    from penstock.cli.sim_compare import compare

    return compare(args)
