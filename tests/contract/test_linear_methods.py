"""Every method that holds a linear's weight: what is loaded is what is multiplied with, in any parts and shards."""

import pytest
import torch
from torch.nn import functional

from penstock.nn.linear import ColumnLinear, Embedding, Linear, RowLinear, Shard
from penstock.nn.methods import METHODS, QUANTISED
from penstock.nn.packed_quantised import PackedQuantisedWeight
from penstock.nn.quantised import Codes, Pieces
from tests.helpers.quantised import random_pieces

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [
    (name, torch.device(device), dtype)
    for name, method in METHODS.items()
    for device in DEVICES
    for dtype in DTYPES
    if method.missing(torch.device(device), dtype) is None
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
INS, OUTS = 60, (48, 24, 24)


def held(linear: Linear, name: str, device: torch.device, dtype: torch.dtype) -> Linear:
    """As the loader makes it, with memory that has any values."""
    linear.to(dtype).hold(METHODS[name])
    linear._apply(lambda place: torch.full(place.shape, 3.0, dtype=place.dtype, device=device))
    linear.prepare()
    return linear


def load(linear: Linear, name: str, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> Linear:
    """All projections one by one, or as one where there is one weight for all."""
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        part = i if len(weights) > 1 else None
        tensors = {"weight": weight} | ({"bias": bias} if linear.has_bias else {})
        expected = {key: expected.shape for key, expected in linear.tensors(part).items()}
        assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == expected
        for key, tensor in tensors.items():
            linear.load(key, tensor, part)
    return linear


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{str(case[2]).removeprefix('torch.')}")
def case(request):
    torch.manual_seed(0)
    return request.param


def parts():
    return [torch.randn(width, INS) for width in OUTS], [torch.randn(width) for width in OUTS]


def test_products_are_those_of_what_was_loaded(case):
    name, device, dtype = case
    weights, biases = parts()
    linear = load(held(Linear(INS, OUTS, bias=True), name, device, dtype), name, weights, biases)
    together = load(
        held(Linear(INS, OUTS, bias=True), name, device, dtype), name, [torch.cat(weights)], [torch.cat(biases)]
    )
    assert all(map(torch.equal, linear.parameters(), together.parameters()))
    x = torch.randn(7, INS).to(device, dtype)
    dense = linear.dense()
    assert dense.shape == (sum(OUTS), INS)
    assert torch.allclose(dense.float().cpu(), torch.cat(weights), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    expected = functional.linear(x.double(), dense.double(), torch.cat(biases).to(device, dtype).double())
    for wanted in (dtype, torch.float32):
        found = linear.method.apply(x, linear.weight, linear.bias, wanted)
        assert found.dtype == wanted
        assert torch.allclose(found.double(), expected, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert wanted != dtype or torch.equal(linear(x), found)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_the_whole_together(case, size):
    name, device, dtype = case
    weights, biases = parts()
    whole = load(held(Linear(INS, OUTS, bias=True), name, device, dtype), name, weights, biases).dense()
    shards = [Shard(rank, size) for rank in range(size)]
    columns = [
        load(held(ColumnLinear(INS, OUTS, bias=True, shards=shard), name, device, dtype), name, weights, biases)
        for shard in shards
    ]
    for i, own in enumerate(whole.split(OUTS)):
        each = [linear.dense().split([width // size for width in OUTS])[i] for linear in columns]
        assert torch.equal(torch.cat(each), own)
        each = [linear.bias.split([width // size for width in OUTS])[i] for linear in columns]
        assert torch.equal(torch.cat(each).cpu(), biases[i].to(dtype))
    one, bias = [torch.cat(weights)], [torch.cat(biases)]
    rows = [
        load(held(RowLinear(INS, (sum(OUTS),), bias=True, shard=shard), name, device, dtype), name, one, bias)
        for shard in shards
    ]
    assert torch.equal(torch.cat([linear.dense() for linear in rows], 1), whole)
    assert [linear.bias is None for linear in rows] == [shard.rank > 0 for shard in shards]


def test_a_projection_may_be_split_less_than_the_others(case):
    """Two heads of K and V for four shards: two of these have the same."""
    name, device, dtype = case
    weights, biases = parts()
    of_kv = [Shard(rank * 2 // 4, 2) for rank in range(4)]
    found = [
        load(held(ColumnLinear(INS, OUTS, True, (Shard(rank, 4), kv, kv)), name, device, dtype), name, weights, biases)
        for rank, kv in enumerate(of_kv)
    ]
    keys = [linear.dense().split([12, 12, 12])[1].float().cpu() for linear in found]
    assert torch.equal(torch.cat(keys[::2]), weights[1].to(dtype).float())
    assert torch.equal(torch.cat(keys[1::2]), weights[1].to(dtype).float())


@pytest.mark.parametrize("scale", [1.0, 7.5])
def test_rows_are_looked_up(case, scale):
    name, device, dtype = case
    embedding = held(Embedding(50, INS, scale), name, device, dtype)
    load(embedding, name, [torch.randn(50, INS)], [torch.empty(0)])
    index = torch.tensor([3, 49, 0, 3], device=device)
    assert torch.equal(embedding(index), embedding.dense()[index] * torch.tensor(scale, dtype=dtype))


KINDS = [
    Codes(8),
    Codes(8, "e4m3", 0),
    Codes(8, "e4m3", 128),
    Codes(4, group=32, scales=torch.float16),
    Codes(4, group=64, zeros=True, ordered=True, scales=torch.float16),
    Codes(3, group=64, zeros=True, scales=torch.bfloat16),
    Codes(2, group=32, zeros=True),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codes", KINDS, ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_products_are_those_of_the_dense_weight(name, codes, dtype, device):
    method, device = QUANTISED[name](codes), torch.device(device)
    if (reason := method.missing(device, dtype)) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    outs, ins = 48, 192
    pieces = random_pieces(outs, ins, codes)
    weight = method.create(outs, ins, dtype, torch.device("meta"))
    weight._apply(lambda place: torch.full(place.shape, 3, dtype=place.dtype, device=device))
    method.prepare(weight)
    for first, last in ((0, 5), (5, 40), (40, outs)):
        zeros = None if pieces.zeros is None else pieces.zeros[first:last]
        method.put(weight, first, Pieces(pieces.codes[first:last], pieces.scales[first:last], zeros, pieces.order))
    expected = torch.empty(outs, ins, dtype=torch.float64)
    values = pieces.codes.view(torch.float8_e4m3fn).double() if codes.kind == "e4m3" else pieces.codes.double()
    for i in range(ins):
        group = i // codes.group if codes.group else 0
        zero = codes.middle if pieces.zeros is None else pieces.zeros[:, group].to(codes.scales).double()
        column = i if pieces.order is None else pieces.order[i]
        expected[:, column] = (values[:, i] - zero) * pieces.scales[:, group].to(codes.scales).double()
    dense = method.dense(weight)
    assert dense.dtype == weight.dtype == dtype
    assert weight.shape == dense.shape == (outs, ins)
    assert torch.allclose(dense.cpu().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    index = torch.tensor([3, 47, 0, 3], device=device)
    assert torch.equal(method.rows(weight, index), dense[index])
    x, bias = torch.randn(7, ins).to(device, dtype), torch.randn(outs).to(device, dtype)
    exact = functional.linear(x.double(), dense.double(), bias.double())
    product = exact
    if isinstance(weight, PackedQuantisedWeight):  # which has rows in 8 bits, and its own numbers in float32
        product = functional.linear(weight.rounded(x).double(), expected, bias.double())
        assert (product - exact).norm() < 0.01 * exact.norm()
    for wanted in (dtype, torch.float32):
        found = method.apply(x, weight, bias, wanted)
        assert found.dtype == wanted
        assert torch.allclose(found.double(), product, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if codes.ordered:
        with pytest.raises(ValueError, match="in different orders"):
            method.put(weight, 0, Pieces(pieces.codes, pieces.scales, pieces.zeros, pieces.order.flip(0)))
