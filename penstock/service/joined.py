"""The hosts that joined a deployment, as the launcher that began it has them change.

It says what each is to serve, again and again, and each does that by itself, one instance at a time (`follower`). What
is said passes through the master: whoever is started anew in the middle learns of it from the next report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.core.wire.engine import LEASE
from penstock.core.wire.master import HostOrder, HostProgress

if TYPE_CHECKING:
    from penstock.service.launcher import Registration
    from penstock.service.trial import Introduction

log = logging.getLogger("penstock.launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a host is to serve.

    Attributes:
        prefix: of the model that it is one of's processes; "" where there is one model.
        host: its name.
        model, digest, policy: see `HostOrder`.
        returns: whether that is what it served before it was last told to change.
    """

    prefix: str
    host: str
    model: str
    digest: str
    policy: str
    returns: bool = False

    @property
    def name(self) -> str:
        """Of all hosts of all models."""
        return f"{self.prefix}{self.host}"


class JoinedHosts:
    """A `rollout.Fleet` of hosts; call `look` many times a second.

    Args:
        registration: of the deployment's instances here.
        introduce: has all frontends looked at for an instance.
    """

    def __init__(self, registration: Registration, introduce: Callable[[str], Introduction]) -> None:
        self._registration, self._introduce = registration, introduce
        self._orders: dict[str, HostOrder] = {}
        self._last: dict[str, int] = {}  # host -> number of the order with which it changed last
        self._number = 0
        self._heard: dict[str, float] = {}
        self._now = 0.0
        self._introductions: dict[str, tuple[str, Introduction]] = {}  # host -> instance

    @property
    def hosts(self) -> Mapping[str, HostProgress]:
        """That are heard by the master."""
        said = self._registration.said
        return {} if said is None else said.hosts

    def look(self, now: float) -> None:
        self._now = now
        if not self._registration.hears(now):  # nobody can be
            self._heard = dict.fromkeys(self._heard, now)
        for name, progress in self.hosts.items():
            self._heard[name] = now
            self._look_at_introduction(name, progress.introduces)
        for name in [name for name, heard in self._heard.items() if now - heard > LEASE]:
            del self._heard[name]
            self._orders.pop(name, None)
            self._look_at_introduction(name, "")
        self._registration.orders = dict(self._orders)

    def _look_at_introduction(self, host: str, instance: str) -> None:
        before = self._introductions.get(host)
        if before is not None and before[0] != instance:
            self._introductions.pop(host)[1].close()
        if instance and (before is None or before[0] != instance):
            self._introductions[host] = instance, self._introduce(instance)
        order = self._orders.get(host)
        if instance and order is not None and self._introductions[host][1].known and instance not in order.known:
            self._orders[host] = replace(order, known=[instance])

    def close(self) -> None:
        for _, introduction in self._introductions.values():
            introduction.close()

    # --- orders

    def ask(self, target: Target, limit: float) -> None:
        """Whether the host could become that; `answer` says so."""
        self._give(target, acts=False, limit=limit)

    def change(self, target: Target, limit: float) -> None:
        number = self._last.get(target.host, 0) if target.returns else 0
        self._give(target, acts=True, limit=limit, undoes=number)
        if not target.returns:
            self._last[target.host] = self._number

    def _give(self, target: Target, *, acts: bool, limit: float, undoes: int = 0) -> None:
        self._number = max(time.time_ns(), self._number + 1)
        self._orders[target.host] = HostOrder(
            self._number, acts, target.model, target.digest, target.policy, undoes, limit
        )

    def forget_questions(self) -> None:
        """Whatever was asked, nobody waits for the answer."""
        self._orders = {name: order for name, order in self._orders.items() if order.acts}

    def order(self, name: str) -> HostOrder | None:
        return self._orders.get(name)

    def answer(self, name: str) -> HostProgress | None:
        """What a host says of its last order; None before it has heard of it."""
        order, progress = self._orders.get(name), self.hosts.get(name)
        return progress if order is not None and progress is not None and progress.number == order.number else None

    def has_left(self, name: str) -> bool:
        return name not in self._heard
