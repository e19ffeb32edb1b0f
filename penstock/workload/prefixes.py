"""Shared prefixes: which one a request has, and its tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SHARED_STREAM = 0


def draw_prefixes(count: int, prefixes: int, rng: np.random.Generator, zipf: float = 0.0) -> npt.NDArray[np.int64]:
    """Prefix ids in [0, prefixes), shape [count]: id k is drawn in proportion to (k + 1) ** -zipf; 0 is uniform."""
    weights = np.arange(1, prefixes + 1, dtype=np.float64) ** -zipf
    return rng.choice(prefixes, size=count, p=weights / weights.sum())


def block_ids(seed: int, block: int, tokens: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The token ids of a shared block, shape [tokens], drawn from `ids`: a function of the arguments alone."""
    rng = np.random.default_rng((seed, SHARED_STREAM, block))
    return ids[rng.integers(0, len(ids), tokens)]
