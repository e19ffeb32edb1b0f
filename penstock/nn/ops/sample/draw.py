"""How a row is drawn."""

from typing import NamedTuple


class Draw(NamedTuple):
    """One row's parameters, as `SamplingParams` explains them.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        key: of the noise, `row_key(seed, position)`.
    """

    temperature: float
    top_p: float
    min_p: float
    top_k: int
    key: int
