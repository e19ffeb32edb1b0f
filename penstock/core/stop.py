"""Telling a step that runs to end early."""

from __future__ import annotations

from ctypes import addressof, c_int64


class Interrupted(Exception):
    """A step was told to end before it had computed everything. Nothing of it may be used."""


class Stop:
    """One for a step. A thread sets it, and another computes the step and looks at it, in kernels too.

    Attributes:
        address: of 64 bits that are not 0 once it is set.
    """

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        self._word = c_int64(0)
        self.address = addressof(self._word)

    def set(self) -> None:
        self._word.value = 1

    def __bool__(self) -> bool:
        return self._word.value != 0

    def look(self) -> None:
        """Raises Interrupted once it is set."""
        if self._word.value:
            raise Interrupted
