"""Which images' embeddings an instance keeps, as numbers: what an engine of a modelled device has in their place."""

from __future__ import annotations

from collections import OrderedDict

from penstock.core.plan import StepPlan


class EmbeddingLedger:
    """The images that were looked at last, by their digest; the least recently used make room.

    Args:
        most: tokens of them that are kept.

    Attributes:
        looked: how often one was looked at; `found`: how often one was here.
    """

    def __init__(self, most: int) -> None:
        self._most, self._tokens = most, 0
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self.looked = self.found = 0

    def meet(self, plan: StepPlan) -> list[int]:
        """Tokens of each image that a step has to look at: one of whose tokens it computes some, and that is not here.
        It is, from now on."""
        return [
            span.length
            for step in plan.sequences
            if step.pixels
            for span in step.media
            if span.start < step.start + len(step.tokens)
            and step.start < span.start + span.length
            and not self.keep(span.digest, span.length, made=span.embedded)
        ]

    def keep(self, digest: bytes, tokens: int, *, made: bool = False) -> bool:
        """Whether an image need not be looked at: it is here, from now on, or others have `made` it."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
            self.found += 1
            return True
        self.looked += not made
        self._kept[digest] = tokens
        self._tokens += tokens
        while self._tokens > self._most:
            self._tokens -= self._kept.popitem(last=False)[1]
        return made

    def check(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds."""
        assert self._tokens == sum(self._kept.values()) <= self._most
