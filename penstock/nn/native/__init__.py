"""Kernels in C++ for the CPU: compiled for an instruction set when they are first needed, called through ctypes.

There is a library for each instruction set (isa.py). The best that the processor has is loaded, unless `use` says
another.

ctypes releases the interpreter lock while a kernel runs. Kernels get raw pointers, so callers must check devices,
dtypes, shapes and strides.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from penstock.nn.kv import LayerKV
from penstock.nn.native.build import BuildError, build_library, load_library
from penstock.nn.native.isa import InstructionSet, find_set, sets_here

log = logging.getLogger("penstock.native")
DTYPES = (torch.bfloat16, torch.float32)  # that the kernels compute with
SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}  # of functions' names
ARGUMENTS: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}


_wanted: str | None = None  # an instruction set's name


def use(isa: str | None) -> None:
    """Kernels for this instruction set from now on; None is the best one. Weights packed for another cannot be
    used any more. Raises ConfigError on one that is not there."""
    global _wanted  # noqa: PLW0603  as the library that is loaded is the process's
    if isa is not None:
        find_set(isa)
    if isa == _wanted:
        return
    count = threads() if _load.cache_info().currsize and missing() is None else None
    _wanted = isa
    for kept in (_load, function, value):
        kept.cache_clear()
    if count is not None:
        set_threads(count)


def isa() -> InstructionSet | None:
    """Whose kernels are used; None where there are none for this processor."""
    return _load()[0]


@functools.cache
def _load() -> tuple[InstructionSet | None, ctypes.CDLL | str]:
    """The best set that there is a library for, or that is wanted, and the library, or why there is none."""
    sets = reversed(sets_here()) if _wanted is None else (find_set(_wanted),)
    best, why = None, "there are no kernels for this processor"
    for chosen in sets:
        try:
            path = build_library(chosen)
            library = load_library(path)
        except (BuildError, OSError) as error:  # as where a compiler is older than the processor
            best, why = best or chosen, str(error)
            continue
        if best is not None:
            log.warning("kernels for %s instead of %s: %s", chosen.name, best.name, why)
        library.made_from = path.name.partition(".")[0]  # type: ignore[attr-defined]
        library.penstock_set_threads(ctypes.c_int64(torch.get_num_threads()))
        return chosen, library
    log.warning("kernels run as plain torch ops: %s", why)
    return best, why


def missing() -> str | None:
    """Why kernels cannot be used on this machine, or None. The first call may compile them."""
    found = _load()[1]
    return found if isinstance(found, str) else None


def made_from() -> str:
    """Names all that decides what the kernels compute; empty where there are none."""
    found = _load()[1]
    return "" if isinstance(found, str) else cast(str, found.made_from)


@functools.cache
def function(name: str, arguments: str) -> Callable[..., None]:
    """A function of the library that returns nothing.

    Args:
        arguments: a letter for each: "p" a pointer (an int, or None), "n" a number, "f" a float.
    """
    return _find(name, arguments, None)


@functools.cache
def value(name: str, arguments: str = "") -> Callable[..., int]:
    """A function of the library that returns a number."""
    return _find(name, arguments, ctypes.c_int64)


def _find(name: str, arguments: str, result: Any) -> Callable[..., Any]:
    library = _load()[1]
    assert isinstance(library, ctypes.CDLL), library
    found = library[name]
    found.argtypes = [ARGUMENTS[letter] for letter in arguments]
    found.restype = result
    return found


def panel_groups() -> int:
    """How a packed weight is laid out: see gemm.h."""
    return value("penstock_panel_groups")()


def threads() -> int:
    """How many threads a kernel runs on."""
    return value("penstock_threads")() if missing() is None else 1


def set_threads(count: int) -> None:
    """As many as torch has, unless this says otherwise."""
    if missing() is None:
        function("penstock_set_threads", "n")(count)


def read(memory: Tensor) -> None:
    """Read a contiguous tensor once, as fast as the machine can."""
    function("penstock_read", "pn")(memory.data_ptr(), memory.nbytes)


def multiply(times: int, dtype: torch.dtype) -> int:
    """Multiply and add on all threads as fast as the machine can. Returns how many of these operations that were.

    Args:
        times: a multiple of 16.
    """
    return 2 * value("penstock_multiply", "nn")(times, dtype == torch.bfloat16) * threads()


# --- tensors as pointers and strides


class Cache(ctypes.Structure):
    """`penstock::Cache` (attention.h)."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block", "kind", "head", "token")),
        ("scales", ctypes.c_void_p),
        *((f"scale_{name}", ctypes.c_int64) for name in ("block", "kind", "head", "token")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "dim", "value_dim", "is_bf16", "group")),
    )


def of_layer(cache: LayerKV, dtype: torch.dtype) -> Cache:
    """One layer, for rows of a dtype."""
    *strides, element = cache.values.stride()
    assert element == 1, cache.values.stride()
    assert cache.values.dtype == (dtype if cache.scales is None else torch.int8), cache.values.dtype
    scales = [None, 0, 0, 0, 0] if cache.scales is None else [cache.scales.data_ptr(), *cache.scales.stride()]
    if cache.latent:
        strides[1] = scales[2] = 0  # V is where K is
    shape = cache.kv_heads, cache.dim, cache.value_dim, dtype == torch.bfloat16
    return Cache(cache.values.data_ptr(), *strides, *scales, *shape, cache.group)


def cached(cache: LayerKV, *tensors: Tensor) -> bool:
    """Whether kernels compute with what these tensors hold and this cache stores."""
    stored = cache.values.dtype
    return computable(*tensors) and stored == (tensors[0].dtype if cache.scales is None else torch.int8)


def is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def computable(*tensors: Tensor) -> bool:
    """Whether kernels compute with what these tensors hold; otherwise it is for plain torch."""
    return all(x.dtype == tensors[0].dtype for x in tensors) and tensors[0].dtype in DTYPES


def dense_rows(x: Tensor) -> Tensor:
    """[rows, ...] with everything of a row together, a copy only where it is not."""
    together = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != together:
            return x.contiguous()
        together *= size
    return x
