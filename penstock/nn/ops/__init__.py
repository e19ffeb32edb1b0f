"""The menu of ops: a file each (or one for a few that belong together), with its signature, a reference in plain torch
and other backends, which `Op` at its end lists, best first.

Every op promises that a row of its result depends on nothing but that row and its own sequence: not on what else is in
the batch, nor on how a prompt was chunked. In float32 and below, a backend keeps that promise up to rounding, unless it
says that it keeps it to the bit.
"""

from penstock.nn.ops.all_reduce import all_reduce
from penstock.nn.ops.attention import attention
from penstock.nn.ops.backends import OPS, Op
from penstock.nn.ops.branch_attention import branch_attention
from penstock.nn.ops.choose import choose, choose_among, choose_candidates, choose_pays
from penstock.nn.ops.experts import Stacked, add_shared, combine_experts, expert_rows, group_experts, route
from penstock.nn.ops.gate_mul import ACTIVATIONS, gate_mul
from penstock.nn.ops.head_linear import head_linear
from penstock.nn.ops.linear import linear, packed_linear, packed_rows
from penstock.nn.ops.mask_logits import mask_logits
from penstock.nn.ops.packed_quantised_linear import packed_quantised_linear, packed_quantised_rows
from penstock.nn.ops.qkv_to_cache import qkv_to_cache
from penstock.nn.ops.quantised_linear import quantised_linear, quantised_rows
from penstock.nn.ops.rms_norm import add_rms_norm, rms_norm
from penstock.nn.ops.rotary import rotary
from penstock.nn.ops.sample import Draw, argmax, gumbel_noise, row_key, sample
from penstock.nn.ops.store_kv import store_kv

__all__ = [
    "ACTIVATIONS",
    "OPS",
    "Draw",
    "Op",
    "Stacked",
    "add_rms_norm",
    "add_shared",
    "all_reduce",
    "argmax",
    "attention",
    "branch_attention",
    "choose",
    "choose_among",
    "choose_candidates",
    "choose_pays",
    "combine_experts",
    "expert_rows",
    "gate_mul",
    "group_experts",
    "gumbel_noise",
    "head_linear",
    "linear",
    "mask_logits",
    "packed_linear",
    "packed_quantised_linear",
    "packed_quantised_rows",
    "packed_rows",
    "qkv_to_cache",
    "quantised_linear",
    "quantised_rows",
    "rms_norm",
    "rotary",
    "route",
    "row_key",
    "sample",
    "store_kv",
]
