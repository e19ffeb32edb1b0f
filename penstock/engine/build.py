"""Options to an engine that can run: load, measure, size, connect."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.core.clock import Clock
from penstock.core.errors import ConfigError
from penstock.engine.budget import find_token_budget
from penstock.engine.loop import Engine
from penstock.engine.memory import check_asked, free_bytes, size_cache
from penstock.engine.runner import Runner, block_bytes
from penstock.kv.pool import BlockPool
from penstock.nn.config import DTYPES
from penstock.nn.loader import load_model
from penstock.nn.models.decoder import Decoder
from penstock.nn.rope import longest
from penstock.sched.local import Limits, Scheduler
from penstock.sched.local.sequence import blocks_for

log = logging.getLogger("penstock.engine")
MOST_TOKENS = 8192  # in a step, however fast the device is


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may decide about an engine; None leaves it to the engine.

    Attributes:
        model: a Hugging Face checkpoint folder.
        device: "cpu", "cuda", "cuda:1"; None takes CUDA where there is one.
        dtype: "bfloat16", "float16" or "float32"; None or "auto" takes the checkpoint's.
        max_model_len: prompt and output tokens of one sequence; None takes the checkpoint's, or what fits.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens in one step; None measures how many stay within `step_time_limit_ms`.
        kv_cache_memory: bytes of KV cache.
        gpu_memory_utilization: on CUDA, the share of the device's memory that may be used.
        prefix_cache: whether computed prefixes are found again.
    """

    model: str
    device: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    step_time_limit_ms: float = 100.0
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True


def build_engine(options: EngineOptions, clock: Clock) -> tuple[Engine, Runner]:
    """Raises ConfigError on a checkpoint or an option that cannot be served."""
    _check(options)
    model = load_model(Path(options.model), _device(options.device), _dtype(options.dtype))
    model_len = _model_len(model, options.max_model_len)
    budget = _token_budget(model, options, clock, model_len)
    asked = options.kv_cache_memory
    if asked is not None:
        check_asked(asked, model.device)
    wanted = model_len
    num_blocks, model_len = size_cache(
        available=asked or free_bytes(model.device, options.gpu_memory_utilization, model.config.num_layers),
        block_bytes=block_bytes(model),
        max_sequences=options.max_num_seqs,
        model_len=model_len,
        asked_model_len=options.max_model_len,
        exact=asked is not None,
    )
    if model_len < wanted:
        log.warning("sequences are cut to %d of %d tokens: no more KV cache fits", model_len, wanted)
    runner = Runner(model, num_blocks)
    limits = Limits(token_budget=budget, max_sequences=options.max_num_seqs, max_model_len=model_len)
    salt = f"{Path(options.model).resolve()} {model.dtype}"
    scheduler = Scheduler(limits, BlockPool(num_blocks), salt=salt, prefix_cache=options.prefix_cache)
    log.info(
        "%s on %s, %s: %d blocks (%.0f MiB) of KV cache, sequences up to %d tokens, steps up to %d tokens",
        type(model).__name__,
        model.device,
        str(model.dtype).removeprefix("torch."),
        num_blocks,
        num_blocks * block_bytes(model) / 2**20,
        model_len,
        budget,
    )
    return Engine(scheduler, runner, clock), runner


def _check(options: EngineOptions) -> None:
    """Ranges, in the flags' names."""
    ranges = {
        "max-num-seqs": (options.max_num_seqs, 1, 65536),
        "step-time-limit-ms": (options.step_time_limit_ms, 1e-3, 1e6),
        "gpu-memory-utilization": (options.gpu_memory_utilization, 0.01, 1.0),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ConfigError(f"{name}: {value}, allowed is {low:g} to {high:g}", name)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: {name!r}, allowed are cpu, cuda, cuda:N", "device") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r}, allowed are cpu, cuda, cuda:N", "device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r}, this machine has {torch.cuda.device_count()} CUDA devices", "device")
    return device


def _dtype(name: str | None) -> torch.dtype | None:
    if name in (None, "auto"):
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r}, allowed are auto, {', '.join(DTYPES)}", "dtype")
    return DTYPES[name]


def _model_len(model: Decoder, asked: int | None) -> int:
    most = longest(model.config)
    if asked is not None and not 2 <= asked <= most:
        raise ConfigError(f"max-model-len: {asked}, this checkpoint allows 2 to {most}", "max-model-len")
    return asked or most


def _token_budget(model: Decoder, options: EngineOptions, clock: Clock, model_len: int) -> int:
    asked = options.max_num_batched_tokens
    if asked is not None:
        if asked < options.max_num_seqs:
            raise ConfigError(
                f"max-num-batched-tokens: {asked}, at least max-num-seqs ({options.max_num_seqs}) is needed, "
                "so that every running sequence gets a token in every step",
                "max-num-batched-tokens",
            )
        if model.device.type == "cuda":  # so that working memory has been seen before the cache is sized
            _warm_up(model, clock, options, asked, asked)
        return asked
    high = max(min(MOST_TOKENS, model_len), options.max_num_seqs)
    return _warm_up(model, clock, options, options.max_num_seqs, high)


def _warm_up(model: Decoder, clock: Clock, options: EngineOptions, low: int, high: int) -> int:
    scratch = Runner(model, blocks_for(high))
    return find_token_budget(scratch, clock, limit=options.step_time_limit_ms / 1e3, low=low, high=high)
