"""The greedy choice, and whether there is a choice at all."""

from torch import Tensor

from penstock.nn.native import missing
from penstock.nn.ops.argmax import native, reference
from penstock.nn.ops.backends import Backend, Op

OP = Op(
    "argmax",
    Backend("native", native.argmax, frozenset({"cpu"}), missing),
    Backend("reference", reference.argmax),
)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """([rows] int64, [rows] bool) of [rows, vocab] float32: the first largest entry, and whether all are finite.

    Of a row that holds a NaN, the entry may be any.
    """
    return OP.on(logits.device.type)(logits)
