"""Weights that the public quantisers' own code packs: what we make of them is what they make of them, to the bit."""

import numpy as np
import pytest
import torch

from penstock.nn.formats import read_quantisation
from penstock.nn.linear import Linear
from penstock.nn.methods import QUANTISED
from tests.helpers.quantised import VARIETIES, Written
from tests.nn.test_formats import holding, load_parts

pytestmark = pytest.mark.slow
# of an order of inputs the library has no decompression any more
OURS = [v for v in VARIETIES if v.name.startswith("ct-") and not v.name.endswith("order")]


def schemes(variety):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = dict(variety.config["config_groups"]["group_0"])
    config["weights"] = {key: value for key, value in config["weights"].items() if value is not None}
    return quantization.QuantizationScheme(targets=["Linear"], weights=config["weights"])


@pytest.mark.parametrize("variety", OURS, ids=str)
def test_compressed_tensors_reads_the_same_from_our_files(variety):
    """The files of the other tests, and what the library packs itself of what it has read."""
    scheme = schemes(variety)
    from compressed_tensors.compressors import BaseCompressor

    packed = variety.config["format"] == "pack-quantized"
    library = BaseCompressor.get_value_from_registry(variety.config["format"])
    torch.manual_seed(0)
    for outs in (96, 32):
        written = variety.write(torch.randn(outs, 128) / 10, np.random.default_rng(0))
        state = {name: tensor for name, tensor in written.tensors.items() if name != "input_scale"}
        theirs = library.decompress(dict(state), scheme)["weight"]
        linear = load_parts(holding(Linear(128, (outs,)), variety, [written], dtype=theirs.dtype), [written])
        assert torch.equal(linear.dense(), theirs)
        scale = state["weight_scale"]
        zero = state.get("weight_zero_point")
        if packed and zero is not None:
            from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

            zero = unpack_from_int32(zero, scheme.weights.num_bits, (outs, scale.shape[1]), packed_dim=0)
        again = {
            "weight": written.dense,
            "weight_scale": scale,
            **({} if zero is None else {"weight_zero_point": zero}),
        }
        packed_by_them = library.compress(again, scheme)
        name = "weight_packed" if packed else "weight"
        assert torch.equal(packed_by_them[name].view(torch.uint8), state[name].view(torch.uint8))
        if packed and zero is not None:
            assert torch.equal(packed_by_them["weight_zero_point"], state["weight_zero_point"])


@pytest.mark.parametrize("bits", [4, 3, 2, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_hqq_packs_and_means_the_same(bits, group):
    hqq = pytest.importorskip("hqq.core.quantize")
    torch.manual_seed(0)
    weight = torch.randn(96, 128) / 10
    codes, meta = hqq.Quantizer.quantize(weight, nbits=bits, group_size=group, axis=1, device="cpu")
    theirs = hqq.Quantizer.dequantize(codes, meta | {"compute_dtype": torch.float32})
    params = {"nbits": bits, "group_size": group, "axis": 1, "view_as_float": False}
    config = {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}}
    variety = type("Variety", (), {"config": config})
    written = Written({"W_q": codes, "scale": meta["scale"], "zero": meta["zero"]}, theirs)
    linear = load_parts(holding(Linear(128, (96,)), variety, [written]), [written])
    assert torch.equal(linear.dense(), theirs)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_our_half_quadratic_is_as_good_as_theirs(bits):
    hqq = pytest.importorskip("hqq.core.quantize")
    from penstock.nn.formats import AT_LOAD

    torch.manual_seed(0)
    weight = torch.randn(256, 512) * torch.rand(256, 1) / 10
    codes, meta = hqq.Quantizer.quantize(weight, nbits=bits, group_size=64, axis=1, device="cpu")
    theirs = hqq.Quantizer.dequantize(codes, meta | {"compute_dtype": torch.float32})
    form = AT_LOAD[f"hqq{bits}"]
    linear = Linear(512, (256,))
    linear.hold(QUANTISED["quantised"](form.codes), form)
    linear.prepare()
    linear.load("weight", weight)
    ours, best = ((of - weight).abs().pow(0.7).mean() for of in (linear.dense(), theirs))
    assert ours < 1.01 * best
    assert read_quantisation({}, {}, f"hqq{bits}").of("x") == form
