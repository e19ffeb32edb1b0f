"""How much KV cache an engine on a modelled device has, and how long its steps are: as a process or simulated."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.local.budget import LIMIT_MS
from penstock.sched.local.sequence import blocks_for
from penstock.sched.steptime import StepTime

MEMORY_SHARE = 0.9  # of a device's memory, for weights and KV together
MOST_TOKENS = 8192  # in a step, however fast the device is


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    Attributes:
        num_blocks: of KV cache.
        token_budget: tokens in one step at most.
    """

    num_blocks: int
    token_budget: int


def fitting_blocks(device: DeviceModel, shape: ModelShape) -> int:
    """KV blocks that fit beside the weights; none when these do not fit themselves."""
    free = int(device.memory * MEMORY_SHARE) - shape.weight_bytes
    return max(0, free) // (shape.kv_bytes_per_token * BLOCK_TOKENS)


def host_blocks(memory: int | None, block_bytes: int, *, prefix_cache: bool) -> int:
    """KV blocks of a tier in the host's memory; 0 where none is asked for.

    Args:
        memory: bytes; None asks for none.

    Raises:
        ConfigError: not even one fits, or nobody would find it.
    """
    if memory is None:
        return 0
    option = "host-cache-memory"
    if not prefix_cache:
        size = f"{memory / 2**30:.1f} GiB"
        raise ConfigError(f"{option}: {size} without prefix caching, allowed only with enable-prefix-caching", option)
    if memory < block_bytes:
        raise ConfigError(
            f"{option}: {memory / 2**20:.1f} MiB, at least one block of {BLOCK_TOKENS} tokens is needed, "
            f"{block_bytes / 2**20:.1f} MiB",
            option,
        )
    return memory // block_bytes


def sized(
    device: DeviceModel,
    shape: ModelShape,
    *,
    max_model_len: int,
    max_num_seqs: int,
    kv_blocks: int | None,
    max_num_batched_tokens: int | None,
    step_time_limit_ms: float | None,
) -> Sizes:
    """What is asked for, where something is asked for; else all KV cache that fits and could be used, and steps as long
    as the limit allows for a prompt.

    Raises:
        ConfigError: its field names the option, and its message does not.
    """
    fitting = fitting_blocks(device, shape)
    num_blocks = min(fitting, max_num_seqs * blocks_for(max_model_len)) if kv_blocks is None else kv_blocks
    if num_blocks > fitting:
        raise ConfigError(f"{num_blocks}, allowed are up to {fitting} beside the weights", "kv-blocks")
    if blocks_for(max_model_len) > num_blocks:
        raise ConfigError(f"{max_model_len} tokens need more KV than the {num_blocks} blocks there", "max-model-len")
    budget = max_num_batched_tokens
    if budget is None:
        high = max(min(MOST_TOKENS, max_model_len), max_num_seqs)
        limit_ms = LIMIT_MS if step_time_limit_ms is None else step_time_limit_ms
        budget = StepTime(device, shape).largest_prefill(limit_ms, max_num_seqs, high)
    if budget < max_num_seqs:
        # less, and not every running sequence could get a token in every step
        raise ConfigError(f"{budget}, allowed is at least max-num-seqs ({max_num_seqs})", "max-num-batched-tokens")
    return Sizes(num_blocks, budget)
