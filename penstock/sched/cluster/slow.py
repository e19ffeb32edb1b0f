"""Which instance is slow, and when it is drained and started again (RTP-LLM, self-healing nodes).

An instance says how fast it is beside its model: 1 is as modelled, 0.3 takes three times as long (`Snapshot.speed`). It
is slow below a third, and below half of what is usual among the others of its role: what all have in common is the
model's mistake, or the work's, or the machine's, and no restart helps. It has to be so for a while in which it works.
An engine that measures its own device may have been slow then: where its model comes from that, it is slow, too, if it
computes a third of what is usual among others of the same kind.

One is restarted at a time, and none that others cannot stand in for. Where a restart has not helped, the next one comes
after twice as long, and again; meanwhile it serves as well as it can, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from penstock.sched.cluster.base import Restart

if TYPE_CHECKING:
    from penstock.core.wire.engine import Role

SLOW = 1 / 3  # of the model's speed, at most
BESIDE = 1 / 2  # of the usual speed of the others, at most
LOOK = 2.0  # seconds that count between two looks at most: whoever looks may have stood still
SETTLES = 60.0  # seconds from one restart's end to the next
BACKOFF, MOST_BACKOFF = 600.0, 86_400.0  # seconds from an instance's first restart to its second, and at most
GIVES_UP = 900.0  # seconds after which a restart is waited for no longer


@dataclass(frozen=True, slots=True)
class Pace:
    """How an instance that serves does.

    Attributes:
        incarnation: of its engine.
        speed: as a share of its model's; None as long as it is not known.
        busy: it computes now, so that this is new.
        kind: of a device whose model the engine has measured; others of the same are to be as fast. None elsewhere.
        step_ms: of one and the same step, as its model says.
    """

    name: str
    incarnation: int
    role: Role
    speed: float | None
    busy: bool
    kind: Hashable = None
    step_ms: float = 1.0

    @property
    def rate(self) -> float | None:
        """What it computes in a time, beside others of its kind."""
        return None if self.speed is None or self.kind is None else self.speed / self.step_ms


@dataclass(slots=True)
class _Tried:
    """Restarts of one instance in a row.

    Attributes:
        due: when the next one may be.
    """

    times: int
    due: float


class SlowInstances:
    """Call `look` about twice a second.

    Args:
        after: seconds of work for which an instance has to be slow.
        least: instances that have to serve meanwhile.

    Attributes:
        verdicts: of instances that are slow, or are restarted for it: name -> what is found and done.
    """

    def __init__(self, after: float, least: int = 1) -> None:
        self._after, self._least = after, least
        self._at: float | None = None
        self._slow: dict[str, float] = {}  # seconds of work
        self._tried: dict[str, _Tried] = {}
        self._under_way: tuple[str, int, float] | None = None  # name, incarnation that goes, when that began
        self._next = 0.0
        self.verdicts: Mapping[str, str] = {}

    def look(self, now: float, instances: Sequence[Pace]) -> Restart | None:
        """
        Args:
            instances: all that are given work.

        Returns:
            What is to be done now. It is done when the instance is among these in another incarnation.
        """
        passed = 0.0 if self._at is None else min(now - self._at, LOOK)
        self._at = now
        self._end_restart(now, instances)
        verdicts: dict[str, str] = {}
        found: list[tuple[float, Pace, str]] = []
        by_model = _beside_others(instances, lambda pace: pace.role, lambda pace: pace.speed)
        by_kind = _beside_others(instances, lambda pace: (pace.role, pace.kind), lambda pace: pace.rate)
        for pace, usual, alike in zip(instances, by_model, by_kind, strict=True):
            if not pace.busy or pace.speed is None or (usual is None and alike is None):
                continue
            slow, text = inf, ""  # how slow
            if alike is not None and pace.rate is not None and pace.rate <= SLOW * alike:
                slow = pace.rate / alike
                text = f"{slow:.2f} of the speed of others of its kind"
            if usual is not None and pace.speed <= SLOW and pace.speed <= BESIDE * usual:
                slow = min(slow, pace.speed)
                text = f"{pace.speed:.2f} of its model's speed, others {usual:.2f}"
            self._count(now, pace.name, passed, slow=bool(text))
            if text:
                verdicts[pace.name] = text
                found.append((slow, pace, text))
        self._slow = {pace.name: self._slow[pace.name] for pace in instances if pace.name in self._slow}
        restart = None
        for _, pace, text in sorted(found, key=lambda each: each[0]):
            why_not = self._why_not(now, pace, instances)
            verdicts[pace.name] = f"{text}; {why_not or 'it is drained and started again'}"
            if not why_not and restart is None:
                restart = self._begin(now, pace, text)
        if self._under_way is not None and restart is None:
            verdicts[self._under_way[0]] = "it is drained and started again"
        self.verdicts = verdicts
        return restart

    def _count(self, now: float, name: str, passed: float, *, slow: bool) -> None:
        if slow:
            self._slow[name] = self._slow.get(name, 0.0) + passed
            return
        self._slow.pop(name, None)
        if name in self._tried and now >= self._tried[name].due:
            del self._tried[name]  # it has long been well

    def _why_not(self, now: float, pace: Pace, instances: Iterable[Pace]) -> str:
        """Why it is not restarted now; "" when it is."""
        tried = self._tried.get(pace.name)
        slow_for = self._slow.get(pace.name, 0.0)
        others = [other for other in instances if other.name != pace.name]
        if self._under_way is not None:
            return f"{self._under_way[0]} is restarted first"
        if slow_for < self._after:
            return f"for {slow_for:.0f} s"
        if tried is not None and now < tried.due:
            times = "once" if tried.times == 1 else f"{tried.times} times"
            return f"it was restarted {times} in vain, and is again in {tried.due - now:.0f} s"
        if now < self._next:
            return f"another was restarted, it is in {self._next - now:.0f} s"
        if len(others) < self._least or not any(other.role in (pace.role, "any") for other in others):
            return "others cannot stand in for it"
        return ""

    def _begin(self, now: float, pace: Pace, text: str) -> Restart:
        tried = self._tried.get(pace.name)
        times = 1 if tried is None else tried.times + 1
        self._tried[pace.name] = _Tried(times, now + _pause(times))
        self._under_way = pace.name, pace.incarnation, now
        vain = "" if times == 1 else f", after {times - 1} restarts in vain"
        return Restart(name=pace.name, reason=f"slow: {text} for {self._slow.pop(pace.name):.0f} s{vain}")

    def _end_restart(self, now: float, instances: Iterable[Pace]) -> None:
        if self._under_way is None:
            return
        name, incarnation, began = self._under_way
        if any(p.name == name and p.incarnation != incarnation for p in instances) or now - began > GIVES_UP:
            self._under_way, self._next = None, now + SETTLES

    def times(self, name: str) -> int:
        """How often it was restarted in a row; 0 where it was not."""
        return self._tried[name].times if name in self._tried else 0

    def recall(self, now: float, name: str, times: int, ago: float) -> None:
        """It was restarted so often, the last time so many seconds ago, which somebody else has decided."""
        due = now - ago + _pause(times)
        if name not in self._tried and now < due:
            self._tried[name] = _Tried(times, due)

    @property
    def under_way(self) -> str:
        """The instance that is being restarted; "" when none is."""
        return "" if self._under_way is None else self._under_way[0]


def _pause(times: int) -> float:
    """Seconds from the last of so many restarts to the next."""
    return float(min(BACKOFF * 2 ** (times - 1), MOST_BACKOFF))


def _beside_others(
    instances: Sequence[Pace], group: Callable[[Pace], Hashable], speed: Callable[[Pace], float | None]
) -> list[float | None]:
    """Of each the usual speed of the others of its group; None where none of them knows its own."""
    known: dict[Hashable, list[tuple[float, str]]] = {}
    for pace in instances:
        if (mine := speed(pace)) is not None:
            known.setdefault(group(pace), []).append((mine, pace.name))
    found = []
    for pace in instances:
        others = [each for each, name in known.get(group(pace), []) if name != pace.name]
        found.append(median(others) if others else None)
    return found
