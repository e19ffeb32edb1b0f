"""What bounds a scheduler: how large its steps and sequences may be, and how that is found.

`Limits` are given; `StepBudget` finds how many tokens a step may hold while steps run; `sized` says for a modelled
device how much KV cache there is and how long steps are, for a process and for a simulated engine alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.errors import ConfigError
from penstock.core.layout import windows_of
from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.groups import most_held
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.steptime import StepTime

GRAIN = 64  # tokens: what is found is a multiple of it
WORTH = 1.125  # a step's time is not known to better than that
MEMORY_SHARE = 0.9  # of a device's memory, for weights and KV together
MOST_TOKENS = 8192  # in a step, however fast the device is
STOPS_IN = 5e-3  # seconds that a modelled device takes to end a step early; kernels take less
# seconds: a step that only offline sequences are in ends early for an online one, unless it ends by then. Either way it
# has ended 20 ms after that has come.
SOON = 20e-3 - STOPS_IN
LEAST_OFFLINE = 16  # tokens of an offline prompt in a step, however often steps are interrupted
DISK_GBPS, REMOTE_GBPS = 24.0, 100.0  # gigabits per second of a modelled disk, and to a modelled store, by default
LEAST_CHUNK = 512  # tokens of a long prompt for which a step has room at least, where the cache's size is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a step and of a sequence.

    Attributes:
        token_budget: tokens computed in one step, at most; at least `max_sequences`, so that no decode is left out.
        max_sequences: sequences that run at once, at most.
        max_model_len: prompt and output tokens of one sequence, at most; the pool can hold one such sequence.
        searches: whether what computes the steps can search with beams.
        encode_budget: tokens that stand for what is encoded in one step, at most, beyond the first image.
    """

    token_budget: int
    max_sequences: int
    max_model_len: int
    searches: bool = True
    encode_budget: int = 1 << 14

    def __post_init__(self) -> None:
        assert self.max_sequences >= 1
        assert self.max_model_len >= 2
        assert self.token_budget >= self.max_sequences


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    preemptions: int = 0
    interruptions: int = 0  # steps of offline sequences that were ended early for an online one
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found there
    prefix_loads: int = 0  # those of them that were loaded from a tier below the device
    prefix_fetches: int = 0  # those that were brought from another instance
    steps: int = 0  # planned
    prompt_tokens: int = 0  # planned, in chunks of more than one


class StepBudget:
    """The greatest number of tokens whose step stays within a time limit (xLLM, section 3.3).

    Only full steps are measured. It begins with the least, or with what `found` says, and at most doubles with
    each of them, so that nothing has to be measured before the first request. Noise only adds to a step's time, so it
    takes two steps in a row beyond the limit to make it smaller.

    Args:
        low, high: its bounds; at least `low` and GRAIN whatever that takes.
        limit: seconds.

    Attributes:
        tokens: now.
        high: as given.
    """

    def __init__(self, low: int, high: int, limit: float) -> None:
        assert 1 <= low <= high
        low = max(low, min(GRAIN, high))
        self.tokens = low
        self.high = high
        self._low, self._limit = low, limit
        self._slow = 0.0  # what the last of these steps took, when that was too long

    def ran(self, tokens: int, seconds: float) -> bool:
        """A step of so many tokens has run. Returns whether `tokens` has changed."""
        before = self.tokens
        if tokens < before:
            return False
        if seconds > self._limit:
            if self._slow:
                self._set(before * max(0.5, self._limit / min(seconds, self._slow)))
            self._slow = 0.0 if self._slow else seconds
            return self.tokens != before
        self._slow = 0.0
        room = min(2.0, self._limit / seconds if seconds else 2.0)
        if room >= WORTH:
            self._set(before * room)
        return self.tokens != before

    def found(self, tokens: int, seconds: float) -> None:
        """A prompt of so many tokens has been computed before the first request, and took so long."""
        self._set(tokens * self._limit / max(seconds, 1e-9))

    def _set(self, tokens: float) -> None:
        self.tokens = min(max(int(tokens) // GRAIN * GRAIN, self._low), self.high)


class OfflineChunk:
    """Tokens of prompts in a step that only offline sequences are in: half as many after one that was interrupted, and
    then twice as many in every further one. So these prompts get on between online requests, however often these come.

    Attributes:
        tokens: now; None where nothing bounds them.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None

    def interrupted(self, tokens: int) -> None:
        """One that held so many."""
        if tokens:
            # one that was in flight behind it held as many, and says nothing new
            self.tokens = max(LEAST_OFFLINE, min(self.tokens or tokens, tokens // 2))

    def granted(self, tokens: int, budget: int) -> None:
        """The next one holds so many; `budget` is what any step may hold."""
        if self.tokens is not None and tokens >= self.tokens:
            self.tokens = None if 2 * self.tokens >= budget else 2 * self.tokens


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    Attributes:
        num_blocks: of KV cache.
        token_budget: tokens in one step at most.
        limit: of a step's time.
    """

    num_blocks: int
    token_budget: int
    limit: StepLimit


def fitting_blocks(device: DeviceModel, shape: ModelShape) -> int:
    """KV blocks that fit beside the weights, of one data-parallel group; none when these do not fit themselves."""
    free = int(device.memory * MEMORY_SHARE) - shape.held_bytes(device)
    return max(0, free) // (shape.block_bytes * shape.kv_copies(device))


def tier_blocks(size: int | None, block_bytes: int, *, prefix_cache: bool, option: str = "host-cache-memory") -> int:
    """KV blocks of a tier below the device; 0 where none is asked for.

    Args:
        size: bytes; None asks for none.
        option: by which it is asked for.

    Raises:
        ConfigError: not even one fits, or the prefix cache is off.
    """
    if size is None:
        return 0
    if not prefix_cache:
        shown = f"{size / 2**30:.1f} GiB"
        raise ConfigError(f"{option}: {shown} without prefix caching, allowed only with enable-prefix-caching", option)
    if size < block_bytes:
        raise ConfigError(
            f"{option}: {size / 2**20:.1f} MiB, at least one block of {BLOCK_TOKENS} tokens is needed, "
            f"{block_bytes / 2**20:.1f} MiB",
            option,
        )
    return size // block_bytes


def tier_bandwidth(gbps: float, slowdown: float) -> float:
    """Bytes per second to a modelled tier, and as many back, of so many gigabits and a device slowed down so."""
    return gbps * 1e9 / 8 / slowdown


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
    fitting, windows = fitting_blocks(device, shape), windows_of(shape.kv_groups)
    chunk = max(LEAST_CHUNK, min(MOST_TOKENS, max_model_len))
    useful = max_num_seqs * most_held(windows, max_model_len, chunk)
    num_blocks = min(fitting, useful) if kv_blocks is None else kv_blocks
    if num_blocks > fitting:
        raise ConfigError(f"{num_blocks}, allowed are up to {fitting} beside the weights", "kv-blocks")
    if most_held(windows, max_model_len, LEAST_CHUNK) > num_blocks:
        raise ConfigError(f"{max_model_len} tokens need more KV than the {num_blocks} blocks there", "max-model-len")
    budget, limit = max_num_batched_tokens, StepLimit.asked(step_time_limit_ms)
    if budget is None:
        high = max(min(MOST_TOKENS, max_model_len), max_num_seqs)
        budget = StepTime(device, shape).largest_prefill(limit.most, max_num_seqs, high)
    if budget < max_num_seqs:
        # less, and not every running sequence could get a token in every step
        raise ConfigError(f"{budget}, allowed is at least max-num-seqs ({max_num_seqs})", "max-num-batched-tokens")
    return Sizes(num_blocks, budget, limit)
