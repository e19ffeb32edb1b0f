"""What a linear and the loader ask of the way in which a checkpoint has a projection's weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import DTYPES, FLOATS, Stored
from penstock.nn.methods.base import R
from penstock.nn.quantised import SCALES, Codes, Pieces

GROUPS = (-1, 16, 32, 64, 128, 256)  # inputs that share a scale, as configurations have them; -1 is all
OF_SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor of a checkpoint.

    Attributes:
        shape: where it is one number, any shape of one; None is any, of what is not read.
        dtypes: safetensors' names of those that it may have.
        needed: whether it must be there.
    """

    shape: tuple[int, ...] | None
    dtypes: tuple[str, ...] = FLOATS
    needed: bool = True


class Format(ABC, Generic[R]):
    """How a checkpoint has the weight [outs, ins] of one projection, or of several as one.

    Attributes:
        codes: what comes of it; None where it is dense.
        main: the tensor that is read last, when all others of the projection are there.
        by_rows: whether that has the outputs one after the other, so that some can be taken before all are read.
    """

    codes: Codes | None
    main: ClassVar[str] = "weight"
    by_rows: ClassVar[bool] = True

    @abstractmethod
    def tensors(self, outs: int, ins: int) -> dict[str, Expected]:
        """By their names behind the projection's own. Raises ValueError for widths that it cannot have."""

    @abstractmethod
    def rows(self, main: Tensor, others: Mapping[str, Tensor], first: int, outs: range, ins: range, width: int) -> R:
        """What a method takes of it.

        Args:
            main: all of it, or its outputs from `first` on.
            others: those of `tensors` that the checkpoint has.
            outs: which outputs are wanted, all of them in `main`.
            ins: which inputs, of `width`.

        Raises:
            ValueError: values that cannot be.
        """

    def key(self) -> str:
        """Names all that decides what `rows` returns."""
        return repr(self)


def check_groups(group: int, ins: int) -> None:
    """Raises ValueError where inputs are no whole groups."""
    if group and ins % group:
        raise ValueError(f"its {ins} inputs are no multiple of the group size {group}")


def shard(pieces: Pieces, codes: Codes, ins: range) -> Pieces:
    """Some inputs of pieces that have all. Raises ValueError where groups would be cut."""
    width, group = pieces.codes.shape[1], codes.group
    if len(ins) == width:
        return pieces
    if pieces.order is not None:
        mine = (pieces.order >= ins.start) & (pieces.order < ins.stop)
        groups = mine.view(-1, group or width)
        if not torch.equal(groups.any(1), groups.all(1)):
            raise ValueError("act-order (desc_act) has groups of inputs that several ranks have")
        own = groups[:, 0] if group else slice(None)
        zeros = None if pieces.zeros is None else pieces.zeros[:, own]
        return Pieces(pieces.codes[:, mine], pieces.scales[:, own], zeros, pieces.order[mine] - ins.start)
    codes_of = pieces.codes[:, ins.start : ins.stop]
    if not group:
        return replace(pieces, codes=codes_of)
    check_cut(group, ins, width)
    own_groups = slice(ins.start // group, -(-ins.stop // group))
    return Pieces(codes_of, pieces.scales[:, own_groups], None if pieces.zeros is None else pieces.zeros[:, own_groups])


def check_cut(group: int, ins: range, width: int) -> None:
    """Raises ValueError where a shard's inputs begin or end inside a group."""
    if group and (ins.start % group or (ins.stop % group and ins.stop != width)):
        raise ValueError(f"inputs {ins.start} to {ins.stop} of a rank are no whole groups of {group}")


def chosen(config: Mapping[str, Any], name: str, allowed: Sequence[Any], default: Any = None, within: str = "") -> Any:
    """A value of the quantization_config, one of those that are allowed. Raises ConfigError.

    Args:
        within: the object in it that holds the value.
    """
    value = config.get(name)
    value = default if value is None else value
    if not any(type(value) is type(each) and value == each for each in allowed):
        field = ".".join(["quantization_config", *filter(None, [within]), name])
        said = "missing" if value is None else ascii(value)[:60]
        raise ConfigError(f"config.json: {field} is {said}, allowed is {', '.join(map(str, allowed))}", field)
    return value


def scales_of(found: Mapping[str, Stored], name: str) -> torch.dtype:
    """The dtype of a checkpoint's scales. Where it has none, they are missed later."""
    dtype = DTYPES[found[name].dtype] if name in found and found[name].dtype in DTYPES else torch.float16
    return dtype if dtype in SCALES else torch.float32


def in_groups(g_idx: Tensor | None, codes: Codes, ins: int) -> Tensor | None:
    """The order of inputs that makes groups of neighbours, of which input belongs to which group.

    Raises:
        ValueError: groups are not of the size that they should be, or in another order though none was said to be.
    """
    plain = torch.arange(ins) // (codes.group or ins)
    if g_idx is None:
        return None
    order = g_idx.long().argsort(stable=True) if codes.ordered else torch.arange(ins)
    if not torch.equal(g_idx.long()[order], plain):
        what = "" if codes.ordered else ", in their order without act-order (desc_act, actorder)"
        raise ValueError(f"g_idx: expected are groups of {codes.group or ins} inputs{what}")
    return order if codes.ordered else None
