"""How an op finds the implementation for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
OPS: dict[str, Op[Any]] = {}


@dataclass(frozen=True, slots=True)
class Backend(Generic[Function]):
    """One implementation.

    Attributes:
        name: "reference", or what it is built on.
        function: same arguments and result as the op.
        devices: torch device types it runs on; empty means all.
        missing: why it cannot be used on this machine, or None.
    """

    name: str
    function: Function
    devices: frozenset[str] = frozenset()
    missing: Callable[[], str | None] = lambda: None

    def serves(self, device: str) -> bool:
        return (not self.devices or device in self.devices) and self.missing() is None


class Op(dict[str, Function]):
    """A named op: a table from device types ("cpu", "cuda") to the function to call for tensors there.

    The table is filled as it is asked, with the best backend that serves the device.

    Args:
        backends: best first; the last one is the reference and runs everywhere.
    """

    def __init__(self, name: str, *backends: Backend[Function]) -> None:
        assert backends[-1].name == "reference", name
        assert name not in OPS, name
        super().__init__()
        self.name = name
        self.backends = backends
        OPS[name] = self

    def __missing__(self, device: str) -> Function:
        function = self[device] = self.backend_on(device).function
        return function

    def backend_on(self, device: str) -> Backend[Function]:
        """The best backend that serves a device type."""
        return next(b for b in self.backends if b.serves(device))

    def backend(self, name: str) -> Backend[Function]:
        return next(b for b in self.backends if b.name == name)

    @contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Use one backend by name, for tests and comparisons."""
        chosen = self.backend(backend)
        with self._table(dict.fromkeys(chosen.devices or ("cpu", "cuda"), chosen.function)):
            yield

    @contextmanager
    def wrapped(self, device: str, wrap: Callable[[Function], Function]) -> Iterator[None]:
        """On one device, call what `wrap` makes of the function, for measurements."""
        with self._table({**self, device: wrap(self[device])}):
            yield

    @contextmanager
    def _table(self, table: dict[str, Function]) -> Iterator[None]:
        before = dict(self)
        self.clear()
        self.update(table)
        try:
            yield
        finally:
            self.clear()
            self.update(before)
