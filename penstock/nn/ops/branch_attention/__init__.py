"""Attention of the beams of a search: a prompt that all share, and places of their own that are found by index."""

from torch import Tensor

from penstock.nn.batch import BranchSpan, Scratch
from penstock.nn.ops.backends import Backend, Op
from penstock.nn.ops.branch_attention import merged, reference

OP = Op("branch_attention", Backend("merged", merged.attention), Backend("reference", reference.attention))


def branch_attention(
    q: Tensor, cache: Tensor, span: BranchSpan, scale: float, window: int | None, scratch: Scratch
) -> Tensor:
    """softmax(q k^T * scale) v, where every row sees the prompt and then its own places, the last of them its own.

    Args:
        q: [rows of the span, heads, dim]; heads share K and V as in `attention`.
        cache: one layer, [blocks, 2, kv_heads, BLOCK_TOKENS, dim]; the step's own rows are stored already.
        span: says where the prompt's blocks and each row's places are.
        scale: of the scores.
        window: how many positions a row sees, itself included; None is all.
        scratch: for what is computed on the way.

    Returns:
        [rows of the span, heads, dim] in q's dtype.
    """
    return OP.on(q.device.type)(q, cache, span, scale, window, scratch)
