"""A client's request while it is served: its outputs as they arrive, and its log record at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.clock import Clock
from penstock.core.errors import ClientTooSlow, PenstockError, http_row
from penstock.core.request import FinishReason, Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.obs.logs import OFFLINE, ONLINE, Format, RequestRecord, log_request
from penstock.obs.metrics import Metrics
from penstock.obs.tracing import CURRENT_TRACE
from penstock.service.intake import MOST_NAMED
from penstock.service.request_record import (
    LOWEST,
    VERSION,
    Interruption,
    RecordedMedia,
    RecordedOutput,
    RecordedRequest,
    file_digest,
    recorded_params,
)
from penstock.text.detokenizer import Delta, OutputStream, outputs_of
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.service.request_recorder import RequestRecorder

MOST_DELTAS = 256  # deltas kept separate for a slow client; beyond it they are merged
# Tokens, and other tokens named beside them, of one prompt's outputs that wait for a client; with more it is given up.
# Only requests for many log-probabilities from a slow client reach it.
MOST_UNTAKEN = MOST_NAMED
CLIENT_LEFT = 499  # nginx's status for a closed client connection; for the log


@dataclass(slots=True)
class Usage:
    """Tokens of a request, in all its outputs together, and its time in seconds, where it has one prompt.

    Attributes:
        first: from its arrival to its first token.
        queue: before it ran.
        decode: from its first token to its last.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    first: float | None = None
    queue: float | None = None
    decode: float | None = None


class Owner(Protocol):
    """What a generation needs of its frontend.

    Attributes:
        recorder: of requests that have ended, if any is wanted.
    """

    tokenizer: Tokenizer
    metrics: Metrics
    clock: Clock
    log_format: Format
    recorder: RequestRecorder | None

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences, and have engines drop them."""


@dataclass(slots=True)
class _Part:
    """What comes of one of the prompts.

    Attributes:
        request_id: in the log.
        sequences: by output; a beam search has one for all.
        open: outputs that have not ended.
        newest: when each output's newest token came; None before the first.
        first: when the first token of any came.
        routes: where its sequences ran.
        timings: fields of the log record, in seconds.
        preemptions: of its sequences.
        ended: whether it was logged and counted.
        outputs: what came of each, where that is recorded; `embedding`: the same of a prompt to embed.
        fingerprints: of the engines that it ran on.
        files: its images and videos as they came, where that is recorded.
    """

    request_id: str
    sequences: list[Request]
    streams: list[OutputStream]
    usage: Usage
    open: int
    newest: list[float | None]
    first: float | None = None
    routes: list[str] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0
    ended: bool = False
    outputs: list[RecordedOutput] | None = None
    embedding: list[float] | None = None
    fingerprints: list[str] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    files: Sequence[bytes] = ()


class Generation:
    """The outputs of one request, of all its prompts, as deltas. Leaving its context cancels whatever still runs.

    An output's index is that of its prompt times `params.n`, plus its own. What ends one prompt early ends all.

    Args:
        arrival: when the request came, by the frontend's clock.
        model: the name that the client called it by.
        prompts_only: what is known of the prompts is all that is wanted, and what is generated is dropped.
        shown: special tokens that are part of the texts all the same.
    """

    def __init__(
        self,
        frontend: Owner,
        params: SamplingParams,
        arrival: float,
        model: str,
        prompts_only: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._frontend = frontend
        self._params = params
        self._arrival = arrival
        self._model = model
        self._prompts_only = prompts_only
        self._shown = shown
        self._parts: list[_Part] = []
        self._open = 0  # outputs that have not ended
        self._deltas: list[Delta] = []
        self._untaken: dict[int, int] = {}  # tokens in them, by prompt; see MOST_UNTAKEN
        self._error: PenstockError | None = None
        self._wake: asyncio.Future[None] | None = None
        self._trace = CURRENT_TRACE.get()

    def add(self, request_id: str, sequences: Sequence[Request], files: Sequence[bytes] = ()) -> int:
        """One more prompt, as the sequences that run for it, and its images and videos as they came; returns its first
        output's index."""
        count, first = self._params.n, len(self._parts) * self._params.n
        tokenizer = self._frontend.tokenizer
        streams = [OutputStream(first + i, tokenizer, self._params, self._shown) for i in range(count)]
        by_output = [*sequences] * (count // len(sequences))
        usage = Usage(prompt_tokens=len(sequences[0].prompt))
        part = _Part(request_id, by_output, streams, usage, count, [None] * count)
        if self._frontend.recorder is not None:
            part.files = files
            scored = self._params.logprobs is not None
            part.outputs = [RecordedOutput([], logprobs=[] if scored else None) for _ in range(count)]
        self._parts.append(part)
        self._open += count
        return first

    # --- for the client

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    async def next(self) -> list[Delta]:
        """What came since the last call, one delta per output; waits only when nothing did. [] is the end.

        Raises `EngineFailure`, `Unavailable` and the like, after everything that came before the failure.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        taken, self._deltas, self._untaken = self._deltas, [], {}
        return merge([_of_prompt(delta) for delta in taken] if self._prompts_only else taken)

    async def whole(self) -> list[Delta]:
        """Every output in full, in order. Raises as `next` does."""
        arrived: list[Delta] = []
        while deltas := await self.next():
            arrived += deltas
        return sorted(merge(arrived), key=lambda delta: delta.index)

    @property
    def usage(self) -> Usage:
        """Of all prompts together, so far."""
        used = [part.usage for part in self._parts]
        timings = self._parts[0].timings if len(used) == 1 else {}
        return Usage(
            prompt_tokens=sum(u.prompt_tokens for u in used),
            cached_tokens=sum(u.cached_tokens for u in used),
            completion_tokens=0 if self._prompts_only else sum(u.completion_tokens for u in used),
            first=timings.get("ttft"),
            queue=timings.get("queue"),
            decode=timings.get("decode"),
        )

    def cancel(self) -> None:
        """Cancel it. No effect after its end."""
        for part in self._parts:
            self._frontend.release(
                [s.id for s, stream in zip(part.sequences, part.streams, strict=True) if not stream.finished]
            )
            self._end(part, "abort" if part.open else None)

    # --- for the frontend

    def fail(self, error: PenstockError) -> None:
        """End it with an error."""
        self._error = error
        for part in self._parts:
            self._frontend.release([s.id for s in part.sequences])
            self._end(part, None)

    def routed(self, index: int, route: str, fingerprint: str = "") -> None:
        """The sequence of an output runs there, on an engine with this fingerprint, if that is known."""
        part = self._parts[index // self._params.n]
        if fingerprint and fingerprint not in part.fingerprints:
            part.fingerprints.append(fingerprint)
        part.routes = [known for known in part.routes if not route.startswith(known)]  # it went on from there
        if not any(known.startswith(route) for known in part.routes):
            part.routes.append(route)

    def interrupted(self, index: int, tokens: int, why: str) -> None:
        """The sequence of an output, which has so many tokens, is to go on elsewhere."""
        number, own = divmod(index, self._params.n)
        self._parts[number].interruptions.append(Interruption(own, tokens, why))

    def receive(self, index: int, output: TokenOutput, now: float) -> None:
        """What a step brought the sequence of an output."""
        if output.hypotheses is not None:
            self._leave_out(index, len(output.hypotheses))
        for i, own in outputs_of(index, output):
            if self._error is None:  # the output before may have exceeded the client's buffer
                self._receive(i, own, now)
        self._tell()

    def _leave_out(self, index: int, found: int) -> None:
        """Outputs for which a beam search has nothing, as no more may follow its prompt."""
        part = self._parts[index // self._params.n]
        for stream in part.streams[found:]:
            stream.finished = True
        part.open -= len(part.streams[found:])
        self._open -= len(part.streams[found:])
        if part.outputs is not None:
            del part.outputs[found:]

    def _tell(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _receive(self, index: int, output: TokenOutput, now: float) -> None:
        number, own = divmod(index, self._params.n)
        part = self._parts[number]
        stream = part.streams[own]
        delta = stream.feed(output)
        self._count(part, own, delta, output, now)
        if part.outputs is not None:
            _keep(part.outputs[own], delta)
            part.embedding = part.embedding if delta.embedding is None else [*delta.embedding]
        self._deltas.append(delta)
        untaken = self._untaken.get(number, 0) + len(delta.tokens)
        if delta.logprobs:
            untaken += sum(len(entry.top) for entry in delta.logprobs)
        self._untaken[number] = untaken
        if untaken > MOST_UNTAKEN:
            self._deltas = []  # the rest is dropped
            self.fail(ClientTooSlow(f"the answer was given up: {untaken} tokens of it waited for its client"))
            return
        if len(self._deltas) >= MOST_DELTAS + self._params.n * len(self._parts):
            self._deltas = merge(self._deltas)
        if stream.finished:
            if part.outputs is not None:
                part.outputs[own].finish_reason, part.outputs[own].stop_reason = delta.finish_reason, delta.stop_reason
            part.open -= 1
            self._open -= 1
            if output.finish is None:  # a stop string ended it, of which the engine knows nothing
                self._frontend.release([part.sequences[own].id])
            if not part.open:
                self._end(part, delta.finish_reason)

    def _count(self, part: _Part, own: int, delta: Delta, output: TokenOutput, now: float) -> None:
        metrics, tokens = self._frontend.metrics, len(delta.tokens)
        if tokens:
            before, part.newest[own] = part.newest[own], now
            part.usage.completion_tokens += tokens
            if before is None:
                part.usage.cached_tokens = max(part.usage.cached_tokens, output.cached_tokens)
                part.timings.setdefault("ttft", now - self._arrival)
                part.first = part.first or now
                metrics.observe_first_token(now - self._arrival)
                before, tokens = now, tokens - 1
            if output.hypotheses is None:
                metrics.observe_inter_token(now - before, tokens)
            else:
                metrics.observe_together(tokens)
        elif output.embedding is not None:
            part.usage.cached_tokens = output.cached_tokens
            part.timings["ttft"] = now - self._arrival  # what its target is about, though no token comes
        if (timing := output.timing) is not None:
            part.timings |= {"queue": timing.queue, "prefill": timing.prefill}
            if (seen := timing.images) is not None:
                part.timings |= {"image_wait": seen.waited, "encode": seen.encoding or None}
            part.preemptions += timing.preemptions
            if output.embedding is None:
                part.timings["decode"] = timing.decode

    # --- at the end

    def _end(self, part: _Part, finish_reason: str | None) -> None:
        """Log and count a prompt, once."""
        self._open -= part.open
        part.open = 0
        self._tell()
        if part.ended:
            return
        part.ended = True
        frontend, usage, asked = self._frontend, part.usage, part.sequences[0]
        last = max((t for t in part.newest if t is not None), default=None)
        steps = usage.completion_tokens // len(part.sequences) - 1
        if last is not None and part.first is not None and steps > 0 and not self._params.use_beam_search:
            part.timings["tpot"] = (last - part.first) / steps
        record = RequestRecord(
            request_id=part.request_id,
            model=self._model,
            instance=",".join(part.routes),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            longest_completion=max(stream.length for stream in part.streams),
            n=len(part.sequences),
            max_tokens=asked.max_tokens,
            finish_reason=finish_reason,
            e2e=frontend.clock.now() - self._arrival,
            preemptions=part.preemptions,
            seed=None if asked.pooling is not None else asked.seed,
            service_class=OFFLINE if asked.offline else ONLINE,
            slo_met=None if finish_reason == "abort" else self._met_targets(part),
            status=http_row(self._error)[0] if self._error else CLIENT_LEFT if finish_reason == "abort" else 200,
            **part.timings,
        )
        frontend.metrics.observe_request(record)
        log_request(record, frontend.log_format)
        if self._trace is not None:
            self._trace.prompt_ended(record, self._params)
        if frontend.recorder is not None and part.outputs is not None:
            failure = str(self._error or "") or ("the client left" if finish_reason == "abort" else "")
            digests = [file_digest(file) for file in part.files]
            recorded = self._recorded(part, part.outputs, digests, failure, frontend.recorder)
            frontend.recorder.add(recorded, dict(zip(digests, part.files, strict=True)))

    def _recorded(
        self,
        part: _Part,
        outputs: list[RecordedOutput],
        files: Sequence[str],
        failure: str,
        recorder: RequestRecorder,
    ) -> RecordedRequest:
        """A prompt and what came of it, to run it again."""
        asked = part.sequences[0]
        embeds = asked.pooling is not None
        return RecordedRequest(
            version=VERSION,
            id=part.request_id,
            at=recorder.since_1970(self._arrival),
            seconds=self._frontend.clock.now() - self._arrival,
            model=self._model,
            prompt=asked.prompt,
            params=recorded_params(self._params),
            max_tokens=asked.max_tokens,
            outputs=[] if embeds else outputs,
            fingerprints=part.fingerprints,
            seed=None if embeds else asked.seed,
            priority=asked.priority,
            ttft_ms=asked.ttft_ms,
            tpot_ms=asked.tpot_ms,
            offline=asked.offline,
            pooling=asked.pooling,
            embedding=part.embedding,
            instance=",".join(part.routes),
            interruptions=part.interruptions,
            media=[RecordedMedia(s.kind, s.start, s.length, f) for s, f in zip(asked.media, files, strict=True)],
            failure=failure,
        )

    def _met_targets(self, part: _Part) -> bool | None:
        """Whether it met its targets; None without targets. A failed request has missed them."""
        asked = part.sequences[0]
        if asked.ttft_ms is None and asked.tpot_ms is None:
            return None
        ttft, tpot = part.timings.get("ttft"), part.timings.get("tpot")
        if self._error is not None or ttft is None:
            return False
        in_time = asked.ttft_ms is None or ttft * 1e3 <= asked.ttft_ms
        return in_time and (asked.tpot_ms is None or tpot is None or tpot * 1e3 <= asked.tpot_ms)


def _keep(output: RecordedOutput, delta: Delta) -> None:
    """What a record has of it."""
    output.tokens.extend(delta.tokens)
    if output.logprobs is not None and delta.logprobs:
        output.logprobs.extend([max(entry.chosen, LOWEST) for entry in delta.logprobs])


def merge(deltas: list[Delta]) -> list[Delta]:
    """One delta per output, in the order of their first ones."""
    if len(deltas) == 1:
        return deltas
    by_output: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_output.setdefault(delta.index, []).append(delta)
    return [_joined(parts) for parts in by_output.values()]


def _joined(parts: list[Delta]) -> Delta:
    last = parts[-1]
    wants_logprobs = any(part.logprobs is not None for part in parts)
    return Delta(
        index=last.index,
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[entry for part in parts for entry in part.logprobs or ()] if wants_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        embedding=last.embedding,
    )


def _of_prompt(delta: Delta) -> Delta:
    """What it says of the prompt, and whether that was all."""
    return Delta(
        delta.index,
        "",
        [],
        None if delta.logprobs is None else [],
        None if delta.finish_reason is None else FinishReason.LENGTH.value,
        prompt_logprobs=delta.prompt_logprobs,
    )
