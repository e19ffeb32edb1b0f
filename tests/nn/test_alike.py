"""Products whose rows get the same bits however many there are, over a library that for some numbers of rows sums in an
order of its own."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import functional

from penstock.nn import alike


def library(apart, calls):
    """One that cuts the inputs in two for these numbers of rows, and else goes through them from the first on."""

    def linear(x, weight, bias=None):
        calls.append(len(x))
        width = x.shape[1] // 2 if len(x) in apart else 1
        parts = zip(x.split(width, 1), weight.split(width, 1), strict=True)
        out = sum(torch.stack([row @ w.T for row in part]) for part, w in parts)
        return out if bias is None else out + bias

    return SimpleNamespace(linear=linear, pad=functional.pad)


@pytest.mark.parametrize("apart", [(), (1, 2, 16), tuple(n for n in alike.SIZES if n not in (64, 128))])
@pytest.mark.parametrize("biased", [True, False])
def test_a_row_is_multiplied_alike_in_any_company(apart, biased):
    torch.manual_seed(0)
    calls: list[int] = []
    x, weight = torch.randn(300, 24), torch.randn(40, 24)
    bias = torch.randn(40) if biased else None
    alike._products.cache_clear()
    with mock.patch.object(alike, "functional", library(apart, calls)), mock.patch.object(alike, "_fix_order"):
        whole = alike.linear(x, weight, bias)
        assert torch.allclose(whole, functional.linear(x, weight, bias), atol=1e-4)
        for first, rows in ((0, 1), (7, 2), (100, 17), (130, 129), (299, 1), (5, 0)):
            assert torch.equal(alike.linear(x[first : first + rows], weight, bias), whole[first : first + rows])
        calls.clear()
        for rows in (1, 2, 17, 300):
            alike.linear(x[:rows], weight, bias)
    assert not set(calls) & set(apart)  # what has been compared once is not again
    alike._products.cache_clear()


def test_what_sums_in_another_order_is_found():
    """The library of these tests makes a difference."""
    torch.manual_seed(0)
    calls: list[int] = []
    linear = library((2,), calls).linear
    x, weight = torch.randn(2, 24), torch.randn(40, 24)
    assert not torch.equal(linear(x, weight), torch.cat([linear(row[None], weight) for row in x]))
