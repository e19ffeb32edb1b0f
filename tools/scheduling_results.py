"""What `penstock sim compare` measured for docs/scheduling.md, read from its result files.

A file is SCENARIO.json, and may say more between dots: "search", "rates" or "fixed", for people; a policy or a number,
when a comparison was made in several runs, which then count as one; anything else is what was changed about the
scenario ("heartbeat-200", "half-speed"), and such a result stands beside the unchanged one and never for it.

Runs of one comparison may have different numbers of seeds; whoever compares takes those that all have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from penstock.core.errors import ConfigError
from penstock.sim.report import figure_of
from penstock.sim.seeds import of_seeds, seeds_of

Row = Mapping[str, Any]

KINDS = ("search", "rates", "fixed")
SAME = ("target", "vary", "rates")  # of the parts of one comparison, as is the first seed


@dataclass(frozen=True)
class Measured:
    """One comparison.

    Attributes:
        scenario: name of its file in scenarios/, without the suffix.
        changed: about the scenario; "" when nothing is.
        document: as `penstock sim compare --json` writes it.
    """

    scenario: str
    changed: str
    document: Row

    @property
    def policies(self) -> Mapping[str, Row]:
        return self.document["policies"]

    @property
    def rates(self) -> Sequence[float]:
        """That were given; none after a search."""
        return self.document.get("rates") or ()

    @property
    def field(self) -> str:
        """What a search makes great."""
        return figure_of(self.document)[0]

    def seeds(self, *variants: str) -> frozenset[int]:
        """That all of these have; none when one is not there."""
        each = [seeds_of(self.policies[v]) if v in self.policies else frozenset() for v in variants]
        return frozenset.intersection(*each) if each else frozenset()

    def together(self, variants: Collection[str], among: Collection[int] | None = None) -> Measured:
        """These alone, with the seeds that all of them have: nobody if there is none.

        Args:
            among: and no other seeds than these.
        """
        seeds = self.seeds(*variants)
        if among is not None:
            seeds &= frozenset(among)
        rows = {variant: of_seeds(self.policies[variant], seeds, self.field) for variant in variants if seeds}
        return replace(self, document={**self.document, "seeds": sorted(seeds), "policies": rows})

    def hardest(self, variant: str, others: Collection[str]) -> Against | None:
        """Whichever of the others comes closest to a variant, each over the seeds that both have; None when none of
        them has a figure."""
        pairs = [(other, self.together((variant, other))) for other in others]
        known = [
            Against(other, ours, theirs, both)
            for other, both in pairs
            if (ours := both.figure(variant)) and (theirs := both.figure(other))
        ]
        return min(known, key=lambda against: against.ours / against.theirs, default=None)

    def figure(self, variant: str) -> float | None:
        """What a search came to; None as well for a variant that is not there."""
        return (self.policies.get(variant) or {}).get(self.field)

    def at(self, variant: str, rate: float) -> Row:
        """What a variant came to at one of the rates; {} when it is not there."""
        entries = (self.policies.get(variant) or {}).get("rates") or []
        return next((entry for entry in entries if entry["rate"] == rate), {})


@dataclass(frozen=True, slots=True)
class Against:
    """What two searches came to.

    Attributes:
        both: the two alone, with the seeds that both have.
    """

    other: str
    ours: float
    theirs: float
    both: Measured


class Results:
    """All that was measured.

    Args:
        measured: one for each scenario, change, and kind.
        scenarios: name -> content of its file.
    """

    def __init__(self, measured: Sequence[Measured], scenarios: Mapping[str, Row]) -> None:
        self.measured, self._scenarios = measured, scenarios

    @classmethod
    def read(cls, folder: Path, scenarios: Path) -> Results:
        """Raises ConfigError for a file that cannot be what it says."""
        known = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(scenarios.glob("*.yaml"))}
        paths = sorted(folder.glob("*.json"), key=lambda path: path.name.removesuffix(".json"))
        parts = [_read(path, known) for path in paths]
        found = cls(list(_merged(parts)), known)
        for measured in found.measured:
            for variant in measured.policies:
                found.hardware(measured.scenario, variant)
        return found

    def search(self, scenario: str, changed: str = "") -> Measured | None:
        of = (m for m in self.measured if (m.scenario, m.changed) == (scenario, changed) and not m.rates)
        return next(of, None)

    def rated(self, scenario: str) -> list[Measured]:
        """At given rates, nothing changed."""
        return [m for m in self.measured if m.scenario == scenario and not m.changed and m.rates]

    def seed(self, scenario: str) -> int:
        """Of the scenario's file."""
        return self._scenarios[scenario].get("seed", 0)

    def hardware(self, scenario: str, variant: str) -> Hashable:
        """Equal for variants whose layouts are the same devices, whatever each is for. Raises ConfigError."""
        layout = variant.partition("@")[2].replace("_", "-")
        content = self._scenarios[scenario]
        layouts = {"": content["instances"], **(content.get("layouts") or {})}
        if layout not in layouts:
            raise ConfigError(f"results of {scenario}: {variant!r}, scenarios/{scenario}.yaml has no such layout")
        count: Counter[Hashable] = Counter()
        for group in layouts[layout]:
            kind = tuple(sorted((k, v) for k, v in group.items() if k not in ("name", "pool", "count")))
            count[kind] += group.get("count", 1)
        return frozenset(count.items())

    def alike(self, measured: Measured, policy: str, variant: str) -> list[str]:
        """Variants of a policy on the same devices as another variant; those on the file's own layout first."""
        wanted = self.hardware(measured.scenario, variant)
        found = [v for v in measured.policies if v.partition("@")[0] == policy]
        found = [v for v in found if self.hardware(measured.scenario, v) == wanted]
        return sorted(found, key=lambda v: "@" in v)

    def prompt_machines(self, scenario: str, variant: str, decoders: int) -> int | None:
        """Instances that read prompts beside so many that decode; None in another layout."""
        layout = variant.partition("@")[2].replace("_", "-")
        groups = (self._scenarios[scenario].get("layouts") or {}).get(layout) or []
        counts = {group.get("pool"): group.get("count", 1) for group in groups}
        return counts["prefill"] if set(counts) == {"prefill", "decode"} and counts["decode"] == decoders else None

    @cached_property
    def scenarios(self) -> tuple[str, ...]:
        """Of which there is any unchanged result."""
        return tuple(dict.fromkeys(m.scenario for m in self.measured if not m.changed))


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    scenario: str
    changed: str
    document: Row


def _read(path: Path, scenarios: Mapping[str, Row]) -> _Part:
    scenario, *words = path.name.removesuffix(".json").split(".")
    if scenario not in scenarios:
        raise ConfigError(f"{path}: scenarios/{scenario}.yaml does not exist")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(document, dict) or not document.get("policies") or not document.get("seeds"):
        raise ConfigError(f"{path}: no result of `penstock sim compare`")
    rated = bool(document.get("rates"))
    kind = next((word for word in words if word in KINDS), None)
    if kind is not None and rated != (kind != "search"):
        raise ConfigError(f"{path}: says {kind!r}, and what is in it is {'at given rates' if rated else 'a search'}")
    parts = {*KINDS, *document["policies"]}
    changed = " ".join(word for word in words if word not in parts and not word.isdigit())
    given = document.get("scenario")
    if not changed and Path(str(given)).parts[-2:] != ("scenarios", f"{scenario}.yaml"):
        raise ConfigError(
            f"{path}: comes from {given}; of anything but scenarios/{scenario}.yaml the name says what it is"
        )
    return _Part(path, scenario, changed, document)


def _merged(parts: Sequence[_Part]) -> Iterator[Measured]:
    """Parts of one comparison as one. Raises ConfigError when they do not go together."""
    groups: dict[Hashable, list[_Part]] = {}
    for part in parts:
        key = part.scenario, part.changed, tuple(part.document.get("rates") or ())
        groups.setdefault(key, []).append(part)
    for first, *rest in groups.values():
        policies, seeds = dict(first.document["policies"]), set(first.document["seeds"])
        for part in rest:
            odd = [name for name in SAME if part.document.get(name) != first.document.get(name)]
            odd += ["first seed"] * (part.document["seeds"][0] != first.document["seeds"][0])
            if odd:
                raise ConfigError(f"{part.path}: another {odd[0]} than in {first.path}, of which it is a part")
            if twice := policies.keys() & part.document["policies"]:
                raise ConfigError(f"{part.path}: {min(twice)} is in {first.path} or another part already")
            policies |= part.document["policies"]
            seeds |= set(part.document["seeds"])
        document = {**first.document, "seeds": sorted(seeds), "policies": policies}
        yield Measured(first.scenario, first.changed, document)
