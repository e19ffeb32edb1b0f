"""An instance's vision tower: images that it looks at for others, and what came of them, one byte for each token."""

from __future__ import annotations

from collections import deque

from penstock.core.request import MediaSpan
from penstock.core.sizes import MEDIA_CACHE
from penstock.core.wire.engine import Encode
from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.sched.local.handoff.embeddings import GiveSide
from penstock.sched.steptime import StepTime

TYPICAL = 650  # tokens of an image, as ServeGen's production traffic has them
BATCH = 64  # such images in a step, at most
WEIGHT = 0.1  # of the latest step in the mean


class SimTower:
    """
    Args:
        times: of a model that sees.
        limit_ms: of a step with images; None sets no limit to how many are in one.

    Attributes:
        embeddings: for others, and from others.
        looking: what the step that runs looks at for others.
        encode_ms: of an image's token, a recent mean; None before there was one.
        looked: images that it looked at for others; `seconds`: that this took.
    """

    def __init__(self, times: StepTime, limit_ms: float | None) -> None:
        tower = times.shape.vision
        assert tower is not None
        self.embeddings = EmbeddingCache(MEDIA_CACHE // tower.token_bytes)
        self.looking: list[MediaSpan] = []
        self.encode_ms: float | None = None
        self.looked, self.seconds = 0, 0.0
        self._orders: deque[MediaSpan] = deque()
        self._budget = 1 << 40 if limit_ms is None else TYPICAL * times.largest_encode(limit_ms, TYPICAL, BATCH)

    @property
    def waiting(self) -> int:
        """Images."""
        return len(self._orders)

    def order(self, command: Encode, give: GiveSide) -> None:
        """Others are about to ask for these."""
        for span in command.media:
            if self.embeddings.get(span.digest) is None:
                if span.digest not in give.coming:
                    self._orders.append(span)
                give.expect(span.digest)

    def begin(self) -> list[int]:
        """Take what the next step looks at, one whatever its size. Returns their tokens."""
        left = self._budget
        while self._orders and (not self.looking or self._orders[0].length <= left):
            span = self._orders.popleft()
            left -= span.length
            self.looking.append(span)
        return [span.length for span in self.looking]

    def end(self, give: GiveSide, seconds: float) -> None:
        """The step that looked at them is over, and took so long for that."""
        looking, self.looking = self.looking, []
        if not looking:
            return
        self.looked, self.seconds = self.looked + len(looking), self.seconds + seconds
        each = seconds * 1e3 / sum(span.length for span in looking)
        self.encode_ms = each if self.encode_ms is None else self.encode_ms + WEIGHT * (each - self.encode_ms)
        for span in looking:
            self.embeddings.put(span.digest, Embedding.of(bytes(span.length)))
            give.made(span.digest)

    def check(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds."""
        self.embeddings.check()
