"""`penstock bench kernels` from its flags to its figures."""

import argparse
import json

import pytest
import torch

from penstock.cli import bench
from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.breakdown import work_of
from penstock.nn import native
from penstock.nn.batch import Batch
from penstock.nn.kv import LayerKV

SMALL = ("--model", "demo", "--steps", 2, "--context", 40)


def run(*words):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", "kernels", *map(str, words)])
    return args.run(args)


def test_every_part_of_a_step_has_its_time(tmp_path, capsys):
    out, again = tmp_path / "out.json", tmp_path / "again.json"
    assert run(*SMALL, "--decode", 1, 3, "--prefill", 70, "--json", out) == 0
    content = json.loads(out.read_text())
    assert list(content["kernels"]) == ["decode 1", "decode 3", "prefill 70"]
    for found in content["kernels"].values():
        assert found["step_ms"] > 0
        assert sum(found["groups_ms"].values()) == pytest.approx(found["op_by_op_ms"])
        assert {"products", "attention", "norms", "drawing", "scheduling"} <= set(found["groups_ms"])
        assert all(op["seconds"] > 0 and op["calls"] > 0 and op["bytes"] > 0 for op in found["ops"].values())
    one, three = (content["kernels"][f"decode {n}"]["ops"]["attention"] for n in (1, 3))
    assert three["flops"] > 2 * one["flops"] > 0
    assert bool(content["ceilings"]) == (native.missing() is None)
    assert "attention" in capsys.readouterr().out
    assert run(*SMALL, "--decode", 1, "--prefill", "--json", again, "--compare", out) == 0
    assert "decode 1 ms" in capsys.readouterr().out


def test_an_ops_work_is_what_its_shapes_say():
    x, weight = torch.zeros(3, 10, dtype=torch.bfloat16), torch.zeros(7, 10, dtype=torch.bfloat16)
    assert work_of("linear", (x, weight, None), torch.zeros(3, 7)) == (60 + 140 + 84, 2 * 3 * 7 * 10)
    steps = [
        SequenceStep("a", 99, [1], (0, 1), 1, SamplingParams(), 0),
        SequenceStep("b", 0, [1, 1, 1], (2,), 1, SamplingParams(), 0),
    ]
    batch = Batch(steps, torch.device("cpu"))
    values, q = torch.zeros(3, 2, 2, BLOCK_TOKENS, 8), torch.zeros(4, 6, 8)
    in_8_bits = LayerKV(values.to(torch.int8), torch.zeros(3, 2, 2, BLOCK_TOKENS))
    for cache, token in ((LayerKV(values), 2 * 2 * 8 * 4), (in_8_bits, 2 * 2 * (8 + 4))):
        assert work_of("attention", (q, cache, batch, 1.0, None), q) == (2 * q.nbytes + 103 * token, 4 * 106 * 48)
        assert work_of("attention", (q, cache, batch, 1.0, 2), q) == (2 * q.nbytes + 6 * token, 4 * 7 * 48)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--decode", 0), "--decode"),
        (("--prefill", 1), "--prefill"),
        (("--steps", 0), "--steps"),
        (("--context", 0), "--context"),
        (("--decode", "--prefill"), "--decode, --prefill"),
    ],
)
def test_bad_values_are_named(words, named):
    with pytest.raises(ConfigError, match=f"^{named}: "):
        run(*SMALL, *words)
