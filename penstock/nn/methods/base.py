"""What a linear asks of the method that holds its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from penstock.nn.bounded_logits import BoundedLogits, Take
from penstock.nn.head_weight import LatentWeight
from penstock.nn.packed import PackedWeight
from penstock.nn.packed_quantised import PackedQuantisedWeight
from penstock.nn.quantised import Pieces, QuantisedWeight

Weight = torch.nn.Parameter | PackedWeight | QuantisedWeight | PackedQuantisedWeight | LatentWeight  # [outs, ins]
W = TypeVar("W", bound=Weight)
R = TypeVar("R", Tensor, Pieces, Tensor | Pieces)


class LinearMethod(ABC, Generic[W, R]):
    """How weights [outs, ins] are held: created, filled with rows, and multiplied with.

    It has no state: a weight is a parameter, or a module with parameters, and says all about itself.

    Attributes:
        name: in the registry.
        kept: whether what it makes of a checkpoint takes so long that it is kept on disk (nn/weight_cache.py).
    """

    name: ClassVar[str]
    kept: ClassVar[bool] = False

    @abstractmethod
    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot be used there, or None."""

    @abstractmethod
    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> W:
        """A weight whose values are not there yet."""

    @abstractmethod
    def prepare(self, weight: W) -> None:
        """It has got its memory, and is about to be loaded."""

    @abstractmethod
    def put(self, weight: W, first: int, rows: R) -> None:
        """Fill outputs from `first` on.

        Args:
            rows: as a checkpoint's format has them (nn/formats): [rows, ins] of any float dtype, or pieces of a
                quantised weight; on the CPU, in memory that is used again afterwards.

        Raises:
            ValueError: they cannot be held together with those before.
        """

    @abstractmethod
    def apply(self, x: Tensor, weight: W, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x @ weight.T + bias: [rows, ins] -> [rows, outs] of `dtype`, which is x's, or float32."""

    @abstractmethod
    def rows(self, weight: W, index: Tensor) -> Tensor:
        """Rows of the weight, as an embedding looks them up: [rows] int64 -> [rows, ins]."""

    @abstractmethod
    def dense(self, weight: W) -> Tensor:
        """[outs, ins], perhaps a copy."""

    def cut(self) -> int:
        """Outputs of which a multiple can be a `part`."""
        return 1

    @abstractmethod
    def part(self, weight: W, first: int, outs: int) -> W:
        """Outputs [first, first + outs) of a weight, both multiples of `cut`, in the same memory."""

    @abstractmethod
    def layout(self) -> str:
        """Names how it lays out bytes here."""

    def bounded_logits(self, weight: W, take: Take | None) -> BoundedLogits | None:
        """What tells tokens from few logits, where there is such. `take` makes memory for it."""
        return None
