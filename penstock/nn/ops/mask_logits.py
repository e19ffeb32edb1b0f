"""Takes tokens out of the choice: their logits become -inf."""

import torch
from torch import Tensor

from penstock.nn.native import function, missing
from penstock.nn.ops.backends import Backend, Op


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """In place: in some rows only the tokens that a mask names keep their logits.

    Args:
        logits: [all rows, vocab] float32.
        rows: [rows] int64, each at most once.
        masks: [rows, words] int32 of at least vocab bits: bit t % 32 of word t // 32 is 1 where token t may be drawn.
    """
    OP[logits.device.type](logits, rows, masks)


def _reference(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    kept = ((masks[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(kept == 0, -torch.inf)


def _native(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    rows, masks = rows.contiguous(), masks.contiguous()
    function("penstock_mask_logits", "pnpnpn")(
        logits.data_ptr(), logits.shape[1], rows.data_ptr(), len(rows), masks.data_ptr(), masks.shape[1]
    )


OP = Op("mask_logits", Backend("native", _native, frozenset({"cpu"}), missing), Backend("reference", _reference))
