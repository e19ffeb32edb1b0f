"""The owner of the clients' requests: tokenises, hands sequences to the engine, turns its tokens into text."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import EngineFailure, InvalidRequest, Overloaded, PenstockError, Unavailable, http_row
from penstock.core.messages import Cancel, Command, Enqueue, Event, Failed, Hello, Ready, Refused, Shutdown, StepReport
from penstock.core.request import FinishReason, Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.obs.logs import Format, RequestRecord, log_request
from penstock.obs.metrics import Metrics
from penstock.service.checkpoint import GenerationDefaults
from penstock.service.intake import ModelLimits, make_sequences
from penstock.service.output import Delta, OutputStream, Usage
from penstock.text.tokenizer import Tokenizer

log = logging.getLogger("penstock.frontend")
CLIENT_LEFT = 499  # in the log, where others write it too
MAX_REQUESTS = 4096
STUCK_AFTER = 60.0  # seconds without a sign of life from the engine


class Link(Protocol):
    """What a frontend needs of its wire to an engine."""

    def send(self, command: Command) -> None: ...
    async def receive(self) -> Event: ...
    def close(self) -> None: ...


class Frontend:
    """Serves one model through one engine.

    Args:
        tokenizer: the model's.
        served_names: what clients may call the model; the first is its name in answers.
        defaults: of the checkpoint.
        link: to the engine.
        rng: seeds of requests that bring none.
        max_requests: sequences held at once, running and waiting; one more is refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        served_names: list[str],
        defaults: GenerationDefaults,
        link: Link,
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
        log_format: Format = "text",
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self.tokenizer = tokenizer
        self.served_names = served_names
        self.default_sampling = defaults.sampling
        self.created = int(time.time())
        self.max_model_len = self.vocab_size = 0  # until the engine is ready
        self.metrics = metrics
        self.clock = clock
        self.log_format = log_format
        self._max_requests = max_requests
        self._ended_at = clock.now()
        self._pace = 0.0  # seconds from one sequence's end to the next, lately
        self._eos_ids = defaults.eos_ids
        self._link = link
        self._rng = rng
        self._limits: ModelLimits | None = None
        self._lost = ""
        self._heard = clock.now()
        self._generations: dict[str, tuple[Generation, int]] = {}  # sequence id -> whose it is, and which output
        self._became_ready = asyncio.Event()
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        self._pump: asyncio.Task[None] | None = None

    # --- life

    def start(self) -> None:
        """Begin to listen to the engine; call it inside the event loop."""
        self._link.send(Hello())
        self._pump = asyncio.create_task(self._listen())

    async def wait_ready(self) -> None:
        """Returns once the engine can serve. Raises Unavailable when it is lost before that."""
        await self._became_ready.wait()
        if self._lost:
            raise Unavailable(self._lost)

    async def close(self) -> None:
        """Stop listening and have the engine stop; whatever still runs is ended with an error."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self.end_all(Unavailable("the server is shutting down"))
        self._lost = self._lost or "the server is shutting down"
        self._link.send(Shutdown())
        self._link.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def engine_lost(self, reason: str) -> None:
        """The engine is gone: end every request with an error, and say so in /health."""
        self._lost = self._lost or reason
        self._became_ready.set()
        self.end_all(EngineFailure(f"the engine failed during this request: {reason}"))

    def end_all(self, error: PenstockError) -> None:
        """End every request with an error."""
        for generation in {id(g): g for g, _ in self._generations.values()}.values():
            generation.fail(error)

    @property
    def lost(self) -> bool:
        """Whether the engine is gone for good."""
        return bool(self._lost)

    @property
    def ready(self) -> bool:
        return self._limits is not None and self.healthy

    @property
    def healthy(self) -> bool:
        return not self.unhealthy_reason

    @property
    def unhealthy_reason(self) -> str:
        if self._lost:
            return self._lost
        silent = self.clock.now() - self._heard
        if self._limits is not None and silent > STUCK_AFTER:
            return f"no sign of life from the engine for {silent:.0f} s"
        return ""

    # --- text, off the event loop

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self._in_thread(self.tokenizer.encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, template_kwargs: dict[str, Any] | None
    ) -> list[int]:
        def encode() -> list[int]:
            return self.tokenizer.encode_chat(
                messages, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
            )

        return await self._in_thread(encode)

    async def decode(self, tokens: list[int]) -> str:
        """All of the text, special tokens too."""
        return await self._in_thread(self.tokenizer.decode, tokens, False)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

    # --- requests

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        arrival: float | None = None,
    ) -> Generation:
        """Hand a request to the engine.

        Args:
            prompt: token ids.
            request_id: for logs; need not be unique.
            priority: lower runs first.
            arrival: when the request came in, by `clock`; TTFT counts from there. None is now.

        Raises:
            InvalidRequest, PromptTooLong: it cannot be served, ever.
            Unavailable: it cannot be served now.
            Overloaded: too many are held already.
        """
        if not self.ready or self._limits is None:
            raise Unavailable(self.unhealthy_reason or "the model is still loading")
        over = len(self._generations) + params.n - self._max_requests
        if over > 0:
            raise Overloaded(
                f"the queue is full: {len(self._generations)} sequences, at most {self._max_requests} are allowed",
                retry_after=min(max(1.0, over * self._pace), 60.0),
            )
        sequence_id = self._unique(request_id)
        sequences = make_sequences(sequence_id, prompt, params, self._limits, self._rng, priority)
        generation = Generation(self, request_id, sequences, params, self.clock.now() if arrival is None else arrival)
        for index, sequence in enumerate(sequences):
            self._generations[sequence.id] = (generation, index)
            self._link.send(Enqueue(sequence))
        return generation

    def _unique(self, request_id: str) -> str:
        return f"{request_id}-{self._rng.getrandbits(32):08x}"

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences that are not wanted any longer, and have the engine drop them."""
        held = [s for s in sequence_ids if self._generations.pop(s, None) is not None]
        if held and not self._lost:
            self._link.send(Cancel(held))

    # --- the engine's events

    async def _listen(self) -> None:
        try:
            while True:
                self._handle(await self._link.receive())
        except msgspec.DecodeError as error:
            self.engine_lost(f"a message from the engine could not be read: {error}")
        except Exception as error:  # nobody else would notice
            log.exception("the frontend failed")
            self.engine_lost(f"the frontend failed: {type(error).__name__}")

    def _handle(self, event: Event) -> None:
        self._heard = self.clock.now()
        match event:
            case StepReport():
                self.metrics.observe_stats(event.stats, event.step_tokens)
                for output in event.outputs:
                    self._deliver(output)
            case Ready():
                self._greet(event)
            case Refused(request_id=request_id, message=message):
                held = self._generations.pop(request_id, None)
                if held is not None:
                    held[0].fail(InvalidRequest(message))
            case Failed(message=message):
                self.engine_lost(message)

    def _greet(self, ready: Ready) -> None:
        self.max_model_len, self.vocab_size = ready.max_model_len, ready.vocab_size
        self._limits = ModelLimits(ready.max_model_len, ready.vocab_size, self._eos_ids)
        self._became_ready.set()

    def _deliver(self, output: TokenOutput) -> None:
        held = self._generations.get(output.request_id)
        if held is None:
            return  # cancelled while the step ran
        generation, index = held
        if output.finish is not None:
            del self._generations[output.request_id]
            self._pace += 0.1 * (self._heard - self._ended_at - self._pace)
            self._ended_at = self._heard
        try:
            if output.finish is FinishReason.ERROR:
                raise EngineFailure("the model computed something that is no number for this request")
            generation.receive(index, output, self._heard)
        except EngineFailure as error:
            generation.fail(error)
        except Exception:  # of this one request: the others go on
            log.exception("request %s failed", output.request_id)
            generation.fail(EngineFailure("the answer could not be put together"))


class Generation:
    """The outputs of one request, as an async iterator of deltas, all outputs interleaved.

    Ends when every output has ended or the request was cancelled; raises what the engine's loss brought.

    Attributes:
        usage: grows with the deltas.
    """

    def __init__(
        self, frontend: Frontend, request_id: str, sequences: list[Request], params: SamplingParams, arrival: float
    ) -> None:
        self.usage = Usage(prompt_tokens=len(sequences[0].prompt))
        self._frontend = frontend
        self._request_id = request_id
        self._sequences = sequences
        self._streams = [OutputStream(i, frontend.tokenizer, params) for i in range(len(sequences))]
        self._open = len(sequences)
        self._deltas: deque[Delta] = deque()
        self._error: PenstockError | None = None
        self._wake: asyncio.Future[None] | None = None
        self._arrival = arrival
        self._first: float | None = None
        self._newest: list[float | None] = [None] * len(sequences)
        self._tpots: list[float] = []
        self._record: dict[str, Any] = {}
        self._recorded = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self._deltas.popleft()

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

    def receive(self, index: int, output: TokenOutput, now: float) -> None:
        """What a step brought; called by the frontend."""
        stream = self._streams[index]
        delta = stream.feed(output)
        self._count(index, delta, output, now)
        self._deltas.append(delta)
        if stream.finished:
            self._open -= 1
            if output.finish is None:  # a stop string ended it, of which the engine knows nothing
                self._frontend.release([self._sequences[index].id])
            if not self._open:
                self._end(delta.finish_reason)
        self._rouse()

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
            metrics.observe_inter_token(now - before, tokens)
        if output.timing is not None:
            self._record |= {
                "queue": output.timing.queue,
                "prefill": output.timing.prefill,
                "decode": output.timing.decode,
            }

    def _end(self, finish_reason: str | None) -> None:
        """Log and count the request, once."""
        self._open = 0
        self._rouse()
        if self._recorded:
            return
        self._recorded = True
        frontend, usage = self._frontend, self.usage
        last = max((t for t in self._newest if t is not None), default=None)
        steps = usage.completion_tokens // len(self._sequences) - 1
        if last is not None and self._first is not None and steps > 0:
            self._record["tpot"] = (last - self._first) / steps
        record = RequestRecord(
            request_id=self._request_id,
            model=frontend.served_names[0],
            instance="engine-0",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=finish_reason,
            e2e=frontend.clock.now() - self._arrival,
            seed=self._sequences[0].seed,
            status=http_row(self._error)[0] if self._error else CLIENT_LEFT if finish_reason == "abort" else 200,
            **self._record,
        )
        frontend.metrics.observe_request(record)
        log_request(record, frontend.log_format)

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
