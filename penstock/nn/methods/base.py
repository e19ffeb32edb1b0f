"""What a linear asks of the method that holds its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.nn.bounded_logits import BoundedLogits, Take
from penstock.nn.packed import Weight

W = TypeVar("W", bound=Weight)


class LinearMethod(ABC, Generic[W]):
    """How weights [outs, ins] are held: created, loaded from what a checkpoint has of them, and multiplied with.

    It has no state: a weight is a parameter, or a module with parameters, and says all about itself.

    Attributes:
        name: in the registry.
        kept: whether what it makes of a checkpoint takes so long that it is kept on disk (nn/weight_cache.py).
    """

    name: str
    kept = False

    @abstractmethod
    def missing(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot be used there, or None."""

    def tensors(self, outs: int, ins: int) -> dict[str, tuple[int, ...]]:
        """Names, behind the projection's own, and shapes of what a checkpoint has of one."""
        return {"weight": (outs, ins)}

    @abstractmethod
    def create(self, outs: int, ins: int, dtype: torch.dtype, device: torch.device) -> W:
        """A weight whose values are not there yet."""

    @abstractmethod
    def prepare(self, weight: W) -> None:
        """It has got its memory, and is about to be loaded."""

    @abstractmethod
    def load(self, weight: W, name: str, tensor: Tensor, first: int, outs: range, ins: range) -> None:
        """Fill outputs [first, first + len(outs)) of a weight.

        Args:
            name: one of `tensors`.
            tensor: all of it or some of its rows, on the CPU, in memory that is used again afterwards.
            outs, ins: which of the tensor's outputs belong there, and which of its inputs are held.
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

    def bounded_logits(self, weight: W, take: Take | None) -> BoundedLogits | None:
        """What tells tokens from few logits, where there is such. `take` makes memory for it."""
        return None
