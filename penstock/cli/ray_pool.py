"""The warm pool of a Ray cluster: actors that hold an instance's place on a node, with a process that has imported all
that an engine needs and becomes one (HFX, arXiv 2508.15919, section 3.4).

An actor that was taken is the instance's from then on. What is set apart for it while it waits is set apart for nobody
else: a GPU too, where instances have some.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger("penstock.launcher")
AGAIN = 10.0  # seconds from the end of one that nobody took until it is replaced
LOOK = 1.0  # seconds between two questions whether one is still warm
ROOM = 10.0  # seconds without a node after which that is said


class Actor(Protocol):
    def ask(self, method: str, *arguments: Any) -> Future[Any]: ...

    def say_if_without_room(self) -> None: ...


A = TypeVar("A", bound=Actor)


@dataclass
class _Waiting(Generic[A]):
    """
    Attributes:
        resources: that are set apart for it.
        asked: to be warm, or whether it still is; None until it is asked again.
        node: where it is; "" as long as it is not warm.
        at: when it was made, or has answered last.
        told: whether it was said that no node has room for it.
    """

    resources: Mapping[str, float]
    actor: A
    asked: Future[Any] | None
    at: float
    node: str = ""
    told: bool = False


class RayWarmPool(Generic[A]):
    """Call `refill` many times a second, while nothing is started.

    Args:
        size: actors that wait.
        make: what is to be set apart -> a new actor.
        end: takes an actor that is of no use; does not wait.
        order: what an actor is to know for a process with such resources: "version" and "environment".
    """

    def __init__(
        self,
        size: int,
        make: Callable[[Mapping[str, float]], A],
        end: Callable[[A], None],
        order: Callable[[Mapping[str, float]], dict[str, Any]],
    ) -> None:
        self._size, self._make, self._end, self._order = size, make, end, order
        self._kinds: list[Mapping[str, float]] = []  # of resources that instances have
        self._waiting: list[_Waiting[A]] = []
        self._due = -inf

    def take(self, resources: Mapping[str, float]) -> A | None:
        """One that is warm on a node with these set apart, and the caller's from now on; None where there is none. Who
        waits for a node then waits no more: an instance comes first."""
        if resources not in self._kinds:
            self._kinds.append(dict(resources))
        for one in self._waiting:
            if one.node and one.resources == resources:
                self._waiting.remove(one)
                return one.actor
        for one in [each for each in self._waiting if not each.node]:
            self._drop(one)
        return None

    def refill(self, now: float) -> None:
        """Replace what was taken or has ended: one after another, beside engines that serve."""
        for one in list(self._waiting):
            if one.asked is not None and one.asked.done():
                self._hear(one, one.asked, now)
            elif one.asked is None and now - one.at >= LOOK:
                one.asked = one.actor.ask("is_warm")
            elif not one.node and not one.told and now - one.at >= ROOM:
                one.told = True
                threading.Thread(target=one.actor.say_if_without_room, daemon=True).start()
        if (
            len(self._waiting) < self._size
            and now >= self._due
            and self._kinds
            and all(one.node for one in self._waiting)
        ):
            self._add(now)

    def _add(self, now: float) -> None:
        # of each kind as many, but for those that came first
        counts = [sum(one.resources == kind for one in self._waiting) for kind in self._kinds]
        resources = self._kinds[counts.index(min(counts))]
        try:
            actor = self._make(resources)
            self._waiting.append(_Waiting(resources, actor, actor.ask("warm", self._order(resources)), now))
        except Exception as error:  # of many kinds, where Ray's head has gone
            log.warning("Ray makes no warm actor: %s", error)
            self._due = now + AGAIN

    def _hear(self, one: _Waiting[A], asked: Future[Any], now: float) -> None:
        one.asked, one.at = None, now
        try:
            said = asked.result()
        except Exception as error:  # of many kinds: with it, with its node or with Ray
            said = {"refused": str(error).strip().partition("\n")[0] or type(error).__name__}
        if "refused" in said:
            log.warning("a warm actor of Ray's has ended, and is replaced: %s", said["refused"])
            self._drop(one)
            self._due = now + AGAIN
        elif not one.node:
            one.node = said["node"]
            log.info("process %d is warm on Ray node %s", said["pid"], one.node)

    def _drop(self, one: _Waiting[A]) -> None:
        self._waiting.remove(one)
        self._end(one.actor)

    def close(self) -> None:
        for one in list(self._waiting):
            self._drop(one)
