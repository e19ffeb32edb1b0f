"""The sum of what the ranks of a model have."""

import torch
from torch import Tensor

from penstock.nn.native import computable, is_bf16, missing, value
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ranks import DistributedRanks, Ranks, SharedMemoryRanks


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """[...] of the same shape on each rank -> their sum; x may be overwritten.

    It is summed in float32, in the order of ranks, and rounded to x's dtype: the same bits on every rank. NCCL sums in
    an order of its own, the same each time.

    Raises RankFailed.
    """
    return OP[x.device.type](x, ranks)


def _reference(x: Tensor, ranks: Ranks) -> Tensor:
    parts = ranks.gather(x).float()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def _native(x: Tensor, ranks: Ranks) -> Tensor:
    if not computable(x):
        return _reference(x, ranks)
    assert isinstance(ranks, SharedMemoryRanks)
    x = x.contiguous()
    status = value("penstock_all_reduce", "pnpn")(ranks.handle, is_bf16(x), x.data_ptr(), x.numel())
    ranks.expect(status)
    return x


def _nccl(x: Tensor, ranks: Ranks) -> Tensor:
    assert isinstance(ranks, DistributedRanks)
    return ranks.reduce(x.contiguous())


def _no_nccl() -> str | None:
    return None if torch.distributed.is_available() and torch.distributed.is_nccl_available() else "torch has no NCCL"


OP = Op(
    "all_reduce",
    Backend("native", _native, frozenset({"cpu"}), missing),
    Backend("nccl", _nccl, frozenset({"cuda"}), _no_nccl),
    Backend("reference", _reference),
)
