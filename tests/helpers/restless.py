"""Policies that give nothing any rest: roles switch every second, and what runs moves again and again.

A master of its own process has them when `restless_masters` has prepared the environment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.core.wire.engine import Role
from penstock.sched.cluster import ClusterView, Migration, Move, Resident
from penstock.service.policies import Bundle

EVERY = 1.0  # seconds between two switches
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
HOOK = """
import sys

if "penstock.cli.master" in sys.orig_argv:
    from tests.helpers.restless import restless
    from penstock.service.policies import BUNDLES

    BUNDLES.update({name: restless(bundle) for name, bundle in BUNDLES.items()})
"""


class Switching:
    """Gives every instance that has a role the other one, every second."""

    name, dynamic = "switching", True

    def __init__(self) -> None:
        self._at = EVERY

    def decide(self, view: ClusterView) -> Sequence[Move]:
        if view.now < self._at:
            return []
        self._at = view.now + EVERY
        return [Move(name=i.name, role=OTHER[i.role], reason="it is time") for i in view.instances if i.role in OTHER]


class Restless:
    """Has sequences moved from every instance in every tick.

    Args:
        most: of one instance at once.
    """

    name = "restless"

    def __init__(self, seed: int, most: int = 1) -> None:
        self._rng, self._most = random.Random(seed), most

    def balance(self, view: ClusterView, residents: Callable[[str], Sequence[Resident]]) -> Iterator[Migration]:
        for load in view.instances:
            others = [i.name for i in view.instances if i.name in load.peers]
            there = residents(load.name) if others else []
            for resident in self._rng.sample(there, min(len(there), self._most)):
                yield Migration(key=resident.demand.key, to=self._rng.choice(others), reason="restless")


def restless(bundle: Bundle, most: int = 64) -> Bundle:
    """The same, without any rest. `most`: see `Restless`."""
    make = lambda at: replace(bundle.make(at), balance=Restless(5, most), roles=Switching())  # noqa: E731
    return replace(bundle, make=make, moves=True)


def restless_masters(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of `penstock up` for that.

    Args:
        folder: an empty one.
    """
    (folder / "sitecustomize.py").write_text(HOOK)
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": ":".join(filter(None, (str(folder), str(root), environment.get("PYTHONPATH"))))}
