"""Distributions of prompt and output lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.workload.tables import read_rows

Tokens = npt.NDArray[np.int64]

# the column pairs (prompt, output) that public length files use
LENGTH_COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("input_tokens", "output_tokens"),
    ("ContextTokens", "GeneratedTokens"),
)


class Lengths(Protocol):
    """A distribution of one length in tokens."""

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        """Lengths of at least 1, shape [count]."""


class LengthPairs(Protocol):
    """A joint distribution of prompt and output lengths."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        """Prompt lengths of at least 1 and output lengths, each of shape [count]."""


@dataclass(frozen=True)
class Fixed:
    tokens: int

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Whole numbers in [low, high], both included."""

    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class LogNormal:
    """A lognormal of the given mean and coefficient of variation, rounded and clipped into [low, high]."""

    mean: float
    cv: float
    low: int = 1
    high: int | None = None

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        variance = math.log1p(self.cv**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


def log_normal(mean: float, deviation: float) -> LogNormal:
    """A lognormal of a mean and a standard deviation, at least 1; close to a normal one while the deviation is
    small."""
    return LogNormal(mean, deviation / mean)


@dataclass(frozen=True)
class Independent:
    """Independent prompt and output lengths."""

    prompt: Lengths
    output: Lengths

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        prompt_rng, output_rng = rng.spawn(2)  # so that the first lengths do not depend on the count
        return self.prompt.draw(count, prompt_rng), self.output.draw(count, output_rng)


@dataclass(frozen=True)
class Empirical:
    """Observed pairs, drawn with replacement; a pair stays together. Both arrays have the same shape [rows]."""

    prompt: Tokens
    output: Tokens

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        rows = rng.integers(0, len(self.prompt), count)
        return self.prompt[rows], self.output[rows]


def around(tokens: int, ratio: float) -> Uniform:
    """Lengths within `ratio` (0 to 1) of `tokens` to either side, at least 1."""
    return Uniform(max(1, math.floor(tokens * (1 - ratio))), max(1, math.ceil(tokens * (1 + ratio))))


def read_lengths(path: str | Path) -> Empirical:
    """The pairs of a CSV file, plain or .gz, recognised by its header. Raises `ConfigError`."""
    header, rows = read_rows(path)
    columns = next((pair for pair in LENGTH_COLUMNS if set(pair) <= set(header)), None)
    if columns is None:
        allowed = " or ".join(",".join(pair) for pair in LENGTH_COLUMNS)
        raise ConfigError(f"{path}: columns {','.join(header)}, a length file needs {allowed}")
    pairs = [(row.whole(columns[0], 1), row.whole(columns[1], 1)) for row in rows]
    if not pairs:
        raise ConfigError(f"{path}: no rows after the header")
    prompt, output = np.array(pairs, dtype=np.int64).T
    return Empirical(prompt, output)
