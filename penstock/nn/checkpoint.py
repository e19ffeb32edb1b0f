"""The files of a checkpoint folder: which there are, and what their headers say stands where. No weight is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.core.errors import ConfigError

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MALFORMED = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)  # what a value of a wrong kind comes to
MOST_HEADER = 100_000_000  # bytes, as safetensors allows
LENGTH = 8  # bytes before a header, which say how long it is
FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
FLOATS = tuple(FLOAT_DTYPES)
DTYPES = FLOAT_DTYPES | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
DTYPES |= {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
BITS |= {"U64": 64, "U32": 32, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64, "F4": 4}


FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
FUSED_KINDS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        name: as the file has it.
        dtype: safetensors' name.
        start, stop: its bytes, from the beginning of the file.
        within: of the file's tensor of this name and index, rows from that on; None where it is one by itself.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    within: tuple[str, int, int] | None = None

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of the checkpoint. Raises ConfigError naming the file."""
    path = directory / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; is {directory} a Hugging Face model folder?", "model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})", "model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object", "model")
    return value


def weight_files(directory: Path) -> list[Path]:
    """In the order in which they are read. Raises ConfigError where there are none, or none that may be read."""
    if (directory / INDEX).exists():
        return [_inside(directory, name) for name in sorted(set(indexed(directory).values()))]
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    pickle = next((path for pattern in PICKLES for path in sorted(directory.glob(pattern))), None)
    if pickle is not None:
        raise ConfigError(
            f"{pickle}: a pickle, which may run code when it is read, is refused; convert it to model.safetensors",
            "model",
        )
    raise ConfigError(f"{directory}: no weights, neither model.safetensors nor {INDEX}", "model")


def indexed(directory: Path) -> dict[str, str]:
    """Tensors' names to those of their files, as the index has them; empty where there is none. Raises ConfigError."""
    if not (directory / INDEX).exists():
        return {}
    index = read_json(directory, INDEX).get("weight_map")
    if not isinstance(index, Mapping) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(f"{directory / INDEX}: has no weight_map of names to files", "model")
    return dict(index)


def _inside(directory: Path, name: str) -> Path:
    """The file of that name in the folder. What the hub's cache links to from there may lie elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ConfigError(f"{directory / INDEX}: names {name!r}, which is outside of the folder", "model")
    if path.suffix != ".safetensors":
        raise ConfigError(f"{directory / INDEX}: names {name!r}, allowed are .safetensors files", "model")
    return directory / path


def stored(directory: Path) -> Iterator[Stored]:
    """Every tensor, in the order of the files and of what lies in them.

    Raises ConfigError naming the file that is missing or broken, and the tensor where that is known.
    """
    for path in weight_files(directory):
        try:
            with path.open("rb", buffering=0) as head:
                at = LENGTH + int.from_bytes(head.read(LENGTH), "little")
            # which has checked that tensors follow each other without holes, and end where the file does
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    part = file.get_slice(name)
                    dtype, shape = part.get_dtype(), tuple(part.get_shape())
                    size = math.prod(shape) * BITS[dtype] // 8
                    yield from apart(Stored(path, name, dtype, shape, at, at + size))
                    at += size
        except FileNotFoundError:
            raise not_found(directory, path) from None
        except (SafetensorError, OSError, RuntimeError, KeyError) as error:
            raise ConfigError(f"{path}: corrupt or truncated ({_fault(path) or error})", "model") from None


def apart(tensor: Stored) -> Iterator[Stored]:
    """The tensor; of [experts, outs, ins], as transformers holds experts and sometimes writes them, what each expert's
    would be."""
    match = FUSED.fullmatch(tensor.name)
    if match is None or len(tensor.shape) != 3 or 0 in tensor.shape:
        yield tensor
        return
    count, outs, ins = tensor.shape
    kinds = FUSED_KINDS[match[2]]
    if outs % len(kinds):
        yield tensor
        return
    each, size = outs // len(kinds), (tensor.stop - tensor.start) // count // len(kinds)
    for place in range(count * len(kinds)):
        expert, kind = divmod(place, len(kinds))
        start = tensor.start + place * size
        name, within = f"{match[1]}.{expert}.{kinds[kind]}.weight", (tensor.name, expert, kind * each)
        yield Stored(tensor.path, name, tensor.dtype, (each, ins), start, start + size, within)


def not_found(directory: Path, path: Path) -> ConfigError:
    names = sorted(name for name, file in indexed(directory).items() if directory / file == path)
    expected = f"; {INDEX} has {len(names)} weights in it, the first is {names[0]!r}" if names else ""
    return ConfigError(f"{path}: not found{expected}", "model")


def _fault(path: Path) -> str | None:
    """Which tensor of a file that safetensors refuses is at fault, and what was expected; None where that is not it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH), "little")
            if LENGTH + length > size:
                return f"its header of {length} bytes is expected to end at byte {LENGTH + length}, it has {size} bytes"
            header = json.loads(file.read(min(length, MOST_HEADER)))
        header.pop("__metadata__", None)
        end = 0
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (start, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
            if dtype not in BITS:
                return f"{name!r} is of dtype {dtype!r}, expected is one of {', '.join(BITS)}"
            if stop - start != (expected := math.prod(shape) * BITS[dtype] // 8):
                return f"{name!r} has {stop - start} bytes, expected are {expected}, as {shape} of {dtype}"
            if start != end:
                return f"{name!r} begins at byte {start} of the data, expected is {end}"
            if (last := LENGTH + length + stop) > size:
                return f"{name!r} is expected to end at byte {last}, the file has {size} bytes"
            end = stop
        if LENGTH + length + end < size:
            return f"it has {size} bytes, its tensors are expected to end at byte {LENGTH + length + end}"
    except (OSError, RecursionError, *MALFORMED):
        pass
    return None
