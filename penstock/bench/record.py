"""What happened to one request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Answer:
    """What an answer said, as far as it came.

    Attributes:
        pieces: of its text.
        token_ids: None while the server has given none.
    """

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds on the clock of the run.

    Attributes:
        number: the request's place in the workload.
        start: when the request was due. Latencies count from here, so a client that falls behind makes them longer,
            not invisible; without a schedule it is when the request was sent.
        sent: when it was really sent.
        end: when the answer was complete, or when the request failed.
        events: (time, tokens) of each event that brought tokens.
        prompt_tokens: as the server counted them; as sent when it did not say.
        cached_tokens: of the prompt, found in the server's prefix cache.
        asked_tokens: the most tokens the answer could have.
        finish_reason: as the server gave it.
        error: the kind of failure (`timeout`, `connection`, `http 429`, `incomplete`, ...), None for success.
        detail: one line on the failure.
        answer: what was said; None when nobody wants to know.
    """

    number: int
    start: float
    sent: float
    end: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    asked_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""
    answer: Answer | None = None

    def fail(self, kind: str, detail: str) -> None:
        self.error, self.detail = kind, " ".join(detail.split())[:300]

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.events)

    @property
    def lag(self) -> float:
        """Seconds by which the client was late to send."""
        return self.sent - self.start

    @property
    def e2e(self) -> float:
        """Seconds from due to complete."""
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        """Seconds from due to the first tokens."""
        return self.events[0][0] - self.start if self.events else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None below two tokens.

        (last - first) / (n - 1) when the first event brings one token. A first event of m tokens leaves n - m to the
        interval: those that came with it took no time that could be seen. When all came in one event, nothing
        between them was seen, and the whole time of the request is divided instead: an upper bound.
        """
        tokens = self.output_tokens
        if tokens < 2:
            return None
        after_first = tokens - max(1, self.events[0][1])
        if after_first <= 0:
            return (self.events[-1][0] - self.start) / (tokens - 1)
        return (self.events[-1][0] - self.events[0][0]) / after_first

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that brought tokens: how long the text stood still, however much came then."""
        times = [time for time, _ in self.events]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def held_back(self) -> list[float]:
        """Seconds that the oldest token of each event but the first waited for the event, if tokens came evenly since
        the one before: nothing where an event brings one token, half the gap where it brings two."""
        pairs = pairwise(self.events)
        return [(later - earlier) * (tokens - 1) / max(1, tokens) for (earlier, _), (later, tokens) in pairs]
