import torch
from torch import Tensor

from penstock.nn.native import function


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    assert logits.dtype == torch.float32
    logits = logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    finite = torch.empty(len(logits), dtype=torch.bool)
    function("penstock_argmax", "pnnpp")(logits.data_ptr(), *logits.shape, tokens.data_ptr(), finite.data_ptr())
    return tokens, finite
