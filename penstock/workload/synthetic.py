"""Synthetic workloads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.workload.arrivals import arrival_times
from penstock.workload.lengths import LengthPairs, Lengths
from penstock.workload.prefixes import draw_prefixes
from penstock.workload.requests import WorkImage, WorkRequest


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
    images: float = 0.0,
    image_tokens: Lengths | None = None,
) -> list[WorkRequest]:
    """`count` requests in order of arrival.

    Args:
        lengths: of the private part of the prompts and of the outputs.
        rate: mean requests per second; infinite sends all at once. `cv`: coefficient of variation of the gaps.
        prefixes: how many shared prefixes there are, 0 for none; each request begins with one, `prefix_tokens` long,
            drawn in proportion to (id + 1) ** -zipf.
        images: of a request in the mean, Poisson distributed; `image_tokens`: of each, given where there are any.

    Lengths, prefixes, arrivals and images have generators of their own, so changing one does not affect the others.
    """
    length_rng, prefix_rng, arrival_rng, image_rng = rng.spawn(4)
    prompt, output = lengths.draw(count, length_rng)
    times = arrival_times(count, rate, arrival_rng, cv)
    blocks = [(int(k),) for k in draw_prefixes(count, prefixes, prefix_rng, zipf)] if prefixes else [()] * count
    seen = _draw_images(count, images, image_tokens, image_rng) if image_tokens is not None else [()] * count
    return [
        WorkRequest(
            number=number,
            at=float(at),
            prompt_tokens=int(prompt_count) + (prefix_tokens if prefixes else 0) + sum(tokens for _, tokens in own),
            output_tokens=int(output_count),
            prefix=block,
            block_tokens=prefix_tokens if prefixes else 0,
            images=own,
        )
        for number, (at, prompt_count, output_count, block, own) in enumerate(
            zip(times, prompt, output, blocks, seen, strict=True)
        )
    ]


def _draw_images(count: int, mean: float, tokens: Lengths, rng: np.random.Generator) -> Sequence[tuple[WorkImage, ...]]:
    """Of so many requests."""
    count_rng, token_rng = rng.spawn(2)
    counts = count_rng.poisson(mean, count)
    drawn = [WorkImage(number, int(n)) for number, n in enumerate(tokens.draw(int(counts.sum()), token_rng))]
    ends = np.cumsum(counts)
    return [tuple(drawn[end - n : end]) for n, end in zip(counts, ends, strict=True)]
