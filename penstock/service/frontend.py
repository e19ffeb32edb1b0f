"""The frontend: owns the clients' requests, tokenises, has sequences placed and run, and detokenises."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import (
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
    Unavailable,
    UnsupportedField,
)
from penstock.core.memory import give_back_memory
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import MediaSpan, Pooling, Request
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import NO_LEVEL, ServiceLevel
from penstock.core.structured_outputs import FIELD, StructuredOutputs
from penstock.core.wire.engine import Ready
from penstock.core.wire.master import History
from penstock.kv.keys import extend_keys, salted
from penstock.media.loader import MediaLoader
from penstock.obs.logs import Format
from penstock.obs.metrics import Metrics
from penstock.sched.steptime import StepTime
from penstock.service.checkpoint import GenerationDefaults
from penstock.service.dispatcher import Instance
from penstock.service.embedding import LAST_TOKEN, EmbeddingDefaults
from penstock.service.engine_client import TICK, EngineClient
from penstock.service.flight import Flight
from penstock.service.generation import Generation
from penstock.service.history import shown_time
from penstock.service.intake import ModelLimits, make_embedding, make_sequences
from penstock.service.queue import OfflineWork
from penstock.service.request_recorder import RequestRecorder
from penstock.text import grammar
from penstock.text.dialect import PLAIN, Dialect
from penstock.text.tokenizer import Tokenizer

MAX_REQUESTS = 4096
AT_ONCE = 2048  # characters or tokens up to which a thread costs more than it saves
LONG_TEXT = 1 << 18  # bytes from which texts are tokenised one after another, beside the others
MAX_CHECKING = 64  # grammars that are checked or wait for it
GRAMMARS_KEPT = 1024  # that were found good
MAX_TEXT_BYTES = 1 << 26  # of texts that are being tokenised or wait for it
CACHES_QUEUED = 4  # default limit of queued prompt tokens, in sizes of the KV caches
MOST_SECONDS = 120.0  # upper bound of Retry-After
SLEEPS_FOR = 10.0  # seconds, the Retry-After while engines sleep: nobody knows when they are woken up
ASLEEP = "sleeping: POST /wake_up has it serve again"


class Frontend:
    """Serves one model through any number of engines.

    Args:
        tokenizer: the model's.
        served_names: what clients may call the model; the first is its name in answers.
        defaults: of the checkpoint.
        engine_client: to the engines.
        rng: seeds of requests that bring none.
        max_requests: sequences held at once, running and waiting; one more is refused.
        max_queued_tokens: of prompts that wait for their first token; None is a few times what the KV caches hold.
        embedding: how prompts are embedded.
        recorder: of requests that have ended, which is closed with it; None records nothing.
        dialect: how the model writes tool calls and reasoning.
        media: loads images and videos; None where the model sees none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        served_names: list[str],
        defaults: GenerationDefaults,
        engine_client: EngineClient,
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
        log_format: Format = "text",
        max_requests: int = MAX_REQUESTS,
        max_queued_tokens: int | None = None,
        embedding: EmbeddingDefaults = LAST_TOKEN,
        recorder: RequestRecorder | None = None,
        dialect: Dialect = PLAIN,
        media: MediaLoader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.dialect = dialect
        self.media = media
        self.served_names = served_names
        self.default_sampling = defaults.sampling
        self.embedding = embedding
        self.created = int(time.time())
        self.engine_client = engine_client
        self._dispatcher = engine_client.dispatcher
        self.metrics = metrics
        self.clock = clock
        self.log_format = log_format
        self.recorder = recorder
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self._encoding = 0  # texts under way to token ids
        self._encoding_bytes = 0  # of them
        self._eos_ids = defaults.eos_ids
        self._rng = rng
        self._closed = False
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        self._long_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text")  # so it takes no other's
        self._grammar_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._grammars: OrderedDict[StructuredOutputs, None] = OrderedDict()  # that were found good, the newest last
        self._checking = 0  # that are looked at or wait for it

    # --- start and end

    def start(self) -> None:
        """Start receiving from the engines; call it inside the event loop."""
        self.engine_client.start()

    async def wait_ready(self) -> None:
        """Returns once an engine can serve."""
        while not self.ready:
            self.engine_client.changed.clear()
            with contextlib.suppress(TimeoutError):  # the master may start last; check again after a while
                async with asyncio.timeout(TICK):
                    await self.engine_client.changed.wait()

    async def close(self) -> None:
        """Stop receiving; running requests end with an error and are cancelled at the engines."""
        self.end_all(Unavailable("the server is shutting down"))
        self._closed = True
        await self.engine_client.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)
        for workers in (self._workers, self._long_worker, self._grammar_worker):
            workers.shutdown(wait=False, cancel_futures=True)
        if self.media is not None:
            self.media.close()

    def end_all(self, error: PenstockError) -> None:
        """End every request with an error."""
        for generation in {id(f.owner): f.owner for f in self.engine_client.flights.values()}.values():
            generation.fail(error)

    # --- what it is, and how it does

    @property
    def ready(self) -> bool:
        now = self.clock.now()
        return self.healthy and any(instance.well(now) for instance in self._instances)

    @property
    def healthy(self) -> bool:
        return not self.unhealthy_reason

    @property
    def unhealthy_reason(self) -> str:
        """Why nothing can be served although it should be; "" while engines are only starting."""
        if self._closed:
            return "the server is shutting down"
        now = self.clock.now()
        if any(instance.up(now) for instance in self._instances):
            return self._dispatcher.trouble
        troubles = {i.name: i.trouble(now) for i in self._instances if i.trouble(now)}
        if len(troubles) == len(self._instances) and len(set(troubles.values())) == 1:  # one cause for all
            return next(iter(troubles.values()))
        return "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())

    @property
    def requests(self) -> int:
        """How many are served now."""
        return len({id(flight.owner) for flight in self.engine_client.flights.values()})

    def instance_states(self) -> list[dict[str, str]]:
        """For operators: every instance's name, role and state, and its trouble, if any."""
        now = self.clock.now()
        return [
            {"name": i.name, "role": i.role, "state": i.state(now), "trouble": i.trouble(now)} for i in self._instances
        ]

    async def overview(self) -> dict[str, Any]:
        """How the deployment does, as the master and this frontend see it; plain values, which `penstock top` shows.
        Raises Unavailable when the master does not answer."""
        master = msgspec.to_builtins(await self.engine_client.overview())
        del master["type"], master["number"]
        return {
            "at": shown_time(time.time()),
            "model": self.served_names[0],
            "frontend": {
                "sequences": self._dispatcher.queue.held,
                "queued_tokens": self._dispatcher.queue.tokens,
                "generated_tokens": self.metrics.generated_tokens,
                "attainment": self.metrics.attainment(),
                "latency": self.metrics.latency(),
                "prefixes": self.metrics.prefixes(),
                "troubles": {i["name"]: i["trouble"] for i in self.instance_states() if i["trouble"]},
            },
            "master": master,
        }

    async def history(self, request: str) -> History:
        """What the master remembers of a request. Raises Unavailable when it does not answer."""
        return await self.engine_client.history(request)

    @property
    def max_model_len(self) -> int:
        """The least of all engines; 0 until one has been ready."""
        return min((said.max_model_len for said in self._said), default=0)

    @property
    def vocab_size(self) -> int:
        return min((said.vocab_size for said in self._said), default=0)

    @property
    def embedding_size(self) -> int:
        """Numbers in an embedding; 0 where some engine gives none."""
        return min((said.embedding_size for said in self._said), default=0)

    @property
    def fingerprint(self) -> str | None:
        """What all engines have in common on which their tokens depend: checkpoint, types of weights and KV. None while
        they differ, or are not known."""
        roots = {said.root_key.hex() for said in self._said}
        return roots.pop() if len(roots) == 1 else None

    @property
    def modelled(self) -> dict[str, int] | None:
        """When every engine is modelled: the first and the last token id that they sample."""
        sampled = {said.sampled_ids for said in self._said}
        if len(sampled) != 1 or None in sampled:
            return None
        ((first, last),) = (ids for ids in sampled if ids is not None)
        return {"first_token_id": first, "last_token_id": last}

    @property
    def modelled_some(self) -> bool:
        """Whether some engine is modelled, which has no logits."""
        return any(one.sampled_ids is not None for one in self._said)

    @property
    def _instances(self) -> Collection[Instance]:
        return self.engine_client.instances.values()

    @property
    def _said(self) -> list[Ready]:
        """What each engine reported, in this incarnation or the last."""
        return [instance.said for instance in self._instances if instance.said is not None]

    def check_ready(self) -> None:
        """Raises `Unavailable` when a request would not be served now; the model's sizes may not be known then."""
        if not self.ready:
            if self.healthy and self.asleep:
                raise Unavailable(ASLEEP, SLEEPS_FOR)
            raise Unavailable(f"not ready: {self.unhealthy_reason or 'starting'}")

    def check_known(self) -> None:
        """The same of what needs the model's sizes alone, which are known of engines that sleep too."""
        if not (self.healthy and self.asleep):
            self.check_ready()

    @property
    def asleep(self) -> bool:
        """Whether all engines sleep, or are about to."""
        return self.engine_client.asleep

    def served_model(self, name: str | None) -> str:
        """The name to answer under: that which the client used, if it used one."""
        return name or self.served_names[0]

    # --- text, off the event loop unless it is short

    async def encode(self, text: str, add_special_tokens: bool, max_model_len: int | None = None) -> list[int]:
        """See `Tokenizer.encode`. Raises Overloaded when too much text waits for the tokenizer already."""
        if len(text) <= AT_ONCE:
            return self.tokenizer.encode(text, add_special_tokens)
        size = len(text.encode("utf-8", "replace"))
        return await self._encode(size, self.tokenizer.encode, text, add_special_tokens, max_model_len)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        size: int,
        add_special_tokens: bool = False,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None,
        max_model_len: int | None = None,
    ) -> list[int]:
        """See `Tokenizer.encode_chat`.

        Args:
            size: bytes of what the client sent, at least those of the messages.

        Raises:
            InvalidRequest: there are more messages than tokens in the longest sequence.
            Overloaded: too much text waits for the tokenizer already.
        """
        if len(messages) > self.max_model_len:
            raise InvalidRequest(
                f"messages: {len(messages)} messages, at most {self.max_model_len} are allowed, one for each token of "
                "this model's maximum context length",
                "messages",
            )

        def encode() -> list[int]:
            return self.tokenizer.encode_chat(
                messages,
                add_special_tokens=add_special_tokens,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
                max_model_len=max_model_len,
            )

        return await self._encode(size, encode)

    async def _encode(self, size: int, function: Callable[..., list[int]], *args: Any) -> list[int]:
        """Tokenise a text of so many bytes in a thread. Raises Overloaded when too much waits for that already."""
        if self._encoding >= self._max_requests:
            raise self._overloaded(f"the queue is full: {self._encoding} prompts wait to be tokenised", retry_after=1.0)
        share = min(size, MAX_TEXT_BYTES // 2)  # so that a text of any size finds room some time
        if self._encoding_bytes + share > MAX_TEXT_BYTES:
            raise self._overloaded(
                f"the queue is full: {self._encoding_bytes} bytes of text wait to be tokenised, at most "
                f"{MAX_TEXT_BYTES} are allowed",
                retry_after=1.0,
            )
        self._encoding += 1
        self._encoding_bytes += share
        if size < LONG_TEXT:
            job = self._workers.submit(function, *args)
        else:
            job = self._long_worker.submit(_and_give_back, function, *args)
        # not when its client leaves, but when the thread is through with it, or before that thread took it up
        job.add_done_callback(partial(self._encoded, asyncio.get_running_loop(), share))
        try:
            return await asyncio.wrap_future(job)
        finally:
            del job  # it holds its error, and that this frame: a cycle, which would keep the text for long

    def _encoded(self, loop: asyncio.AbstractEventLoop, share: int, job: Future[list[int]]) -> None:
        def count() -> None:
            self._encoding -= 1
            self._encoding_bytes -= share

        if not loop.is_closed():
            loop.call_soon_threadsafe(count)

    async def check_grammar(self, params: SamplingParams) -> None:
        """Raises InvalidRequest when its structured outputs cannot be had, Overloaded when too many are looked at."""
        wanted = params.structured_outputs
        if wanted is None:
            return
        if self.modelled_some:
            raise UnsupportedField("structured_outputs: engines of modelled devices have no logits to mask", FIELD)
        if wanted not in self._grammars:
            if self._checking >= MAX_CHECKING:
                raise self._overloaded(
                    f"the queue is full: {self._checking} grammars wait to be checked", retry_after=1.0
                )
            self._checking += 1
            try:
                await asyncio.get_running_loop().run_in_executor(self._grammar_worker, grammar.check, wanted)
            finally:
                self._checking -= 1
        self._grammars[wanted] = None
        self._grammars.move_to_end(wanted)
        if len(self._grammars) > GRAMMARS_KEPT:
            self._grammars.popitem(last=False)

    async def decode(self, tokens: list[int]) -> str:
        """All of the text, special tokens too."""
        return await self._in_thread(self.tokenizer.decode, tokens, False)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

    # --- requests

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        model: str | None = None,
        level: ServiceLevel = NO_LEVEL,
        arrival: float | None = None,
        cache_salt: str = "",
        prompts_only: bool = False,
        prediction: Sequence[int] = (),
        pooling: Pooling | None = None,
        shown: frozenset[int] = frozenset(),
        media: tuple[MediaSpan, ...] = (),
        pixels: tuple[bytes, ...] = (),
        files: tuple[bytes, ...] = (),
    ) -> Generation:
        """Have a request run.

        Args:
            prompts: token ids, of at least one prompt.
            request_id: for logs; need not be unique.
            model: which of its served names the client used, for logs; None for the first.
            level: targets, priority, and whether it is offline work.
            arrival: when the request came in, by `clock`; TTFT counts from there. None is now.
            cache_salt: cached prefixes are shared among requests with the same one.
            prompts_only: see `Generation`.
            prediction: see `Request`.
            pooling: embed the prompts; None generates.
            shown: special tokens that are part of the texts all the same.
            media, pixels: of a single prompt; see `Request`. files: the same as they came, for the record.

        Raises, and then nothing of it runs:
            InvalidRequest, PromptTooLong: it cannot be served, ever.
            Unavailable: it cannot be served now.
            Overloaded: too many are held already.
        """
        self.check_ready()
        said = self._said
        if params.use_beam_search and self.modelled_some:
            raise InvalidRequest("use_beam_search: true, engines of modelled devices do not search", "use_beam_search")
        self._check_task(pooling)
        limits = ModelLimits(
            self.max_model_len,
            self.vocab_size,
            self._eos_ids,
            max_sequences=min(one.max_sequences for one in said),
            search_blocks=min(one.search_blocks or one.num_blocks for one in said),
        )
        bad_words = self.tokenizer.encode_bad_words(params.bad_words) if params.bad_words else ()
        arrival = self.clock.now() if arrival is None else arrival
        generation = Generation(self, params, arrival, model or self.served_names[0], prompts_only, shown)
        outputs = 1 if params.use_beam_search else params.n
        self._check_queue([len(prompt) for prompt in prompts], outputs)
        made = []
        try:
            for i, prompt in enumerate(prompts):
                part_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
                unique = f"{part_id}-{secrets.token_hex(4)}"
                if pooling is not None:
                    one = make_embedding(unique, prompt, params, pooling, limits, level, cache_salt=cache_salt)
                    sequences = [one]
                else:
                    sequences = make_sequences(
                        unique,
                        prompt,
                        params,
                        limits,
                        self._rng,
                        level,
                        bad_words=bad_words,
                        cache_salt=cache_salt,
                        prediction=prediction,
                    )
                if media:
                    sequences = [replace(sequence, media=media, pixels=pixels) for sequence in sequences]
                first = generation.add(part_id, sequences, files)
                if params.structured_outputs is not None:
                    self.metrics.observe_structured(params.structured_outputs.kind)
                made.append([Flight(generation, s, arrival, level.chat, first + j) for j, s in enumerate(sequences)])
            for flights in made:
                self._dispatcher.add(flights)
                self._find_places(flights)
        except BaseException:
            generation.cancel()
            raise
        return generation

    def _check_task(self, pooling: Pooling | None) -> None:
        """Raises `InvalidRequest` when the engines do not do this."""
        if pooling is not None and not self.embedding_size:
            raise InvalidRequest("input: the engines here give no embeddings", "input")
        if pooling is None and not all(one.generates for one in self._said):
            raise InvalidRequest("model: it was saved without a head to generate with, use /v1/embeddings", "model")

    def _find_places(self, flights: Sequence[Flight[Generation]]) -> None:
        request = flights[0].request  # the others have the same prompt
        if not self._dispatcher.wants_keys or len(request.prompt) < BLOCK_TOKENS or request.reads_all:
            self._dispatcher.find_places(flights)
            return
        root = salted(self._said[0].root_key, request.cache_salt)
        if len(request.prompt) <= AT_ONCE:
            self._place(flights, _prefix_keys(root, request))
            return
        hashing = asyncio.get_running_loop().run_in_executor(self._workers, _prefix_keys, root, request)
        hashing.add_done_callback(partial(self._hashed, flights))

    def _check_queue(self, prompts: Sequence[int], outputs: int) -> None:
        """A request is taken as a whole or not at all. One with more prompt tokens than the whole queue is accepted
        when nothing else waits.

        Args:
            prompts: tokens of each.
            outputs: of each prompt.

        Raises:
            InvalidRequest: it has more sequences than are ever held.
            Overloaded: the queue is full for it.
        """
        count, queued = self._dispatcher.queue.held, self._dispatcher.queue.tokens
        sequences = len(prompts) * outputs
        if sequences > self._max_requests:
            field = "n" if outputs > 1 else "prompt"
            raise InvalidRequest(
                f"{field}: {len(prompts)} prompts with {outputs} outputs each are {sequences} sequences, at most "
                f"{self._max_requests} are allowed in all requests together",
                field,
            )
        if count + sequences > self._max_requests:
            raise self._overloaded(
                f"the queue is full: {count} sequences, at most {self._max_requests} are allowed",
                retry_after=self._seconds_until(count + sequences - self._max_requests),
            )
        limit = self._queue_limit
        if queued and queued + sum(prompts) * outputs > limit:
            raise self._overloaded(
                f"the queue is full: {queued} prompt tokens wait for their first token, at most {limit} are allowed",
                retry_after=self._seconds_until(0),
            )

    def _overloaded(self, message: str, retry_after: float) -> Overloaded:
        self.metrics.observe_rejection()
        return Overloaded(message, retry_after=retry_after)

    @property
    def _queue_limit(self) -> int:
        """Of prompt tokens."""
        if self._max_queued_tokens is not None:
            return self._max_queued_tokens
        return CACHES_QUEUED * BLOCK_TOKENS * sum(said.num_blocks for said in self._said)

    @property
    def offline(self) -> OfflineWork:
        """What is held of offline work."""
        return self._dispatcher.queue.offline

    @property
    def offline_room(self) -> int:
        """Sequences of batches that may be added: half of what may be held is left to others."""
        queue = self._dispatcher.queue
        if 2 * queue.tokens > self._queue_limit:
            return 0
        return self._max_requests // 2 - queue.held

    def _seconds_until(self, ends: int) -> float:
        """Seconds until all queued prompts have their first token and so many sequences have ended, by the measured
        rates, or by predicted ones when nothing was measured."""
        now, queue = self.clock.now(), self._dispatcher.queue
        prefilling = queue.prefill_rate.rate(now) or sum(_predicted_rate(said) for said in self._said)
        completing = queue.completion_rate.rate(now)
        seconds = max(
            queue.tokens / prefilling if prefilling else 1.0,
            ends / completing if completing else 1.0,
        )
        return min(max(1.0, seconds), MOST_SECONDS)

    def _hashed(self, sequences: Sequence[Flight[Generation]], hashing: asyncio.Future[list[bytes]]) -> None:
        if not hashing.cancelled():  # else the frontend is closed, and they are over
            self._place(sequences, hashing.result())

    def _place(self, sequences: Sequence[Flight[Generation]], keys: list[bytes]) -> None:
        for flight in sequences:
            flight.keys = keys
        self._dispatcher.find_places(sequences)

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Remove sequences and cancel them at the engines."""
        self._dispatcher.release(sequence_ids)


def _predicted_rate(said: Ready) -> float:
    """Prompt tokens per second of an engine, predicted from its device; 0 when unknown."""
    if said.device_model is None or said.shape is None:
        return 0.0
    milliseconds = StepTime(said.device_model, said.shape).prefill_ms(said.token_budget, budget=said.token_budget)
    return 1e3 * said.token_budget / milliseconds if milliseconds else 0.0


def _and_give_back(function: Callable[..., list[int]], *args: Any) -> list[int]:
    try:
        return function(*args)
    finally:
        give_back_memory()


def _prefix_keys(root: bytes, request: Request) -> list[bytes]:
    """Of the prompt's full blocks."""
    keys: list[bytes] = []
    extend_keys(keys, root, request.prompt, len(request.prompt) // BLOCK_TOKENS, request.media)
    return keys


class Models:
    """
    Args:
        frontends: one for each model; no name is served by two.

    Attributes:
        draining: whether the server is draining: running requests continue, new ones are refused.
    """

    def __init__(self, frontends: Sequence[Frontend]) -> None:
        self.frontends = frontends
        self.draining = False

    @property
    def names(self) -> list[str]:
        """That clients may use, of all."""
        return [name for frontend in self.frontends for name in frontend.served_names]

    def of(self, name: str | None) -> Frontend:
        """The one that serves the model of this name; without a name, the only one.

        Raises:
            ModelNotFound: there is none of this name.
            InvalidRequest: there are several, and none is named.
        """
        if name is None and len(self.frontends) > 1:
            raise InvalidRequest(f"model: missing, allowed are {', '.join(self.names)}", "model")
        for frontend in self.frontends:
            if name is None or name in frontend.served_names:
                return frontend
        raise ModelNotFound(f"model: {name!r} is not served here, allowed is {', '.join(self.names)}", "model")

    def asked(self, name: str | None) -> Sequence[Frontend]:
        """The one that serves the model of this name; without a name, all. Raises ModelNotFound."""
        return self.frontends if name is None else [self.of(name)]


def check_any(frontends: Sequence[Frontend], check: Callable[[Frontend], None]) -> None:
    """Raises Unavailable when each of them raises that: with what is wrong, and where it is several, of which model."""
    troubles: dict[str, Unavailable] = {}
    for frontend in frontends:
        try:
            return check(frontend)
        except Unavailable as trouble:
            troubles[frontend.served_names[0]] = trouble
    if len(troubles) == 1:
        raise next(iter(troubles.values()))
    told = "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())
    raise Unavailable(told, min(trouble.retry_after for trouble in troubles.values()))
