"""A client's request while it is served: its outputs as they come, and what is written down about it at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.core.clock import Clock
from penstock.core.errors import ClientTooSlow, PenstockError, http_row
from penstock.core.request import Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.obs.logs import OFFLINE, ONLINE, Format, RequestRecord, log_request
from penstock.obs.metrics import Metrics
from penstock.obs.tracing import current_trace
from penstock.service.intake import MOST_NAMED
from penstock.service.output import Delta, OutputStream, Usage, merge, outputs_of
from penstock.text.tokenizer import Tokenizer

MOST_DELTAS = 256  # that are kept apart for a client that does not keep up; then they are joined
# Tokens, and other tokens named beside them, that wait for a client; with more it is given up. Outputs without
# log-probabilities have fewer: only who has asked for much, and takes little, comes to it.
MOST_UNTAKEN = MOST_NAMED
CLIENT_LEFT = 499  # in the log, where others write it too


class Owner(Protocol):
    """What a generation needs of its frontend."""

    tokenizer: Tokenizer
    metrics: Metrics
    clock: Clock
    log_format: Format

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences, and have engines drop them."""


class Generation:
    """The outputs of one request as deltas, all outputs interleaved.

    Args:
        model: the name that the client called it by.

    Attributes:
        usage: grows with the deltas.
    """

    def __init__(
        self,
        frontend: Owner,
        request_id: str,
        sequences: list[Request],
        params: SamplingParams,
        arrival: float,
        model: str,
    ) -> None:
        self.usage = Usage(prompt_tokens=len(sequences[0].prompt))
        self._frontend = frontend
        self._request_id = request_id
        self._model = model
        self._sequences = sequences * (params.n // len(sequences))  # by output; a beam search has one for all
        self._streams = [OutputStream(i, frontend.tokenizer, params) for i in range(params.n)]
        self._open = params.n
        self._deltas: list[Delta] = []
        self._untaken = 0  # tokens in them, see MOST_UNTAKEN
        self._error: PenstockError | None = None
        self._tell: Callable[[], None] = _nobody
        self._arrival = arrival
        self._first: float | None = None
        self._newest: list[float | None] = [None] * params.n
        self._tpots: list[float] = []
        self._record: dict[str, Any] = {}
        self._routes: list[str] = []
        self._recorded = False
        self._params = params
        self._trace = current_trace()

    def listen(self, tell: Callable[[], None]) -> None:
        """From now on `tell` is called whenever `take` has something new to say."""
        self._tell = tell

    def take(self) -> list[Delta]:
        """What came since the last call.

        Raises:
            PenstockError: what ended it early, once everything from before that was taken.
        """
        if not self._deltas and self._error is not None:
            raise self._error
        taken, self._deltas, self._untaken = self._deltas, [], 0
        return taken

    @property
    def over(self) -> bool:
        """Whether every output has ended, or the request was cancelled, and all was taken."""
        return not self._open and not self._deltas

    def cancel(self) -> None:
        """End it now. Harmless after the end."""
        self._frontend.release(
            [s.id for s, stream in zip(self._sequences, self._streams, strict=True) if not stream.finished]
        )
        self._end("abort" if self._open else None)

    def fail(self, error: PenstockError) -> None:
        """End it with an error; called by the frontend."""
        self._frontend.release([s.id for s in self._sequences])
        self._error = error
        self._end(None)

    def routed(self, route: str) -> None:
        """One of its sequences runs there; called by the frontend."""
        if route not in self._routes:
            self._routes.append(route)

    def receive(self, index: int, output: TokenOutput, now: float) -> None:
        """What a step brought; called by the frontend."""
        for i, own in outputs_of(index, output):
            if self._error is None:  # the one before may have been too much for its client
                self._receive(i, own, now)
        self._tell()

    def _receive(self, index: int, output: TokenOutput, now: float) -> None:
        stream = self._streams[index]
        delta = stream.feed(output)
        self._count(index, delta, output, now)
        self._deltas.append(delta)
        self._untaken += len(delta.tokens) + sum(len(entry.top) for entry in delta.logprobs or ())
        if self._untaken > MOST_UNTAKEN:
            self._deltas = []  # what it does not get in full it gets no more of
            self.fail(ClientTooSlow(f"the answer was given up: {self._untaken} tokens of it waited for its client"))
            return
        if len(self._deltas) >= MOST_DELTAS + len(self._streams):
            self._deltas = merge(self._deltas)
        if stream.finished:
            self._open -= 1
            if output.finish is None:  # a stop string ended it, of which the engine knows nothing
                self._frontend.release([self._sequences[index].id])
            if not self._open:
                self._end(delta.finish_reason)

    def _count(self, index: int, delta: Delta, output: TokenOutput, now: float) -> None:
        metrics, tokens = self._frontend.metrics, len(delta.tokens)
        if tokens:
            before, self._newest[index] = self._newest[index], now
            self.usage.completion_tokens += tokens
            if before is None:
                self.usage.cached_tokens = max(self.usage.cached_tokens, output.cached_tokens)
                self._record.setdefault("ttft", now - self._arrival)
                self._first = self._first or now
                metrics.observe_first_token(now - self._arrival)
                before, tokens = now, tokens - 1
            if output.hypotheses is None:
                metrics.observe_inter_token(now - before, tokens)
            else:
                metrics.observe_together(tokens)
        if output.timing is not None:
            self._record |= {
                "queue": output.timing.queue,
                "prefill": output.timing.prefill,
                "decode": output.timing.decode,
            }

    def _end(self, finish_reason: str | None) -> None:
        """Log and count the request, once."""
        self._open = 0
        self._tell()
        if self._recorded:
            return
        self._recorded = True
        frontend, usage = self._frontend, self.usage
        last = max((t for t in self._newest if t is not None), default=None)
        steps = usage.completion_tokens // len(self._sequences) - 1
        if last is not None and self._first is not None and steps > 0 and not self._params.use_beam_search:
            self._record["tpot"] = (last - self._first) / steps
        record = RequestRecord(
            request_id=self._request_id,
            model=self._model,
            instance=",".join(self._routes),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            longest_completion=max(stream.length for stream in self._streams),
            n=len(self._sequences),
            max_tokens=self._sequences[0].max_tokens,
            finish_reason=finish_reason,
            e2e=frontend.clock.now() - self._arrival,
            seed=self._sequences[0].seed,
            service_class=OFFLINE if self._sequences[0].offline else ONLINE,
            slo_met=None if finish_reason == "abort" else self._keeps_promises(),
            status=http_row(self._error)[0] if self._error else CLIENT_LEFT if finish_reason == "abort" else 200,
            **self._record,
        )
        frontend.metrics.observe_request(record)
        log_request(record, frontend.log_format)
        if self._trace is not None:
            self._trace.prompt_ended(record, self._params)

    def _keeps_promises(self) -> bool | None:
        """Whether it met its targets; None when it has none. What has failed met none of them."""
        asked = self._sequences[0]
        if asked.ttft_ms is None and asked.tpot_ms is None:
            return None
        ttft, tpot = self._record.get("ttft"), self._record.get("tpot")
        if self._error is not None or ttft is None:
            return False
        in_time = asked.ttft_ms is None or ttft * 1e3 <= asked.ttft_ms
        return in_time and (asked.tpot_ms is None or tpot is None or tpot * 1e3 <= asked.tpot_ms)


def _nobody() -> None:
    """Listens before anybody does."""
