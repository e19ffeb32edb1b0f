"""Brings a running deployment from one set of instances to another, one at a time, or back to the one it had.

A pure controller: `look` is called many times a second, and acts through a `Fleet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol


class Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One program takes the place of another; or a host becomes another, by a rollout of its own.

    Attributes:
        start: None where one only leaves.
        stop: None where one only joins. With the name of `start` the two never run at once: there is one master.
        limited: whether `start` has to take requests in time. A host sees to that itself.
    """

    start: Named | None = None
    stop: Named | None = None
    limited: bool = True

    @property
    def backwards(self) -> Step:
        return Step(start=self.stop, stop=self.start, limited=self.limited)

    @property
    def in_place(self) -> bool:
        return self.start is not None and self.stop is not None and self.start.name == self.stop.name


class Fleet(Protocol):
    """The programs that run. Nothing here waits."""

    def start(self, program: Named) -> None:
        """It is given no requests yet. With the name of one that runs, it takes that one's place as soon as that has
        ended."""

    def verdict(self, name: str) -> str | None:
        """Whether one that was started has answered a probe: "" if it has, None while that is open, else why not."""

    def admit(self, name: str) -> None:
        """It is given requests from now on."""

    def serves(self, name: str) -> bool:
        """Whether all who send requests know that it takes them."""

    def drain(self, name: str) -> None:
        """It is given no more requests, and is stopped when it has none left."""

    def end(self, name: str) -> None:
        """Stop it, whatever it does."""

    def has_gone(self, name: str) -> bool:
        """Whether one that drains or was ended is stopped, and known no more."""


class Rollout:
    """
    Args:
        steps: in their order.
        limit: seconds that one has from its start until it takes requests.

    Attributes:
        over: nothing is left to do.
        failure: why the deployment is not what it was to become, and what it is instead; "" when it is.
        doing: what it waits for, for people.
        done: steps that are behind it, of the way that it goes now.
    """

    def __init__(self, steps: Sequence[Step], limit: float) -> None:
        self.over = not steps
        self.failure = ""
        self.doing = ""
        self.done = 0
        self._steps, self._limit = list(steps), limit
        self._phase: Literal["begin", "probe", "serve", "drain", "retreat"] = "begin"
        self._until = 0.0
        self._returns = False
        self._revoked = ""

    @property
    def total(self) -> int:
        """How many steps the way has that it goes now."""
        return len(self._steps)

    @property
    def returns(self) -> bool:
        """Whether it goes back."""
        return self._returns

    def turn_back(self, why: str) -> None:
        """It is not wanted any more. What drains does so to its end."""
        self._revoked = why

    def look(self, now: float, fleet: Fleet) -> None:
        if self.over:
            return
        step = self._steps[self.done]
        if self._revoked and not self._returns and self._phase in ("begin", "probe", "serve"):
            self._revoke(step, fleet)
            return
        match self._phase:
            case "begin":
                self._begin(step, now, fleet)
            case "probe":
                self._probe(step, now, fleet)
            case "serve":
                self._serve(step, now, fleet)
            case "drain":
                assert step.stop is not None
                if fleet.has_gone(step.stop.name):
                    self._next()
            case "retreat":
                assert step.start is not None
                if fleet.has_gone(step.start.name):
                    self._go_back(self.done)

    def _revoke(self, step: Step, fleet: Fleet) -> None:
        if self._phase == "begin" or step.start is None:
            self.failure = self._revoked
            self._go_back(self.done)
        else:
            self._fail(step, self._revoked, fleet)
            self.failure = self._revoked

    def _begin(self, step: Step, now: float, fleet: Fleet) -> None:
        if step.start is None:
            self._drain(step, fleet)
            return
        fleet.start(step.start)
        self._until = now + self._limit if step.limited else inf
        self._phase, self.doing = "probe", f"{step.start.name} starts"

    def _probe(self, step: Step, now: float, fleet: Fleet) -> None:
        assert step.start is not None
        name = step.start.name
        verdict = fleet.verdict(name)
        if verdict == "":
            fleet.admit(name)
            self._phase, self.doing = "serve", f"{name} is introduced"
        elif verdict is not None or now >= self._until:
            self._fail(step, verdict or f"it did not answer a probe within {self._limit:g} s", fleet)

    def _serve(self, step: Step, now: float, fleet: Fleet) -> None:
        assert step.start is not None
        name, verdict = step.start.name, fleet.verdict(step.start.name)
        if fleet.serves(name):
            self._drain(step, fleet)
        elif verdict or now >= self._until:
            self._fail(step, verdict or f"it did not take requests within {self._limit:g} s", fleet)

    def _drain(self, step: Step, fleet: Fleet) -> None:
        if step.stop is None or step.in_place:
            self._next()
            return
        fleet.drain(step.stop.name)
        self._phase, self.doing = "drain", f"{step.stop.name} drains"

    def _next(self) -> None:
        self.done += 1
        self._phase, self.over = "begin", self.done == len(self._steps)

    def _fail(self, step: Step, why: str, fleet: Fleet) -> None:
        assert step.start is not None
        name = step.start.name
        if self._returns:  # what runs there now does run: leave it, and return the others
            self.failure += f"; {name} could not be returned to ({why})"
        else:
            self.failure = f"{name} is not fit to serve ({why})"
        if step.in_place:  # what it was to replace has ended: that is to be started once more
            self._go_back(self.done + 1)
            return
        fleet.end(name)
        self._phase, self.doing = "retreat", f"{name} is stopped"

    def _go_back(self, done: int) -> None:
        """
        Args:
            done: steps of which something is left to be taken back.
        """
        if self._returns:
            self._next()
            return
        self._returns = True
        self._steps = [step.backwards for step in reversed(self._steps[:done])]
        self.done, self._phase, self.over = 0, "begin", not self._steps
