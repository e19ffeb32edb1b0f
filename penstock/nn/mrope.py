"""Multimodal rotary positions (Qwen2-VL, 2.1): of an image's token its frame, row and column; of text the same thrice.

What follows an image begins behind the greatest position in it, as in the models' own code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.request import MediaSpan


def rotary_positions(media: Sequence[MediaSpan], start: int, count: int) -> Tensor:
    """[3, count] int64, of tokens [start, start + count) of a sequence."""
    end = start + count
    result = torch.arange(start, end).repeat(3, 1)
    shift = 0  # of what follows, against its place
    for span in media:
        if span.start >= end:
            break
        begins = span.start + shift
        own, greatest = _within(span)
        first, last = max(start, span.start), min(end, span.start + span.length)
        if first < last:
            result[:, first - start : last - start] = begins + own[:, first - span.start : last - span.start]
        shift = begins + greatest + 1 - (span.start + span.length)
        if last < end:
            behind = max(start, span.start + span.length)
            result[:, behind - start :] = torch.arange(behind, end) + shift
    return result


def _within(span: MediaSpan) -> tuple[Tensor, int]:
    """Positions in a span, [3, length], and the greatest."""
    frames, rows, columns = span.grid
    assert frames * rows * columns == span.length
    times = (torch.arange(frames) * span.interval).long()
    axes = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
    own = torch.stack(axes).flatten(1)
    return own, max(int(times[-1]), rows - 1, columns - 1)
