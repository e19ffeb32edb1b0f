"""Sizes the KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from penstock.core.errors import ConfigError
from penstock.core.memory import total_memory
from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.groups import WHOLE, Windows, longest_sequence, most_held
from penstock.sched.local.limits import LEAST_CHUNK

MAPPINGS = 32768  # slots that a cache may map: Linux allows a process 65,530 mappings by default, of all kinds
CPU_SHARE = 0.4  # of the memory that is free when the engine starts
CPU_MOST = 4 << 30  # bytes; a larger cache on a CPU only on request


def free_bytes(device: torch.device, utilisation: float, num_layers: int) -> int:
    """Bytes that the KV cache may take by default.

    Args:
        utilisation: on CUDA, the share of the device's memory that everything together may take. A decode step copies
            one layer's KV at a time, padded to at most twice its size; room is left for that.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        working = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        room = free + spare - working - (1 - utilisation) * total
        return int(room * num_layers / (num_layers + 2))
    return min(int(CPU_SHARE * available_memory()), CPU_MOST)


def check_asked(asked: int, device: torch.device, promised: int = 0) -> None:
    """Raise ConfigError when so many bytes of KV cache are not available.

    Args:
        promised: bytes that are there in any case, because the previous incarnation of this engine had them.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if asked > max(free, promised):
        raise ConfigError(
            f"kv-cache-memory: {asked / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on this machine",
            "kv-cache-memory",
        )


def available_memory() -> int:
    """Bytes of main memory that can be taken without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return min(free, total_memory())
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mapping_budget() -> int:
    """How many slots may be mapped at once: well below what the system allows a process."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return MAPPINGS
    return max(1, min(MAPPINGS, allowed // 2))


def size_cache(
    *,
    available: int,
    block_bytes: int,
    max_sequences: int,
    model_len: int,
    asked_model_len: int | None,
    exact: bool,
    windows: Windows = WHOLE,
    chunk: int = LEAST_CHUNK,
) -> tuple[int, int]:
    """(blocks, longest sequence served).

    The cache is never larger than `max_sequences` sequences of full length can use, unless its size was asked for.
    A default longest sequence that does not fit is shortened; a requested one is refused.

    Args:
        available: bytes.
        block_bytes: bytes of one block, of any group of layers.
        model_len: the length to serve; at most the checkpoint's.
        asked_model_len: what the user asked for, or None.
        exact: take all of `available`, because the user named it.
        windows: of the model's groups of layers.
        chunk: tokens that a step may compute of one sequence.

    Raises:
        ConfigError: there is no room for the length that was asked for, or for any.
    """
    num_blocks = available // block_bytes
    if not exact:
        num_blocks = min(num_blocks, max_sequences * most_held(windows, model_len, max(chunk, LEAST_CHUNK)))
    longest = longest_sequence(windows, LEAST_CHUNK, num_blocks, max(model_len, num_blocks * BLOCK_TOKENS))
    if num_blocks < len(windows):
        raise ConfigError(
            f"kv-cache-memory: {available / 2**20:.1f} MiB, at least one block of {BLOCK_TOKENS} tokens is needed, "
            f"{len(windows) * block_bytes / 2**20:.1f} MiB",
            "kv-cache-memory",
        )
    if asked_model_len is not None and longest < asked_model_len:
        raise ConfigError(
            f"max-model-len: {asked_model_len} tokens need "
            f"{most_held(windows, asked_model_len, LEAST_CHUNK) * block_bytes / 2**20:.0f} MiB of KV cache and "
            f"{available / 2**20:.0f} MiB are there, allowed is at most {longest}",
            "max-model-len",
        )
    return num_blocks, min(model_len, longest)
