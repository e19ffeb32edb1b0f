"""Which instance is slow, and when it is drained and started again (RTP-LLM, self-healing nodes).

An instance says how fast it is beside its model: 1 is as modelled, 0.3 takes three times as long (`Snapshot.speed`). It
is slow below a third, and below half of what is usual among the others of its role: what all have in common is the
model's mistake, or the work's, or the machine's, and no restart helps. It has to be so for a while in which it works.

One is restarted at a time, and none that others cannot stand in for. Where a restart has not helped, the next one comes
after twice as long, and again; meanwhile it serves as well as it can, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """

    name: str
    incarnation: int
    role: Role
    speed: float | None
    busy: bool


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
        for pace, usual in _beside_others(instances):
            if pace.busy and pace.speed is not None and usual is not None:
                slow = pace.speed <= SLOW and pace.speed <= BESIDE * usual
                self._count(now, pace.name, passed, slow=slow)
                if slow:
                    verdicts[pace.name] = text = f"{pace.speed:.2f} of its model's speed, others {usual:.2f}"
                    found.append((pace.speed, pace, text))
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
        self._tried[pace.name] = _Tried(times, now + min(BACKOFF * 2 ** (times - 1), MOST_BACKOFF))
        self._under_way = pace.name, pace.incarnation, now
        vain = "" if times == 1 else f", after {times - 1} restarts in vain"
        return Restart(name=pace.name, reason=f"slow: {text} for {self._slow.pop(pace.name):.0f} s{vain}")

    def _end_restart(self, now: float, instances: Iterable[Pace]) -> None:
        if self._under_way is None:
            return
        name, incarnation, began = self._under_way
        if any(p.name == name and p.incarnation != incarnation for p in instances) or now - began > GIVES_UP:
            self._under_way, self._next = None, now + SETTLES

    @property
    def under_way(self) -> str:
        """The instance that is being restarted; "" when none is."""
        return "" if self._under_way is None else self._under_way[0]


def _beside_others(instances: Sequence[Pace]) -> list[tuple[Pace, float | None]]:
    """Each with the usual speed of the others of its role; None where none of them knows its own."""
    known: dict[Role, list[tuple[float, str]]] = {}
    for pace in instances:
        if pace.speed is not None:
            known.setdefault(pace.role, []).append((pace.speed, pace.name))
    found = []
    for pace in instances:
        others = [speed for speed, name in known.get(pace.role, []) if name != pace.name]
        found.append((pace, median(others) if others else None))
    return found
