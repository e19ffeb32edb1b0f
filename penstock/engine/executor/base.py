"""The contract of executors and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.memory import Part
from penstock.core.plan import StepPlan, StepResult
from penstock.core.stop import Stop


@dataclass(frozen=True, slots=True)
class Ran:
    """A step's result and its times, in seconds of the engine's clock."""

    result: StepResult
    began: float
    ended: float


@dataclass(slots=True)
class MaskCosts:
    """What working out which tokens may be drawn has cost, since the start.

    Attributes:
        steps: with a mask; `seconds`: that these waited for it.
        compiled: grammars; `compiling`: seconds that it took.
    """

    steps: int = 0
    seconds: float = 0.0
    compiled: int = 0
    compiling: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Of ranks that share experts.

    Attributes:
        looks: at it; `switches`: of layers to other placements, since the start.
        busiest: rows that the busiest rank of each layer computes over the mean, of all layers together, in the last
            window; 0 before its end.
        splits: steps that were two micro-batches.
        helped: pieces of contexts that other data-parallel groups have attended to for rank 0, in all layers.
    """

    looks: int = 0
    switches: int = 0
    busiest: float = 0.0
    splits: int = 0
    helped: int = 0


NO_LOAD = ExpertLoad()


class Computes(Protocol):
    """What an executor needs of a worker."""

    def prepare(self, plan: StepPlan) -> None:
        """Make ready what the plan alone decides, while other threads may still run the step before."""
        ...

    def run(self, plan: StepPlan, stop: Stop | None = None) -> StepResult:
        """Compute a step, prepared or not.

        Args:
            stop: once it is set, the step ends soon, and its result is `interrupted`.
        """
        ...

    @property
    def mask_costs(self) -> MaskCosts: ...

    def counts(self) -> dict[str, int]:
        """Its resources and totals, for inspection."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless everything it holds is accounted for."""
        ...


class Memory(Protocol):
    """An engine's memory."""

    def sleep(self, level: int, blocks: Sequence[int] | None = None) -> None:
        """Give it back; see `Worker.sleep`."""
        ...

    def wake_up(self, parts: Sequence[Part]) -> None:
        """Take it up again; see `Worker.wake_up`. Raises ConfigError."""
        ...


class Pending(Protocol):
    """A step that was launched."""

    def done(self) -> bool:
        """Whether `result` waits for nobody. After False, the executor's `fileno` becomes readable once that is so."""
        ...

    def result(self) -> Ran:
        """Wait until the step is computed, or compute it. Raises what that raised."""
        ...

    def stop(self) -> bool:
        """Have it end as soon as it can; its result is then `interrupted`, unless it was over before. Those after it
        are to be stopped first. False where it will not."""
        ...


class Executor(Protocol):
    """Computes plans in the order in which they are launched. One thread calls it."""

    @property
    def ahead(self) -> bool:
        """Whether what is launched is computed beside the caller, who may launch the next one meanwhile."""
        ...

    @property
    def mask_costs(self) -> MaskCosts:
        """Of a worker."""
        ...

    @property
    def expert_load(self) -> ExpertLoad:
        """Of all, where it is looked at."""
        ...

    def launch(self, plan: StepPlan, *, stoppable: bool = False) -> Pending:
        """
        Args:
            stoppable: it may be wanted to end early, and so is computed beside the caller where anything is.
        """
        ...

    def fileno(self) -> int | None:
        """Readable when something may be done; None where nothing is computed beside the caller."""
        ...

    def expect_alive(self) -> None:
        """Raise RankFailed when a worker has failed, also where nothing runs."""
        ...

    def settle(self) -> None:
        """Return when nothing is computed beside the caller. Results can still be taken."""
        ...

    def close(self) -> None:
        """Settle and let go of the workers; the executor cannot be used afterwards."""
        ...

    def counts(self) -> dict[str, int]:
        """Of the workers, see `Computes.counts`."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless everything the workers hold is accounted for."""
        ...
