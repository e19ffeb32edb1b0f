import torch
from torch import Tensor

from penstock.nn.ops.gumbel.counter import GOLDEN, MULTIPLIERS, SHIFTS, signed


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    x = keys[:, None] + (tokens + 1) * signed(GOLDEN)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ _shifted(x, shift)) * signed(multiplier)
    x = x ^ _shifted(x, SHIFTS[2])
    # the winner of an argmax has a uniform near 0 here, where floats are dense
    uniform = ((_shifted(x, 32).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)  # rounding could make it 1
    return -torch.log(-torch.log1p(-uniform))
