"""What an earlier `penstock sim compare --json` found already, for `--resume`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.sim.seeds import rows_of

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A document of the same comparison, with other policies, fewer seeds or other rates. Without one there is nothing.

    Attributes:
        policies: of the document.
    """

    policies: Mapping[str, Row] = field(default_factory=dict)

    def searched(self, variant: str) -> dict[int, Row]:
        """Seed -> what its search came to."""
        return rows_of(self.policies[variant]) if variant in self.policies else {}

    def probes(self, variant: str, seed: int) -> list[Row]:
        """Simulations of that search."""
        return [probe for probe in self.policies[variant]["probes"] if probe["seed"] == seed]

    def rated(self, variant: str, rate: float) -> dict[int, Row]:
        """Seed -> what it came to at that rate."""
        return rows_of(self._at(variant, rate) or {"seeds": []})

    def over_time(self, variant: str, rate: float) -> Row | None:
        """`tasks_over_time` of the first seed."""
        return (self._at(variant, rate) or {}).get("tasks_over_time")

    def _at(self, variant: str, rate: float) -> Row | None:
        entries = self.policies.get(variant, {}).get("rates") or ()
        return next((entry for entry in entries if entry["rate"] == rate), None)


def read_earlier(path: str, head: Row, variants: Collection[str], fields: Collection[str]) -> Earlier:
    """Raises ConfigError when it is of another comparison.

    Args:
        head: the document that is to be written, without its policies.
        variants: of which there must be one.
        fields: that every seed's row must have.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        policies, told = document["policies"], _about(document)
        entries = [entry for policy in policies.values() for entry in policy.get("rates") or [policy]]
        whole = all(row.keys() >= set(fields) for entry in entries for row in entry["seeds"])
    except OSError as error:
        raise ConfigError(f"--resume: {path} cannot be read ({error.strerror})", "--resume") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"--resume: {path} was not written by `penstock sim compare --json`", "--resume") from None
    if not whole:
        raise ConfigError(f"--resume: {path} was written by another version, which reported other figures", "--resume")
    for name, wanted in _about(head).items():
        if told[name] != wanted:
            raise ConfigError(f"--resume: {path} has {name} {told[name]!r}, and this {wanted!r}", "--resume")
    if not policies.keys() & set(variants):
        raise ConfigError(f"--resume: {path} has {', '.join(policies)}, and none of {', '.join(variants)}", "--resume")
    return Earlier(policies)


def _about(document: Row) -> Row:
    """What documents must have in common to be of one comparison. A scenario may lie in another folder."""
    return {
        "scenario": Path(document["scenario"]).name,
        "target": document["target"],
        "vary": document["vary"],
        "tolerance": document["tolerance"],
        "a search": not document.get("rates"),
        "the first seed": document["seeds"][0],
    }
