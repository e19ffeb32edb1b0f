"""Devices by name: those with a data sheet, this machine as it was measured, and files of such values.

A file may also say what steps of one model took on its device (`steps`), beyond what the device's values alone say.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.errors import ConfigError
from penstock.sched.steptime import DEVICES, GEOMETRIES, read_shape
from penstock.service.checkpoint import BUNDLED

if TYPE_CHECKING:
    import torch

THIS_MACHINE = "this-machine"
FILES = (".json", ".yaml", ".yml")
MEASURED_SECONDS = 0.4  # for each value
LATENCIES = ("overhead_ms", "link_latency_us", "all_to_all_us", "network_latency_us")  # may be 0
COPIED = 1 << 28  # bytes; far beyond any processor's caches


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What steps of one model took on a device.

    Attributes:
        shape: of the model.
        factors: for `StepTime`, over the device's values.
        noise: standard deviation of a step's time, relative to it.
        count: steps that were measured.
    """

    shape: ModelShape
    factors: Mapping[str, float]
    noise: float
    count: int


def load_device(name: str) -> DeviceModel:
    """
    Args:
        name: in `sched.steptime.DEVICES`, "this-machine", or a JSON or YAML file of `DeviceModel`'s fields.

    Raises:
        ConfigError: one line; also when this machine was never measured.
    """
    return DEVICES[name] if name in DEVICES else _read(_file_of(name))[0]


def load_factors(name: str, shape: ModelShape) -> Mapping[str, float]:
    """What measured steps of this model are of the device's rooflines; nothing where they were not measured. Arguments
    and errors as for `load_device`."""
    steps = None if name in DEVICES else _read(_file_of(name))[1]
    return steps.factors if steps is not None and steps.shape == shape else {}


def load_geometry(name: str) -> ModelShape:
    """
    Args:
        name: in `sched.steptime.GEOMETRIES`, "demo", "demo-vl", or a Hugging Face folder.

    Raises:
        ConfigError: neither, or a config.json that describes no decoder.
    """
    if name in GEOMETRIES:
        return GEOMETRIES[name]
    folder = BUNDLED.get(name) or Path(name)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        allowed = f"allowed are {', '.join(GEOMETRIES)}, {', '.join(BUNDLED)}, or a folder with a config.json"
        raise ConfigError(f"geometry: {name!r}, {allowed}", "geometry") from None
    except ValueError as error:
        raise ConfigError(f"geometry: {folder / 'config.json'} is no JSON ({error})", "geometry") from None
    if not isinstance(config, dict):
        raise ConfigError(f"geometry: {folder / 'config.json'} holds no JSON object", "geometry")
    try:
        return read_shape(config)
    except ConfigError as error:
        raise ConfigError(f"geometry: {folder}: {error}", "geometry") from None


def _file_of(name: str) -> Path:
    if name == THIS_MACHINE:
        if not saved_file().exists():
            raise ConfigError(f"device: {name!r} was never measured; `penstock doctor --save` does", "device")
        return saved_file()
    if not name.endswith(FILES):
        known = ", ".join(DEVICES)
        raise ConfigError(f"device: {name!r}, allowed are {known}, {THIS_MACHINE}, or a .json or .yaml file", "device")
    return Path(name)


def saved_file() -> Path:
    """Where "this-machine" is looked for: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "penstock" / f"{THIS_MACHINE}.json"


def save_device(device: DeviceModel, file: Path, steps: MeasuredSteps | None = None) -> None:
    """Raises ConfigError when the file cannot be written."""
    values = asdict(device) | ({} if steps is None else {"steps": asdict(steps)})
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise ConfigError(f"save: {file} cannot be written ({error.strerror})", "save") from None


def known_device(device: torch.device) -> DeviceModel | None:
    """What an engine's device can do, from its data sheet; None where there is none, as for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(device).lower())
    found = next((model for name, model in DEVICES.items() if name in words), None)
    return found and replace(found, memory=torch.cuda.get_device_properties(device).total_memory)


def measure(device: torch.device) -> tuple[DeviceModel, float]:
    """(what a device can do, its float32 operations per second), in about a second. A short look at an idle machine:
    what it finds is the best of several runs."""
    import torch

    cuda = device.type == "cuda"
    size = 8192 if cuda else 1024

    def matmul(dtype: torch.dtype) -> float:
        left, right = torch.ones(2, size, size, dtype=dtype, device=device)
        out = torch.empty(size, size, dtype=dtype, device=device)
        return 2 * size**3 / _best(lambda: torch.mm(left, right, out=out), device)

    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if cuda:
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = DeviceModel(
        peak_flops=matmul(torch.bfloat16),
        bandwidth=2 * COPIED / _best(lambda: target.copy_(source), device),  # read and written
        memory=memory,
    )
    return model, matmul(torch.float32)


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run; the first one warms up."""
    import torch

    def timed() -> float:
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    timed()
    end = time.perf_counter() + MEASURED_SECONDS
    best = timed()
    while time.perf_counter() < end:
        best = min(best, timed())
    return best


def _read(file: Path) -> tuple[DeviceModel, MeasuredSteps | None]:
    import msgspec
    import yaml

    def wrong(why: object) -> ConfigError:
        return ConfigError(f"device: {file}: {' '.join(str(why).split())}", "device")

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(error.strerror) from None
    except (ValueError, yaml.YAMLError) as error:
        raise wrong(error) from None
    if not isinstance(values, dict):
        raise wrong("must hold a device's values by name")
    steps = values.pop("steps", None)
    names = [field.name for field in fields(DeviceModel)]
    if unknown := [str(name) for name in values if name not in names]:
        raise wrong(f"unknown is {', '.join(unknown)}; allowed are {', '.join(names)}")
    try:
        # not strict: YAML takes 989e12 for a word
        device = msgspec.convert(values, DeviceModel, strict=False)
        measured = None if steps is None else msgspec.convert(steps, MeasuredSteps, strict=False)
    except msgspec.ValidationError as error:
        raise wrong(error) from None
    for name, value in asdict(device).items():
        least = name in (*LATENCIES, "expert_parallel")
        if not (isfinite(value) and (value >= 0 if least else value > 0)):
            raise wrong(f"{name} is {value}, allowed is a number {'of at least' if least else 'above'} 0")
    for name, value in (measured.factors if measured is not None else {}).items():
        if not (isfinite(value) and value >= 0):
            raise wrong(f"steps.factors.{name} is {value}, allowed is a number of at least 0")
    return device, measured
