"""What one policy came to with several seeds, as `penstock sim compare` reports it: made of a row for each seed, from
which it can be made again of fewer of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median
from typing import Any

Row = Mapping[str, Any]


def searched(rows: Mapping[int, Row], figure: str) -> dict[str, Any]:
    """The row of the seed in the middle, and how far the others are from it.

    Args:
        rows: seed -> what its search came to; one at least.
        figure: the field that was made great.
    """
    ranked = sorted(rows, key=lambda seed: (rows[seed][figure] or 0.0, seed))
    middle = ranked[(len(ranked) - 1) // 2]
    figures = [rows[seed][figure] for seed in ranked]
    return {
        **rows[middle],
        "seed": middle,
        "spread": None if None in figures else [figures[0], figures[-1]],
        "seeds": _listed(rows),
    }


def at_rate(rate: float, rows: Mapping[int, Row]) -> dict[str, Any]:
    """Medians over the seeds, and from where to where attainment goes.

    Args:
        rows: seed -> what it came to at that rate; one at least, all with the same fields.
    """
    columns = {name: [row[name] for row in rows.values()] for name in next(iter(rows.values()))}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    kept = known["attainment"]
    return {
        "rate": rate,
        **{name: median(values) if values else None for name, values in known.items()},
        "spread": [min(kept), max(kept)] if kept else None,
        "seeds": _listed(rows),
    }


def _listed(rows: Mapping[int, Row]) -> list[dict[str, Any]]:
    return [{"seed": seed, **row} for seed, row in rows.items()]


def rows_of(entry: Row) -> dict[int, dict[str, Any]]:
    """Seed -> its row: what `searched` or `at_rate` were given, of what they made of it."""
    return {row["seed"]: {name: value for name, value in row.items() if name != "seed"} for row in entry["seeds"]}


def seeds_of(policy: Row) -> frozenset[int]:
    """That a policy of a document was simulated with."""
    entries = policy.get("rates") or [policy]
    return frozenset.intersection(*(frozenset(row["seed"] for row in entry["seeds"]) for entry in entries))


def of_seeds(policy: Row, seeds: Collection[int], figure: str) -> dict[str, Any]:
    """A policy of a document as if it had been simulated with these seeds only.

    Args:
        seeds: one at least, all among `seeds_of`.
        figure: see `searched`.
    """
    if policy.get("rates"):
        return {**policy, "rates": [_fewer(entry, seeds) for entry in policy["rates"]]}
    kept = {seed: row for seed, row in rows_of(policy).items() if seed in seeds}
    return {**policy, **searched(kept, figure)}


def _fewer(entry: Row, seeds: Collection[int]) -> dict[str, Any]:
    return {**entry, **at_rate(entry["rate"], {s: row for s, row in rows_of(entry).items() if s in seeds})}
