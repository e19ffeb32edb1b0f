"""Causal attention of a step's rows over their sequences' cached K and V."""

import torch
from torch import Tensor

from penstock.nn.batch import Batch
from penstock.nn.native import missing
from penstock.nn.native.views import DTYPES
from penstock.nn.ops.attention import native, reference, sdpa
from penstock.nn.ops.backends import Backend, Op

OP = Op(
    "attention",
    Backend("native", native.attention, frozenset({"cpu"}), missing),
    Backend("sdpa", sdpa.attention),
    Backend("reference", reference.attention),
)


def reads_in_place(device: str, dtype: torch.dtype) -> bool:
    """Whether blocks are read where they lie, through a table as fast as in a range."""
    return OP.backend_on(device).name == "native" and dtype in DTYPES


def attention(q: Tensor, cache: Tensor, batch: Batch, scale: float, window: int | None = None) -> Tensor:
    """softmax(q k^T * scale) v, where a row at position p sees positions (p - window, p] of its own sequence.

    Args:
        q: [rows, heads, dim]; query heads h * heads / kv_heads and following share K and V head h.
        cache: one layer, [blocks, 2, kv_heads, BLOCK_TOKENS, dim]; the step's own rows are stored already.
        batch: says which blocks hold each sequence.
        scale: of the scores.
        window: how many positions a row sees, itself included; None is all.

    Returns:
        [rows, heads, dim] in q's dtype.
    """
    return OP.on(q.device.type)(q, cache, batch, scale, window)
