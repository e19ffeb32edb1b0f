"""The launcher of a host that joined changes its instances, as the one that began the deployment orders; see `joined`.

It does so by itself, one instance at a time, and returns to what it was where one is not fit to serve. While nobody who
has a say is heard, it goes no further.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.wire.master import HostOrder, HostProgress
from penstock.service.change import Change, Found, OwnFleet, Plan, Running, plan_changes
from penstock.service.checkpoint import fingerprint
from penstock.service.deployment import Deployment
from penstock.service.rollout import Rollout

if TYPE_CHECKING:
    from penstock.service.launcher import Launcher, Registration

log = logging.getLogger("penstock.launcher")
NOTHING = HostOrder(0, False, "", "")


class Follower:
    """Call `look` many times a second.

    Args:
        registration: of the host's instances.
        read: model, policy -> what it describes with these; raises ConfigError.
        plan: makes its programs.
        surround: sets the environment of engines that start, by the deployment that they are for.
        tidy: puts away what was made for programs that are not there any more.
    """

    def __init__(
        self,
        launcher: Launcher,
        registration: Registration,
        running: Running,
        read: Callable[[str, str], Found],
        plan: Plan,
        surround: Callable[[Sequence[Deployment]], None],
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        self._launcher, self._registration, self._running = launcher, registration, running
        self._read, self._plan, self._surround, self._tidy = read, plan, surround, tidy
        self._before: tuple[int, Running] | None = None  # what ran, and the order that changed it
        self._order, self._taken = NOTHING, NOTHING  # the newest, and the one that is obeyed
        self._search: _Search | None = None
        self._course: _Course | None = None
        self._looked: float | None = None
        self._time = 0.0  # seconds in which somebody was heard
        registration.progress = HostProgress(model=running.digest)

    def look(self, now: float) -> None:
        said, passed = self._registration.said, now - (now if self._looked is None else self._looked)
        self._looked = now
        if self._launcher.stopping:
            if self._registration.progress is not None and self._registration.progress.state in ("able", "changes"):
                self._tell("unable", "it is being stopped")
            return
        if said is None or not (said.model and self._registration.hears(now)):
            return
        self._time += passed
        if said.order is not None and said.order.number >= self._order.number:
            self._order = said.order
        if self._course is not None:
            self._go_on(self._course)
        elif self._search is not None:
            self._look_for(self._search)
        elif self._order.number > self._taken.number:
            self._taken = self._order
            self._search = _Search(self._find, self._taken)
        elif said.model == self._running.digest:
            self._registration.other = ""

    def _find(self, order: HostOrder) -> Found:
        """Raises ConfigError, OSError. It may take long, where a hub is asked."""
        if self._before is not None and order.undoes == self._before[0]:
            return self._before[1].deployment, self._before[1].directory
        try:
            wanted, directory = self._read(order.model, order.policy)
            if fingerprint(directory) != order.digest:
                raise ConfigError(f"model: {directory} is another checkpoint here than on the first host")
        except (PenstockError, OSError):
            served = [self._running, *([self._before[1]] if self._before is not None else [])]
            known = [running for running in served if running.digest == order.digest]
            if order.acts and known:  # it is in another folder here
                return known[0].deployment, known[0].directory
            raise
        names = {"served_model_name": self._running.deployment.options["served_model_name"]}  # which nobody sees here
        return replace(wanted, options={**wanted.options, **names}), directory

    def _look_for(self, search: _Search) -> None:
        if search.goes_on:
            return
        self._search, order = None, self._taken
        try:
            found = search.found()
            (change,) = plan_changes("its file", self._launcher, [self._running], [found], self._plan)
        except Exception as error:  # what runs goes on
            if not isinstance(error, PenstockError | OSError):
                log.exception("an order could not be read")
            log.warning("the instances cannot become what the first host orders: %s", error)
            self._tell("unable", str(error) or type(error).__name__)
            return
        if not order.acts:
            self._tidy()
            self._tell("able", lines=change.difference.lines)
            return
        log.info("the instances change: %s", "; ".join(change.difference.lines) or "nothing is to be done")
        self._before = order.number, self._running
        self._registration.other = change.wanted.digest
        self._surround([found[0]])
        self._course = _Course(change, Rollout(change.steps, order.limit), OwnFleet(self._launcher, None))
        self._go_on(self._course)

    def _go_on(self, course: _Course) -> None:
        fleet, rollout = course.fleet, course.rollout
        fleet.look()
        fleet.known |= set(self._order.known)
        if self._order.number > self._taken.number and self._order.acts:
            if self._is_towards(course.change.wanted) and not rollout.returns:
                self._taken = self._order  # of a launcher that was started anew
                self._before = self._taken.number, self._running
            else:
                rollout.turn_back("it was told otherwise")
        failed = rollout.failure
        rollout.look(self._time, fleet)
        if rollout.failure != failed:
            log.warning("the instances go back to what they were: %s", rollout.failure)
        if not rollout.over:
            doing = f"{rollout.doing} ({rollout.done} of {rollout.total})"
            self._tell("changes", rollout.failure, doing=doing, introduces=fleet.introduces)
            return
        self._course = None
        fleet.close()
        before = self._running
        if not rollout.failure:
            self._running = course.change.wanted
            self._registration.digest = self._running.digest
            self._registration.other = before.digest
        self._surround([self._running.deployment])
        self._tidy()
        log.info("the instances are what %s", "they were before" if rollout.failure else "the first host orders")
        self._tell("returned" if rollout.failure else "changed", rollout.failure)

    def _is_towards(self, wanted: Running) -> bool:
        """Whether the newest order is for what is under way already."""
        order = self._order
        same_policy = order.policy in ("", wanted.deployment.policy)
        return not order.undoes and order.digest == wanted.digest and same_policy

    def _tell(
        self,
        state: Literal["able", "unable", "changes", "changed", "returned"],
        why: str = "",
        lines: list[str] | None = None,
        doing: str = "",
        introduces: str = "",
    ) -> None:
        self._registration.progress = HostProgress(
            self._taken.number, state, self._running.digest, why, lines or [], doing, introduces
        )

    def close(self) -> None:
        if self._course is not None:
            self._course.fleet.close()


class _Search:
    """What an order names is looked for, in a thread."""

    def __init__(self, find: Callable[[HostOrder], Found], order: HostOrder) -> None:
        self._find, self._order = find, order
        self._found: Found | Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._find(self._order)
        except Exception as error:  # told by whoever waits
            self._found = error

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def found(self) -> Found:
        assert self._found is not None
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


@dataclass(frozen=True, slots=True)
class _Course:
    """A change that is under way."""

    change: Change
    rollout: Rollout
    fleet: OwnFleet
