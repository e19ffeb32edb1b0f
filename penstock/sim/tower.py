"""An instance's vision tower: what it takes, and what came of images, one byte for each token."""

from __future__ import annotations

from penstock.core.plan import StepPlan
from penstock.core.sizes import MEDIA_CACHE
from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.sched.steptime import StepTime

TYPICAL = 650  # tokens of an image, as ServeGen's production traffic has them
BATCH = 64  # such images in a step, at most
WEIGHT = 0.3  # of the latest step in the mean


class SimTower:
    """
    Args:
        times: of a model that sees.

    Attributes:
        embeddings: for others, and from others.
        encode_ms: of an image's token, a recent mean of steps that do nothing else, without what every step has; None
            before there was one.
        looked: images that it looked at; `for_others`: those of them that others wanted.
    """

    def __init__(self, times: StepTime) -> None:
        self.embeddings = EmbeddingCache(kept_tokens(times))
        self.encode_ms: float | None = None
        self.looked = self.for_others = 0
        self._overhead = times.device.overhead_ms

    def end(self, plan: StepPlan, seconds: float, owned: set[str]) -> None:
        """A step is over that took so long.

        Args:
            owned: requests that are here.
        """
        looked = [encode for encode in plan.encodes if not encode.made]
        self.looked += len(looked)
        self.for_others += sum(encode.request_id not in owned for encode in looked)
        if looked and not plan.sequences:
            each = max(0.0, seconds * 1e3 - self._overhead) / sum(encode.span.length for encode in looked)
            self.encode_ms = each if self.encode_ms is None else self.encode_ms + WEIGHT * (each - self.encode_ms)
        for encode in looked:
            if encode.wanted:
                self.embeddings.put(encode.span.digest, Embedding.of(bytes(encode.span.length)))

    def check(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds."""
        self.embeddings.check()


def kept_tokens(times: StepTime) -> int:
    """Of images, whose embeddings an engine keeps by default."""
    tower = times.shape.vision
    assert tower is not None
    return MEDIA_CACHE // tower.token_bytes


def encode_budget(times: StepTime, limit_ms: float) -> int:
    """Tokens of images in a step that stays within a limit, one image at least."""
    return TYPICAL * times.largest_encode(limit_ms, TYPICAL, BATCH)
