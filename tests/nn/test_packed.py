"""Packed weights: nothing is lost, and a row's product does not depend on the others, to the bit."""

import pytest
import torch

from penstock.nn import native, ops
from penstock.nn.ops import OPS
from penstock.nn.packed import PackedWeight

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (7, 5), (16, 2), (64, 64), (65, 33), (130, 1029), (200, 2050), (48, 1500)]

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = native.threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_packed_can_be_read_again(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    assert torch.equal(PackedWeight.of(weight).unpacked(), weight)
    # in parts that end anywhere, as fused projections come
    packed = PackedWeight(*shape, dtype)
    packed.memory.fill_(float("nan"))
    packed.prepare()
    for first in range(0, shape[0], 21):
        packed.put(first, weight[first : first + 21].double())
    assert torch.equal(packed.memory, PackedWeight.of(weight).memory)
    index = torch.randint(0, shape[0], (9,))
    assert torch.equal(ops.packed_rows(packed, index), weight[index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_product_in_any_company(shape, dtype, threads):
    outs, ins = shape
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outs, ins), torch.randn(outs), torch.randn(400, ins)
    weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    packed = PackedWeight.of(weight)
    for wanted in (None, torch.float32):
        whole = ops.packed_linear(x, packed, bias, wanted)
        exact = x.double() @ weight.double().T + bias.double()
        # a sum in float32, then rounded to the result's dtype
        assert torch.allclose(
            whole.double(), exact, atol=1e-4 * ins**0.5, rtol=2**-8 if whole.dtype != torch.float32 else 1e-5
        )
        for rows in [*range(1, 41), 191, 193, 393]:
            assert torch.equal(ops.packed_linear(x[:rows], packed, bias, wanted), whole[:rows]), rows
            assert torch.equal(ops.packed_linear(x[7 : 7 + rows], packed, bias, wanted), whole[7 : 7 + rows]), rows


def test_threads_change_nothing():
    x, packed = torch.randn(37, 700), PackedWeight.of(torch.randn(900, 700))
    before, products = native.threads(), []
    for threads in (1, 2, 5):
        native.set_threads(threads)
        products.append(ops.packed_linear(x, packed))
    native.set_threads(before)
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])


def test_rows_that_are_no_numbers_stay_alone():
    """With an odd width, a row's last word must not reach into the next."""
    x = torch.randn(3, 33).bfloat16()
    x[1] = float("nan")
    packed = PackedWeight.of(torch.randn(20, 33).bfloat16())
    assert ops.packed_linear(x, packed).isnan().any(1).tolist() == [False, True, False]


def test_rows_may_lie_apart():
    x, packed = torch.randn(5, 100), PackedWeight.of(torch.randn(30, 64))
    assert torch.equal(ops.packed_linear(x[:, :64], packed), ops.packed_linear(x[:, :64].contiguous(), packed))
    assert torch.equal(ops.packed_linear(x.T[:64].T, packed), ops.packed_linear(x[:, :64].contiguous(), packed))
    assert ops.packed_linear(x[:0, :64], packed).shape == (0, 30)


def test_the_kernel_is_what_is_used():
    assert OPS["packed_linear"].backend_on("cpu").name == "native"
