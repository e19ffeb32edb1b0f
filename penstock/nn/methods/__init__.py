"""How linears hold their weights, best first. One file each, one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.nn.methods.base import LinearMethod
from penstock.nn.methods.packed import Packed
from penstock.nn.methods.packed_quantised import PackedQuantised
from penstock.nn.methods.plain import Plain
from penstock.nn.methods.quantised import Quantised
from penstock.nn.quantised import Codes

PLAIN, PACKED = Plain(), Packed()
METHODS: dict[str, LinearMethod[Any, Any]] = {method.name: method for method in (PACKED, PLAIN)}  # of dense weights
QUANTISED: dict[str, Callable[[Codes], LinearMethod[Any, Any]]] = {
    method.name: method for method in (PackedQuantised, Quantised)
}


def method_for(device: torch.device, dtype: torch.dtype, codes: Codes | None = None) -> LinearMethod[Any, Any]:
    """The best one for weights that come dense, or as such codes."""
    methods = METHODS.values() if codes is None else [of(codes) for of in QUANTISED.values()]
    return next(method for method in methods if method.missing(device, dtype) is None)
