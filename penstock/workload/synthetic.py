"""Synthetic workloads."""

from __future__ import annotations

import numpy as np

from penstock.workload.arrivals import arrival_times
from penstock.workload.lengths import LengthPairs
from penstock.workload.prefixes import draw_prefixes
from penstock.workload.requests import WorkRequest


def synthesise(
    count: int,
    lengths: LengthPairs,
    rng: np.random.Generator,
    *,
    rate: float,
    cv: float = 1.0,
    prefixes: int = 0,
    prefix_tokens: int = 0,
    zipf: float = 0.0,
) -> list[WorkRequest]:
    """`count` requests in order of arrival.

    Args:
        lengths: of the private part of the prompts and of the outputs.
        rate: mean requests per second; infinite sends all at once. `cv`: coefficient of variation of the gaps.
        prefixes: how many shared prefixes there are, 0 for none; each request begins with one, `prefix_tokens` long,
            drawn in proportion to (id + 1) ** -zipf.

    Lengths, prefixes and arrivals have generators of their own, so changing one does not affect the others.
    """
    length_rng, prefix_rng, arrival_rng = rng.spawn(3)
    prompt, output = lengths.draw(count, length_rng)
    times = arrival_times(count, rate, arrival_rng, cv)
    blocks = [(int(k),) for k in draw_prefixes(count, prefixes, prefix_rng, zipf)] if prefixes else [()] * count
    return [
        WorkRequest(
            number=number,
            at=float(at),
            prompt_tokens=int(prompt_count) + (prefix_tokens if prefixes else 0),
            output_tokens=int(output_count),
            prefix=block,
            block_tokens=prefix_tokens if prefixes else 0,
        )
        for number, (at, prompt_count, output_count, block) in enumerate(
            zip(times, prompt, output, blocks, strict=True)
        )
    ]
