from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.bounded_logits import BoundedLogits
from penstock.nn.ops.argmax import argmax
from penstock.nn.ops.packed_linear import packed_linear
from penstock.nn.ops.sample import Draw, sample
from penstock.nn.packed import PackedWeight


def choose(x: Tensor, weight: PackedWeight, bounded: BoundedLogits, draws: Sequence[Draw]) -> Tensor:
    logits = packed_linear(x, weight, dtype=torch.float32)
    return torch.where(argmax(logits)[1], sample(logits, draws), -1)
