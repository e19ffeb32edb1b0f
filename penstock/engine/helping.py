"""Data-parallel groups help each other with long contexts (xLLM, section 4.4.3): what rank 0 of a group does for it.

Plans say what a group's sequences attend over. Of those that are too long for it, copies of KV are made in another
group's memory, by a thread beside steps and of lower priority than these; once they are there, plans say so
(`nn/helpers.py`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np
import torch

from penstock.core.errors import ConfigError
from penstock.core.plan import HELPED_BLOCKS, SequenceStep, StepPlan
from penstock.engine.cache import KVCache, as_layers
from penstock.engine.executor.groups import GroupMemory
from penstock.engine.options import HELPER_KV
from penstock.nn.experts import MixtureOfExperts
from penstock.nn.helpers import FEW_ROWS, Helpers, Places
from penstock.nn.models.decoder import Decoder
from penstock.nn.native import DTYPES
from penstock.sched.parallel.helping import Helping, Part

NICE = 10  # of the thread that copies
LATE = 1 / 8  # of what a group attends over, that its last step counts
LOOKS = 8  # plans between two looks at what is to be helped with


def open_helpers(places: Places, copies: memoryview, model: Decoder, cache: KVCache) -> Helpers:
    """Have this rank's layers that meet others' attend with them, and for them.

    Args:
        copies: memory of this group.

    Raises ConfigError.
    """
    (group, *more), size = cache.layout.groups, cache.layout.block_bytes
    if more or group.window is not None:
        raise ConfigError(f"{HELPER_KV}: allowed is none for a model of which layers have a window", HELPER_KV)
    if model.dtype not in DTYPES:
        raise ConfigError(f"{HELPER_KV}: allowed is none with dtype {cache.layout.dtype}", HELPER_KV)
    whole = torch.frombuffer(copies, dtype=torch.uint8)[: len(copies) // size * size]
    layers = as_layers(whole, cache.layout, cache.part)
    blocks = list(model.model.layers)
    meets = [i for i, block in enumerate(blocks) if isinstance(block.feed_forward, MixtureOfExperts)]
    helpers = Helpers(places, [layers[i] for i in meets], [cache.layers[i] for i in meets], model.dtype)
    for part in model.modules():
        if isinstance(part, MixtureOfExperts):
            part.experts.helpers = helpers
    return helpers


@dataclass(slots=True)
class _Decoding:
    """A sequence that decodes.

    Attributes:
        tokens: of KV; `blocks`: that hold them.
        settled: tokens that were computed by plans that have run.
        coming, plan: those that were before a plan, which may not have run.
    """

    tokens: int
    blocks: tuple[int, ...]
    settled: int
    coming: int
    plan: int


Wanted = tuple[Part, tuple[int, ...]]  # what to copy, and the blocks of its sequence


class HelpWanted:
    """At rank 0 of a group: has its plans say what other groups may help with.

    Args:
        helpers: of this rank, which measures attention; its first layer has as many as all others.
        layers: in which groups help.
        ahead: plans that may not have run while further ones are made.

    Raises ConfigError where the memory for copies has no room for anything.
    """

    def __init__(self, memory: GroupMemory, cache: KVCache, helpers: Helpers, layers: int, ahead: int) -> None:
        groups = len(memory.loads)
        size = cache.layout.block_bytes
        pieces = len(memory.copies(memory.group)) // (size * HELPED_BLOCKS)
        if pieces < groups - 1:
            least = (groups - 1) * size * HELPED_BLOCKS
            raise ConfigError(f"{HELPER_KV}: at least {least} bytes are needed, for copies of one piece", HELPER_KV)
        self._memory, self._cache, self._helpers, self._layers = memory, cache, helpers, layers
        self.helping = Helping(memory.group, groups, pieces, ahead)
        self._copies = [_rows(memory.copies(group), size) for group in range(groups)]
        self._sequences: dict[str, _Decoding] = {}
        self._load, self._plans = 0.0, 0
        self._wanted: SimpleQueue[Wanted | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_copy, args=(self._wanted, self._copy), name="penstock-helping", daemon=True
        )
        self._thread.start()

    def next(self, plan: StepPlan) -> StepPlan:
        """What ranks are to run for a plan."""
        self._plans += 1
        for request_id in plan.released:
            self._sequences.pop(request_id, None)
        decoding = [step for step in plan.sequences if _decodes(step)]
        for step in decoding:
            self._saw(step)
        tokens = sum([step.start + len(step.tokens) for step in decoding])
        self._load += LATE * (tokens - self._load)
        helped = self.helping.planned(plan.released)
        self._publish()
        if decoding and self._plans % LOOKS == 0:
            self._look({step.request_id: self._sequences[step.request_id] for step in decoding})
        there = {step.request_id for step in decoding}
        helped = [part for part in helped if part.request_id in there]
        return replace(plan, helped=tuple(helped)) if helped else plan

    @property
    def helped(self) -> int:
        """Pieces that others have computed for this rank, in all layers."""
        return self._helpers.helped

    def close(self) -> None:
        """Copy nothing more; waits for what is copied now."""
        for part in self.helping.parts.values():
            part.ended = True
        self._wanted.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raise AssertionError unless what is helped with belongs to sequences that decode."""
        self.helping.check()
        assert self.helping.parts.keys() <= self._sequences.keys(), self.helping.parts.keys()

    def _saw(self, step: SequenceStep) -> None:
        tokens, blocks = step.start + len(step.tokens), tuple(step.blocks)
        seen = self._sequences.get(step.request_id)
        if seen is None or step.start < seen.settled:
            self._sequences[step.request_id] = _Decoding(tokens, blocks, 0, step.start, self._plans)
            return
        seen.tokens, seen.blocks = tokens, blocks
        if self._plans > seen.plan + self.helping.ahead:
            seen.settled, seen.coming, seen.plan = seen.coming, step.start, self._plans

    def _publish(self) -> None:
        memory, own = self._memory, self._memory.group
        memory.loads[own] = round(self._load)
        groups = len(memory.loads)
        for group in range(groups):
            if group != own:
                tokens = sum([part.tokens for part in self.helping.parts.values() if part.group == group])
                memory.copied[group * groups + own] = tokens

    def _look(self, sequences: Mapping[str, _Decoding]) -> None:
        memory, own, groups = self._memory, self._memory.group, len(self._memory.loads)
        given = [sum(memory.copied[own::groups]) for own in range(groups)]
        taken = [sum(memory.copied[own * groups : (own + 1) * groups]) for own in range(groups)]
        loads = [max(0, memory.loads[group] - given[group]) + taken[group] for group in range(groups)]
        if not (measured := self._helpers.tokens):
            return
        token_ms = 1e3 * self._helpers.seconds / measured * self._layers
        lengths = {name: (seen.tokens, seen.settled) for name, seen in sequences.items()}
        for part in self.helping.look(lengths, memory.loads[own] + taken[own], loads, token_ms):
            self._wanted.put((part, sequences[part.request_id].blocks))

    def _copy(self, part: Part, blocks: tuple[int, ...]) -> None:
        to = self._copies[part.group]
        for place, block in zip(part.blocks, blocks, strict=False):
            if part.ended:
                break
            np.copyto(to[place], self._cache.block(block).numpy())
        part.copying = False


def _copy(wanted: SimpleQueue[Wanted | None], copy: Callable[[Part, tuple[int, ...]], None]) -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (found := wanted.get()) is not None:
        copy(*found)


def _decodes(step: SequenceStep) -> bool:
    return step.branches is None and step.sample > 0 and len(step.tokens) <= FEW_ROWS


def _rows(memory: memoryview, size: int) -> np.ndarray:
    """[blocks, bytes]"""
    count = len(memory) // size
    return np.frombuffer(memory[: count * size], np.uint8).reshape(count, size)
