"""The menu of ops. Each is a folder: its signature, and one file per backend; `reference.py` is plain torch.

Every op promises that a row of its result depends on nothing but that row and its own sequence: not on what else is in
the batch, nor on how a prompt was chunked. In float32 and below, a backend keeps that promise up to rounding, unless it
says that it keeps it to the bit.
"""

from penstock.nn.ops.argmax import argmax
from penstock.nn.ops.attention import attention
from penstock.nn.ops.backends import OPS, Op
from penstock.nn.ops.branch_attention import branch_attention
from penstock.nn.ops.choose import choose, choose_pays
from penstock.nn.ops.gumbel import gumbel_noise
from penstock.nn.ops.linear import linear
from penstock.nn.ops.packed_linear import packed_linear, packed_rows
from penstock.nn.ops.qkv_to_cache import qkv_to_cache
from penstock.nn.ops.rms_norm import add_rms_norm, rms_norm
from penstock.nn.ops.rotary import rotary
from penstock.nn.ops.sample import Draw, sample
from penstock.nn.ops.silu_mul import silu_mul
from penstock.nn.ops.store_kv import store_kv

__all__ = [
    "OPS",
    "Draw",
    "Op",
    "add_rms_norm",
    "argmax",
    "attention",
    "branch_attention",
    "choose",
    "choose_pays",
    "gumbel_noise",
    "linear",
    "packed_linear",
    "packed_rows",
    "qkv_to_cache",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
    "store_kv",
]
