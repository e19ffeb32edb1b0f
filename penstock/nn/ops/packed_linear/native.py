"""`native/gemm.cpp`: the same bits for a row however many there are, and on any number of threads."""

import torch
from torch import Tensor

from penstock.nn.native import SUFFIX, function
from penstock.nn.packed import PackedWeight


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert x.dtype == weight.dtype
    assert dtype in (x.dtype, torch.float32)
    if x.stride(-1) != 1:
        x = x.contiguous()
    outs, ins = weight.shape
    out = x.new_empty(len(x), outs, dtype=dtype)
    name = f"penstock_linear_{SUFFIX[x.dtype]}" + ("_wide" if dtype != x.dtype else "")
    function(name, "pnnpnnppn")(
        weight.memory.data_ptr(),
        outs,
        ins,
        x.data_ptr(),
        x.stride(0),
        len(x),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        outs,
    )
    return out


def packed_rows(weight: PackedWeight, index: Tensor) -> Tensor:
    outs, ins = weight.shape
    index = index.contiguous()
    out = index.new_empty(len(index), ins, dtype=weight.dtype)
    gather = function(f"penstock_gather_{SUFFIX[weight.dtype]}", "pnnpnp")
    gather(weight.memory.data_ptr(), outs, ins, index.data_ptr(), len(index), out.data_ptr())
    return out
