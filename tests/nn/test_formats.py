"""Formats of quantised checkpoints: the weights that they mean, in any parts and shards, and what is refused."""

import copy
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import ConfigError
from penstock.nn import reading
from penstock.nn.formats import AT_LOAD, read_quantisation
from penstock.nn.formats.at_load import INT8
from penstock.nn.linear import ColumnLinear, Linear, RowLinear, Shard
from penstock.nn.loader import load, load_model
from penstock.nn.methods import QUANTISED, method_for
from penstock.nn.weight_cache import WeightCache
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.quantised import VARIETIES, awq, fp8, gptq, hqq, quantise_checkpoint

CPU = torch.device("cpu")
INS, OUTS = 128, (96, 32, 32)
SIZES = {"intermediate_size": 128, "num_hidden_layers": 2}


class _Stored:
    """What a header says of a tensor."""

    def __init__(self, tensor):
        names = {
            torch.int32: "I32",
            torch.int64: "I64",
            torch.int8: "I8",
            torch.uint8: "U8",
            torch.float8_e4m3fn: "F8_E4M3",
        }
        names |= {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
        self.dtype, self.shape = names[tensor.dtype], tuple(tensor.shape)


def written(variety, seed=0):
    torch.manual_seed(seed)
    return [variety.write(torch.randn(width, INS) / 10, np.random.default_rng(seed)) for width in OUTS]


def holding(linear, variety, parts, name=None, dtype=torch.float32):
    found = {f"0.{key}": _Stored(tensor) for key, tensor in parts[0].tensors.items()}
    form = read_quantisation({"quantization_config": variety.config}, found, None).of("0")
    assert form.codes is not None
    method = method_for(CPU, dtype, form.codes) if name is None else QUANTISED[name](form.codes)
    linear.to(dtype).hold(method, form)
    linear._apply(lambda place: torch.full(place.shape, 3, dtype=place.dtype))
    linear.prepare()
    return linear


def load_parts(linear, parts, rows=None):
    """As the loader does, perhaps only so many rows at once: all but the main tensor come first."""
    for i, part in enumerate(parts):
        expected = linear.tensors(i)
        assert {key for key, tensor in expected.items() if tensor.needed} <= part.tensors.keys() <= expected.keys()
        for last in (False, True):
            for key, tensor in part.tensors.items():
                if expected[key].shape is None or (key == linear.format.main) != last:
                    continue
                assert tuple(tensor.shape) == expected[key].shape or tensor.numel() == 1
                assert _Stored(tensor).dtype in expected[key].dtypes
                step = rows or max(1, len(tensor) if tensor.ndim else 1)
                pieces = [tensor] if tensor.ndim == 0 else tensor.split(step)
                for at, piece in enumerate(pieces):
                    held = piece.clone()
                    linear.load(key, held, i, at * step)
                    held.view(-1).view(torch.uint8).fill_(77)  # memory that is used again
    return linear


@pytest.mark.parametrize("variety", VARIETIES, ids=str)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("rows", [None, 7])
def test_weights_are_what_the_format_means(variety, name, rows):
    parts = written(variety)
    linear = load_parts(holding(Linear(INS, OUTS), variety, parts, name), parts, rows)
    assert torch.equal(linear.dense(), torch.cat([part.dense for part in parts]))
    assert not linear._waiting


@pytest.mark.parametrize("variety", VARIETIES, ids=str)
@pytest.mark.parametrize("rows", [None, 7])
def test_shards_are_the_whole_together(variety, rows):
    parts = written(variety)
    whole = torch.cat([part.dense for part in parts])
    shards = [Shard(rank, 2) for rank in range(2)]
    each = [load_parts(holding(ColumnLinear(INS, OUTS, shards=s), variety, parts), parts, rows) for s in shards]
    found = [linear.dense().split([width // 2 for width in OUTS]) for linear in each]
    assert torch.equal(torch.cat([torch.cat(both) for both in zip(*found, strict=True)]), whole)
    group = holding(Linear(INS, OUTS), variety, parts).format.codes.group
    if group and (INS // 2) % group:
        return  # refused before: see below
    linears = [holding(RowLinear(INS, OUTS[:1], shard=s), variety, parts) for s in shards]
    if linears[0].format.codes.ordered and group:
        with pytest.raises(ValueError, match="act-order"):
            load_parts(linears[0], parts[:1], rows)
        return
    each = [load_parts(linear, parts[:1], rows).dense() for linear in linears]
    assert torch.equal(torch.cat(each, 1), parts[0].dense)


def test_an_order_that_keeps_to_shards_is_split():
    variety = gptq(4, 32, False, True, "gptq_v2")
    torch.manual_seed(0)

    class Within:
        def permutation(self, ins):
            return np.concatenate(
                [np.random.default_rng(0).permutation(ins // 2), ins // 2 + np.arange(ins // 2)[::-1]]
            )

    parts = [variety.write(torch.randn(32, INS), Within())]
    each = [
        load_parts(holding(RowLinear(INS, (32,), shard=Shard(rank, 2)), variety, parts), parts).dense()
        for rank in range(2)
    ]
    assert torch.equal(torch.cat(each, 1), parts[0].dense)


def test_projections_in_different_orders_are_refused():
    variety = gptq(4, 32, False, True, "gptq")
    parts = [variety.write(torch.randn(width, INS), np.random.default_rng(width)) for width in (96, 32)]
    linear = holding(Linear(INS, (96, 32)), variety, parts)
    with pytest.raises(ValueError, match="different orders"):
        load_parts(linear, parts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"g_idx": torch.arange(INS).flip(0).int() // 32}, "g_idx: expected are groups of 32 inputs, in their order"),
        ({"qzeros": torch.zeros(4, 12, dtype=torch.int32)}, "with sym, all zeros are expected to be 8"),
    ],
)
def test_values_that_config_json_rules_out_are_refused(change, says):
    variety = gptq(4, 32, True, False, "gptq")
    parts = [variety.write(torch.randn(96, INS), np.random.default_rng(0))]
    parts[0].tensors |= change
    with pytest.raises(ValueError, match=says):
        load_parts(holding(Linear(INS, (96,)), variety, parts), parts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "llama", **SIZES)


def same(model, dense):
    blocks = model.model.layers
    for i, block in enumerate(blocks):
        own = f"model.layers.{i}."
        for linear, names in (
            (block.mixer.qkv_proj, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            (block.mixer.o_proj, ["self_attn.o_proj"]),
            (block.feed_forward.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]),
            (block.feed_forward.down_proj, ["mlp.down_proj"]),
        ):
            assert torch.equal(linear.dense(), torch.cat([dense[f"{own}{name}.weight"] for name in names])), names
    assert torch.equal(model.head.dense(), dense["lm_head.weight"])


WHOLE = [v for v in VARIETIES if not re.search("128|-64", v.name)]  # widths of 64 have no such groups


@pytest.mark.parametrize("variety", WHOLE, ids=str)
@pytest.mark.parametrize("head", [False, True])
def test_checkpoints_are_loaded_as_they_are(plain, tmp_path, monkeypatch, variety, head):
    dense = quantise_checkpoint(plain, tmp_path, variety, head)
    monkeypatch.setattr(reading, "CHUNK", 3000)
    for load_format in ("mmap", "sequential"):
        model = load_model(tmp_path, CPU, load_format=load_format)
        same(model, dense)
        held = {linear.method.name for linear in model.modules() if isinstance(linear, Linear)} & set(QUANTISED)
        assert held
    assert (model.head.method.name in QUANTISED) == head


@pytest.mark.parametrize("asked", AT_LOAD)
@pytest.mark.parametrize("tied", [False, True])
def test_plain_checkpoints_are_quantised_when_they_are_loaded(tmp_path, monkeypatch, asked, tied):
    folder = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied)
    plain, model = load_model(folder, CPU), load_model(folder, CPU, quantization=asked)
    limit = {"int8": 0.01, "fp8": 0.04, "int4": 0.12, "hqq4": 0.12, "hqq3": 0.25, "hqq2": 0.55}[asked]
    for name, linear in plain.named_modules():
        if isinstance(linear, Linear) and (linear is plain.head or not name.endswith("embed_tokens")):
            ours, theirs = model.get_submodule(name), linear.dense()
            error = (ours.dense() - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
            assert 0 < error < (0.01 if linear is plain.head and asked != "fp8" else limit), (name, error)
    monkeypatch.setattr(reading, "CHUNK", 3000)
    again = load_model(folder, CPU, quantization=asked, load_format="sequential")
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("asked", AT_LOAD)
def test_what_is_quantised_at_load_is_kept_on_disk_apart(plain, tmp_path, asked):
    cache = WeightCache(tmp_path, least=0)
    for _ in range(2):
        loaded = load(plain, CPU, None, cache, quantization=asked)
        cache.save()
    assert loaded.source in ("host", "disk")
    other = load(plain, CPU, None, cache, quantization="int8" if asked != "int8" else "int4")
    assert other.source == "checkpoint"
    fresh = load_model(plain, CPU, quantization=asked)
    assert all(map(torch.equal, loaded.model.parameters(), fresh.parameters()))


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_shards_are_of_what_the_whole_is_quantised_to(plain, asked):
    whole = load_model(plain, CPU, quantization=asked)
    each = [load_model(plain, CPU, shard=Shard(rank, 2), quantization=asked) for rank in range(2)]
    for i, block in enumerate(whole.model.layers):
        ours = [model.model.layers[i] for model in each]
        assert torch.equal(torch.cat([b.mixer.o_proj.dense() for b in ours], 1), block.mixer.o_proj.dense())
        assert torch.equal(
            torch.cat([b.feed_forward.down_proj.dense() for b in ours], 1), block.feed_forward.down_proj.dense()
        )
    assert torch.equal(torch.cat([model.head.dense() for model in each]), whole.head.dense())


def test_numbers_that_are_none_are_not_quantised(tmp_path):
    folder = write_checkpoint(tmp_path, "llama")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(weights, file)
    with pytest.raises(ConfigError, match=r"model.layers.1.mlp.up_proj.weight.*not finite"):
        load_model(folder, CPU, quantization="int8")


def test_rounding_is_to_the_nearest_and_zeros_stay_zeros():
    rows = torch.tensor([[0.0, 1.0, -127.0, 63.4], [0.0, 0.0, 0.0, 0.0]])
    pieces = INT8.rows(rows, {}, 0, range(2), range(4), 4)
    assert (pieces.codes.int() - 128).tolist() == [[0, 1, -127, 63], [0, 0, 0, 0]]
    assert pieces.scales.tolist() == [[1.0], [0.0]]


G = "quantization_config"
BAD = [
    (gptq(4, 32, True, False, "gptq"), {"bits": 5}, f"{G}.bits is 5, allowed is 2, 3, 4, 8"),
    (gptq(4, 32, True, False, "gptq"), {"bits": True}, f"{G}.bits is True"),
    (gptq(4, 32, True, False, "gptq"), {"group_size": 48}, f"{G}.group_size is 48, allowed is -1, 16, 32"),
    (gptq(4, 32, True, False, "gptq"), {"checkpoint_format": "marlin"}, "is 'marlin', allowed is gptq, gptq_v2"),
    (gptq(4, 32, True, False, "gptq"), {"dynamic": {"-:x": {}}}, f"{G}.dynamic: layers that are quantised differently"),
    (awq(32), {"bits": 8}, f"{G}.bits is 8, allowed is 4"),
    (awq(32), {"version": "gemv"}, f"{G}.version is 'gemv', allowed is gemm"),
    (awq(32), {"zero_point": False}, f"{G}.zero_point is False, allowed is True"),
    (fp8("block", "fp8"), {"weight_block_size": [1, 2]}, r"weight_block_size is [1, 2], allowed is [128, 128] or none"),
    (fp8("block", "fp8"), {"activation_scheme": "x"}, "activation_scheme is 'x', allowed is dynamic, static"),
    (hqq(4, 32), {"quant_config": {"q": {}}}, f"{G}.quant_config is"),
    (hqq(4, 32), {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', supported are gptq, awq"),
]


@pytest.mark.parametrize(("variety", "change", "says"), BAD, ids=lambda case: str(case)[:40])
def test_what_a_format_cannot_is_named(plain, tmp_path, variety, change, says):
    quantise_checkpoint(plain, tmp_path, variety)
    config = json.loads((tmp_path / "config.json").read_text())
    config[G] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_model(tmp_path, CPU)


SCHEMES = [
    ({"num_bits": 6}, "weights.num_bits is 6, allowed is 2, 3, 4, 8"),
    ({"strategy": "tensor_group"}, "weights.strategy is 'tensor_group', allowed is channel, group"),
    ({"group_size": 7, "strategy": "group"}, "weights.group_size is 7, allowed is -1, 16"),
    ({"type": "float"}, "weights.num_bits is 4, allowed is 8"),
    ({"dynamic": True}, "weights.dynamic is True, allowed is False"),
    ({"actorder": "any"}, "weights.actorder is 'any', allowed is group"),
]


@pytest.mark.parametrize(("change", "says"), SCHEMES, ids=lambda case: str(case)[:40])
def test_what_a_scheme_cannot_is_named(change, says):
    variety = next(v for v in VARIETIES if v.name == "ct-packed-4-32")
    config = copy.deepcopy(variety.config)
    config["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(ConfigError, match=re.escape(f"config.json: {G}.config_groups.group_0.{says}")):
        read_quantisation({G: config}, {}, None)


@pytest.mark.parametrize("group", ["64", "128"])
def test_groups_that_a_width_has_no_whole_ones_of_are_named(plain, tmp_path, group):
    variety = next(v for v in VARIETIES if v.name == f"awq-{group}")
    quantise_checkpoint(plain, tmp_path, awq(32))
    config = json.loads((tmp_path / "config.json").read_text()) | {G: variety.config | {"group_size": 256}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"model.layers.0.self_attn.q_proj: its 64 inputs are no multiple of the group"
    ):
        load_model(tmp_path, CPU)


def test_ranks_that_would_cut_groups_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "plain", "llama", intermediate_size=64)
    quantise_checkpoint(folder, tmp_path, awq(64))
    with pytest.raises(ConfigError, match=r"tensor-parallel-size: 2, model.layers.0.self_attn.o_proj: inputs 0 to 32"):
        load_model(tmp_path, CPU, shard=Shard(0, 2))


def test_a_projection_of_several_that_is_quantised_otherwise_is_refused(plain, tmp_path):
    quantise_checkpoint(plain, tmp_path, awq(32))
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj"
    weights = {key: tensor for key, tensor in weights.items() if not key.startswith(name)}
    weights[f"{name}.weight"] = load_file(plain / "model.safetensors")[f"{name}.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} and model.layers.0.self_attn.q_proj are computed as one"):
        load_model(tmp_path, CPU)


def test_activations_of_a_checkpoint_in_float16_are_in_a_dtype_that_kernels_have(tmp_path, caplog):
    plain = write_checkpoint(tmp_path / "plain", "llama", **SIZES, dtype=torch.float16)
    quantise_checkpoint(plain, tmp_path, awq(32))
    with caplog.at_level("INFO", "penstock.loader"):
        assert load_model(tmp_path, CPU).dtype == torch.bfloat16
    assert "not in the checkpoint's float16" in caplog.text
    assert load_model(tmp_path, CPU, torch.float16).dtype == torch.float16
    assert load_model(plain, CPU, quantization="int8").dtype == torch.float16


def test_what_is_asked_for_beside_a_quantised_checkpoint(plain, tmp_path):
    quantise_checkpoint(plain, tmp_path, awq(32))
    load_model(tmp_path, CPU, quantization="awq")
    with pytest.raises(ConfigError, match="quantization: 'int8', but the checkpoint is quantised already"):
        load_model(tmp_path, CPU, quantization="int8")
    with pytest.raises(
        ConfigError, match="quantization: 'gptq', but the checkpoint is not quantised, allowed are auto"
    ):
        load_model(plain, CPU, quantization="gptq")
