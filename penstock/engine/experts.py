"""Experts move between the ranks of an engine (xLLM, section 4.4.2): what each rank does for it, what rank 0 decides.

No step waits for it: what a rank needs for another placement it loads in a thread beside its steps, at a lower priority
than these. When all have it, the switch goes to them with a plan, so that all do it between the same two steps.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.parallel import Placement, Switch
from penstock.core.plan import StepPlan
from penstock.core.wire.rank import Brought, Counted, CountExperts, DropExperts, Holds, LoadExperts, SwitchExperts
from penstock.engine.executor.base import ExpertLoad
from penstock.engine.options import EngineOptions
from penstock.nn import native
from penstock.nn.checkpoint import Stored
from penstock.nn.config import DecoderConfig
from penstock.nn.experts import Experts, MixtureOfExperts, Spare
from penstock.nn.identity import file_times
from penstock.nn.loader import load_expert
from penstock.nn.models.decoder import Decoder
from penstock.nn.places import stored_by_name
from penstock.nn.reading import changed
from penstock.sched.parallel.rebalancing import (
    EPLB_CONFIG,
    Abandon,
    EplbConfig,
    ExpertRanks,
    Order,
    Prepare,
    Rebalancer,
    make_eplb,
)

if TYPE_CHECKING:
    from penstock.engine.executor.groups import GroupMemory

log = logging.getLogger("penstock.engine")
NICE = 10  # of threads that load, beside those that compute
REST = 0.01  # seconds that what decides leaves the interpreter to what computes, after each layer
LOOK = 0.5  # seconds between two looks whether a rank is late
ExpertOrder = LoadExperts | DropExperts | CountExperts | SwitchExperts
Answer = Brought | Counted
Totals = tuple[Sequence[int], Sequence[int]]  # of a layer so far: rows that each expert has had, and that each rank


class ExpertLoader:
    """Of one rank: loads experts beside its steps, and has them computed when all ranks do.

    Layers are counted among those that have experts, of all stages.

    Args:
        directory: of the checkpoint; `files`: these, as they were when the model was loaded.
        slots: experts that a rank has of a layer at most.

    Attributes:
        tell: is told of what has come, by any thread; set before there are orders.
    """

    tell: Callable[[Answer], None]

    def __init__(self, directory: Path, files: str, model: Decoder, slots: int) -> None:
        self._directory, self._files, self._slots = directory, files, slots
        self._stored: dict[str, Stored] = {}  # by name, once it is needed
        assert model.shard.experts is not None
        self._rank = model.shard.experts.rank
        self._orders: SimpleQueue[LoadExperts | DropExperts] = SimpleQueue()
        self._changed = threading.Condition()
        self._asleep = self._loading = False
        self._coming: tuple[int, list[int]] | None = None  # a layer, and what was brought for its next placement
        self._placed: dict[int, Placement] = {}
        self._take(model)
        self._own = frozenset(self._layers)
        threading.Thread(target=self._work, name="penstock-experts", daemon=True).start()

    def _take(self, model: Decoder) -> None:
        self._model, self._layers = model, _experts_of(model)
        spares: dict[object, Spare] = {}
        kinds = [experts.kind for experts in self._layers.values()]
        for experts in self._layers.values():
            # of each layer what is computed away from home, and of one what is coming
            count = self._slots * (kinds.count(experts.kind) + 1)
            if experts.kind not in spares:
                spares[experts.kind] = Spare(experts, count)
            experts.spare = spares[experts.kind]

    @property
    def config(self) -> DecoderConfig:
        return self._model.config

    def hear(self, order: LoadExperts | DropExperts | CountExperts) -> None:
        """From any thread."""
        if isinstance(order, CountExperts):
            for layer, (counts, loads) in self.totals().items():
                self.tell(Counted(order.number, layer, list(counts), list(loads)))
        else:
            self._orders.put(order)

    def totals(self) -> dict[int, Totals]:
        """Of its layers; while steps go on."""
        return {layer: (experts.counts.tolist(), experts.loads.tolist()) for layer, experts in self._layers.items()}

    def switch(self, switch: Switch) -> None:
        """Between two steps."""
        if (experts := self._layers.get(switch.layer)) is None:
            return  # of another stage
        experts.place(switch.placement)
        with self._changed:
            self._placed[switch.layer], self._coming = switch.placement, None
            self._changed.notify_all()

    # --- while the weights are away

    def rest(self) -> None:
        """Let go of the model, whose weights are about to go."""
        with self._changed:
            self._asleep = True
            self._changed.wait_for(lambda: not self._loading)
        self._layers = {}

    def resume(self, model: Decoder) -> None:
        """After `rest` its weights are there again, all at home: place them as they were, and bring what was brought.

        Raises ConfigError.
        """
        if not self._asleep:
            return
        self._take(model)
        for layer, placement in self._placed.items():
            for expert in placement.ranks[self._rank]:
                self._bring(layer, expert)
            self._layers[layer].place(placement)
        if self._coming is not None:
            for expert in self._coming[1]:
                self._bring(self._coming[0], expert)
        with self._changed:
            self._asleep = False
            self._changed.notify_all()

    # --- the thread that loads

    def _work(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        if native.missing() is None:
            native.function("penstock_stay_alone", "")()
        while True:
            order = self._orders.get()
            if isinstance(order, DropExperts):
                self._drop(order)
            elif order.layer in self._own:
                self.tell(Brought(self._rank, order.version, self._load(order)))

    def _load(self, order: LoadExperts) -> str:
        """Returns what went wrong, or ""."""
        with self._changed:
            # what the last switch has left is spare once it was done here, too
            self._changed.wait_for(lambda: self._coming is None)
            self._coming = order.layer, []
        try:
            for rank, expert in order.loads:
                if rank != self._rank:
                    continue
                with self._changed:
                    self._changed.wait_for(lambda: not self._asleep)
                    self._loading = True
                try:
                    self._bring(order.layer, expert)
                    self._coming[1].append(expert)
                finally:
                    with self._changed:
                        self._loading = False
                        self._changed.notify_all()
        except (ConfigError, OSError, ValueError, RuntimeError) as error:
            log.warning("experts stay where they are: %s", error)
            return f"{type(error).__name__}: {error}"
        return ""

    def _bring(self, layer: int, expert: int) -> None:
        experts = self._layers[layer]
        if experts.needs(expert):
            number = expert_layers(self._model.config)[layer]
            self._stored = self._stored or stored_by_name(self._directory)
            weights = load_expert(self._directory, self._model, number, expert, self._stored)
            if file_times(self._directory) != self._files:
                raise changed(self._directory)
            experts.bring(expert, *weights)

    def _drop(self, order: DropExperts) -> None:
        with self._changed:
            if self._coming is None or self._coming[0] != order.layer:
                return
            self._coming = None
            self._changed.notify_all()
            if order.layer in self._layers:
                self._layers[order.layer].forget()


class SwitchGate:
    """At rank 0 of a data-parallel group: a switch that all groups do before the same step.

    It is known to all before group 0 says, in the memory that they share, which step that is. That is one that no group
    has begun: none can before group 0 has ended the step that it begins then.
    """

    def __init__(self, memory: GroupMemory) -> None:
        self._memory, self._begun = memory, 0
        self._held: Switch | None = None

    def hold(self, switch: Switch) -> None:
        self._held = switch

    def announce(self) -> None:
        """At group 0, when all hold it, as the next step begins."""
        self._memory.switch_at = self._begun + 1 + self._memory.ahead

    def next(self, plan: StepPlan) -> StepPlan:
        """What ranks are to run for a plan; each step has one."""
        self._begun += 1
        if (switch := self._held) is None or self._memory.switch_at != self._begun:
            return plan
        self._held = None
        return replace(plan, switch=switch)


class ExpertBalance:
    """At rank 0, of group 0 where there are several: counts what ranks do, and tells them what to load, and to switch.

    Args:
        rebalancer: decides.
        steps: how often, and over how many.
        tell: all ranks, this one too.
        counting: ranks of a layer that have counted different rows of it.
        gate: to other groups, and how many there are.
    """

    def __init__(
        self,
        rebalancer: Rebalancer,
        steps: EplbConfig,
        tell: Callable[[ExpertOrder], None],
        counting: int = 1,
        gate: SwitchGate | None = None,
        others: int = 0,
    ) -> None:
        self.load = ExpertLoad()
        self._rebalancer, self._config, self._tell = rebalancer, steps, tell
        self._gate, self._others = gate, others
        self._events: SimpleQueue[Callable[[], Order | None]] = SimpleQueue()
        self._switches: deque[Switch] = deque()  # that may be done
        self._waiting: tuple[Switch, int] | None = None  # and by so many other groups it is not yet known
        self._steps = 0
        self._due = self._next_count(0)
        self._count = counting * len(rebalancer.placements)
        self._counted: dict[int, _Totals] = {}  # after so many steps; what a window begins with, or is to
        threading.Thread(target=self._work, name="penstock-expert-balance", daemon=True).start()

    def next(self, plan: StepPlan) -> StepPlan:
        """What ranks are to run for a plan."""
        self._steps += 1
        if self._steps == self._due:
            self._events.put(partial(self._ask, self._steps))
            self._due = self._next_count(self._steps)
        if self._gate is not None:
            if self._switches:
                self._switches.popleft()
                self._gate.announce()
            plan = self._gate.next(plan)
        elif self._switches:
            plan = replace(plan, switch=self._switches.popleft())
        if plan.switch is not None:
            self._events.put(partial(self._switched, plan.switch))
        return plan

    def hear(self, answer: Answer | Holds) -> None:
        """From any thread."""
        match answer:
            case Counted():
                self._events.put(partial(self._add, answer))
            case Holds(version):
                self._events.put(partial(self._held, version))
            case Brought():
                self._events.put(partial(self._brought, answer))

    def _next_count(self, steps: int) -> int:
        """When a window begins or ends, after so many steps."""
        interval, window = self._config.step_interval, self._config.window_size
        return steps + min(interval - steps % interval, interval - (steps + window) % interval)

    # --- the thread that decides

    def _work(self) -> None:
        while True:
            order: Order | None = None
            with suppress(Empty):
                order = self._events.get(timeout=LOOK if self._rebalancer.moves else None)()
            while order is not None or (order := self._rebalancer.tick(time.monotonic())) is not None:
                self._give(order)
                order = None

    def _give(self, order: Order) -> None:
        match order:
            case Prepare(version, layer, loads):
                self._tell(LoadExperts(version, layer, list(loads)))
            case Switch() if self._gate is not None:
                self._waiting = order, self._others
                self._gate.hold(order)
                self._tell(SwitchExperts(order))
            case Switch():
                self._switches.append(order)
            case Abandon(version, layer):
                log.warning("experts of layer %d stay where they are", layer)
                self._tell(DropExperts(version, layer))

    def _held(self, version: int) -> None:
        """Another group knows of a switch."""
        if self._waiting is None or self._waiting[0].version != version:
            return
        switch, missing = self._waiting
        self._waiting = (switch, missing - 1) if missing > 1 else None
        if self._waiting is None:
            self._switches.append(switch)

    def _ask(self, steps: int) -> None:
        self._counted[steps] = _Totals()
        self._tell(CountExperts(steps))

    def _add(self, counted: Counted) -> None:
        if (found := self._counted.get(counted.number)) is None:
            return
        found.add(counted)
        if found.answers == self._count and counted.number % self._config.step_interval == 0:
            self._look(counted.number)

    def _look(self, steps: int) -> None:
        """A window has ended."""
        began = steps - self._config.window_size
        counts, loads = self._counted[steps].since(self._counted.get(began))
        self._counted = {at: totals for at, totals in self._counted.items() if at > began}
        mean = sum(map(sum, loads)) / len(loads[0])
        busiest = sum(map(max, loads)) / mean if mean else 1.0
        self.load = replace(self.load, looks=self.load.looks + 1, busiest=busiest)
        if self._config.log_balancedness:
            log.info("steps %d to %d: the busiest rank computed %.3f times the mean", began, steps, busiest)
        self._rebalancer.look(counts, partial(time.sleep, REST))

    def _brought(self, brought: Brought) -> Order | None:
        if brought.error:
            return self._rebalancer.failed(brought.version)
        return self._rebalancer.ready(brought.rank, brought.version)

    def _switched(self, switch: Switch) -> None:
        self.load = replace(self.load, switches=self.load.switches + 1)
        self._rebalancer.switched(switch.version)


class _Totals:
    """What ranks have counted, up to the same step, of all layers.

    Attributes:
        answers: that have come.
    """

    def __init__(self) -> None:
        self.answers = 0
        self._of_layers: dict[int, Totals] = {}

    def add(self, counted: Counted) -> None:
        self.answers += 1
        counts, loads = self._of_layers.get(counted.layer, ([0] * len(counted.counts), [0] * len(counted.loads)))
        self._of_layers[counted.layer] = _sum(counts, counted.counts), _sum(loads, counted.loads)

    def since(self, before: _Totals | None) -> tuple[list[list[int]], list[list[int]]]:
        """Of each layer counts, and loads."""
        counts, loads = list[list[int]](), list[list[int]]()
        for layer, (now_counts, now_loads) in sorted(self._of_layers.items()):
            none = [0] * len(now_counts), [0] * len(now_loads)
            then = none if before is None else before._of_layers.get(layer, none)
            counts.append([a - b for a, b in zip(now_counts, then[0], strict=True)])
            loads.append([a - b for a, b in zip(now_loads, then[1], strict=True)])
        return counts, loads


def _sum(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def expert_ranks(options: EngineOptions, config: DecoderConfig) -> ExpertRanks:
    """Of this engine. Raises ConfigError where it has no such ranks."""
    layout, experts = options.layout, config.experts
    assert experts is not None
    count, redundant = experts.routing.count, make_eplb(options.eplb_config).num_redundant_experts
    slots = -(-(count + redundant) // layout.expert_ranks)
    if slots > count:
        most = count * (layout.expert_ranks - 1)
        why = f'"num_redundant_experts": {redundant}, allowed is at most {most} for {count} experts'
        raise ConfigError(f"{EPLB_CONFIG}: {why} on {layout.expert_ranks} ranks", EPLB_CONFIG)
    layers = len(expert_layers(config))
    return ExpertRanks(experts=count, layers=layers, ranks=layout.expert_ranks, slots=slots)


def expert_layers(config: DecoderConfig) -> list[int]:
    """Numbers of those that have experts."""
    return [] if config.experts is None else sorted(n for n in config.experts.layers if n < config.num_layers)


def _experts_of(model: Decoder) -> dict[int, Experts]:
    """Of its own layers."""
    blocks = dict(model.model.layers.named_children())
    parts = {i: blocks[str(n)].feed_forward for i, n in enumerate(expert_layers(model.config)) if str(n) in blocks}
    return {i: part.experts for i, part in parts.items() if isinstance(part, MixtureOfExperts)}
