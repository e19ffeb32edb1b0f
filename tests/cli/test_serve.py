"""Which processes `penstock serve` has, and what they are told."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import main, make_parser
from penstock.cli.options import read_options
from penstock.cli.serve import OPTIONS, _engine_fields, describe
from penstock.service.checkpoint import DEMO
from penstock.service.programs import plan, threads


def described(*flags):
    parser, _ = make_parser("serve")
    return describe("demo", read_options(OPTIONS, parser.parse_args(["serve", *flags]), {}))


def started(*flags):
    """Of each process its program, and what it is told."""
    programs = plan([(described(*flags), DEMO)], Path("/run"), (), _engine_fields, master="")
    return {program.name: (program, json.loads(program.command[-1])) for program in programs}


def test_one_engine_is_alone_and_has_its_blocks_to_itself():
    ((name, (program, told)),) = started().items()
    assert (name, program.needs, told["shown_as"]) == ("engine-0", None, "")
    assert told["kv_pool"] is told["transport"] is told["weights"] is None
    assert (described().policy, threads([described()])) == ("least_loaded", {})


@pytest.mark.parametrize("flags", [(), ("--device", "cpu"), ("--enable-expert-parallel",)])
def test_groups_have_what_those_of_a_deployment_have(flags):
    programs = started("--data-parallel-size", "3", *flags)
    names = ["engine-0", "engine-1", "engine-2"]
    assert list(programs) == ["kv-pool", *names]
    told = [programs[name][1] for name in names]
    assert {programs[name][0].needs for name in names} == {"kv-pool"}
    assert {each["kv_pool"] for each in told} == {programs["kv-pool"][1]["path"]}
    assert [each["transport"]["address"] for each in told] == [f"unix:/run/{name}.transport" for name in names]
    assert [each["shown_as"] for each in told] == names
    assert [each["options"]["data_parallel_rank"] for each in told] == [0, 1, 2]
    assert len({each["options"]["data_parallel_address"] for each in told}) == 1
    deployment = described("--data-parallel-size", "3", *flags)
    assert deployment.policy == "unified"
    assert threads([deployment]).keys() == {"OMP_NUM_THREADS"}


def test_groups_on_gpus_hand_nothing_over():
    programs = started("--data-parallel-size", "2", "--device", "cuda")
    assert list(programs) == ["engine-0", "engine-1"]
    assert all(told["transport"] is told["kv_pool"] is None for _, told in programs.values())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--enable-expert-parallel", "--enable-sleep-mode"),
            "--enable-sleep-mode: true, with data-parallel-size and enable-expert-parallel allowed is false",
        ),
        (("--tensor-parallel-size", "64"), "--data-parallel-size: 64TP2DP are 128 ranks, allowed are 64 together"),
    ],
)
def test_what_groups_cannot_have_is_refused_before_anything_starts(flags, says, capsys):
    assert main(["serve", "demo", "--port", "0", "--data-parallel-size", "2", *flags]) == 2
    assert says in capsys.readouterr().err
