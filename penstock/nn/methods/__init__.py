"""How linears hold their weights: the name -> the method, best first. One file each, one line here."""

from __future__ import annotations

from typing import Any

import torch

from penstock.nn.methods.base import LinearMethod
from penstock.nn.methods.packed import Packed
from penstock.nn.methods.plain import Plain

PLAIN, PACKED = Plain(), Packed()
METHODS: dict[str, LinearMethod[Any]] = {method.name: method for method in (PACKED, PLAIN)}


def method_for(device: torch.device, dtype: torch.dtype) -> LinearMethod[Any]:
    """The best one for weights that a checkpoint has dense."""
    return next(method for method in METHODS.values() if method.missing(device, dtype) is None)
