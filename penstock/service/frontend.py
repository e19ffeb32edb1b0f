"""The owner of the clients' requests: tokenises, has sequences placed, sends them to engines, and turns tokens into
text."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from penstock.core.clock import Clock
from penstock.core.errors import Overloaded, PenstockError, Unavailable
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import NO_LEVEL, ServiceLevel
from penstock.core.wire.engine import Ready
from penstock.kv.keys import extend_keys
from penstock.obs.logs import Format
from penstock.obs.metrics import Metrics
from penstock.service.checkpoint import GenerationDefaults
from penstock.service.flight import Flight
from penstock.service.generation import Generation
from penstock.service.instances import Instance
from penstock.service.intake import ModelLimits, make_sequences
from penstock.service.traffic import TICK, Held, Traffic
from penstock.text.tokenizer import Tokenizer

MAX_REQUESTS = 4096


class Frontend:
    """Serves one model through any number of engines.

    Args:
        tokenizer: the model's.
        served_names: what clients may call the model; the first is its name in answers.
        defaults: of the checkpoint.
        traffic: to the engines.
        rng: seeds of requests that bring none.
        max_requests: sequences held at once, running and waiting; one more is refused.

    Attributes:
        draining: whether the server is about to end. What it has begun goes on; what is new is refused at its edge.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        served_names: list[str],
        defaults: GenerationDefaults,
        traffic: Traffic,
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
        self.traffic = traffic
        self.metrics = metrics
        self.clock = clock
        self.log_format = log_format
        self.draining = False
        self._max_requests = max_requests
        self._eos_ids = defaults.eos_ids
        self._rng = rng
        self._closed = False
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    # --- life

    def start(self) -> None:
        """Begin to listen to the engines; call it inside the event loop."""
        self.traffic.start()

    async def wait_ready(self) -> None:
        """Returns once an engine can serve. Raises Unavailable when all are lost before that."""
        while not (self.ready or self.lost):
            self.traffic.changed.clear()
            with contextlib.suppress(TimeoutError):  # the master may be the last to come, and time passes by itself
                async with asyncio.timeout(TICK):
                    await self.traffic.changed.wait()
        if not self.ready:
            raise Unavailable(self.unhealthy_reason)

    async def close(self) -> None:
        """Stop listening; whatever still runs is ended with an error, and the engines are told."""
        self.end_all(Unavailable("the server is shutting down"))
        self._closed = True
        await self.traffic.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def end_all(self, error: PenstockError) -> None:
        """End every request with an error."""
        for generation in {id(held.generation): held.generation for held in self.traffic.held.values()}.values():
            generation.fail(error)

    # --- what it is, and how it does

    @property
    def lost(self) -> bool:
        """Whether every engine is gone."""
        return all(instance.lost for instance in self._instances)

    @property
    def ready(self) -> bool:
        now = self.clock.now()
        return self.healthy and any(instance.serves(now) for instance in self._instances)

    @property
    def healthy(self) -> bool:
        return not self.unhealthy_reason

    @property
    def unhealthy_reason(self) -> str:
        """Why nothing can be served although it should be; "" while engines are only starting."""
        if self._closed:
            return "the server is shutting down"
        now = self.clock.now()
        if any(instance.serves(now) for instance in self._instances):
            return self.traffic.trouble
        troubles = {i.name: i.trouble(now) for i in self._instances if i.trouble(now)}
        if len(troubles) == 1 == len(self._instances):
            return next(iter(troubles.values()))
        return "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())

    def instance_states(self) -> list[dict[str, str]]:
        """For those who operate the server: every instance's name, pool and state, and what is wrong with it."""
        now = self.clock.now()
        return [
            {"name": i.name, "pool": i.pool, "state": i.state(now), "trouble": i.trouble(now)} for i in self._instances
        ]

    @property
    def max_model_len(self) -> int:
        """Of the engine with the least room; 0 until one has been ready."""
        return min((said.max_model_len for said in self._said), default=0)

    @property
    def vocab_size(self) -> int:
        return min((said.vocab_size for said in self._said), default=0)

    @property
    def modelled(self) -> dict[str, int] | None:
        """When every engine only pretends to compute: the first and the last token id that they draw from."""
        drawn = {said.drawn_ids for said in self._said}
        if len(drawn) != 1 or None in drawn:
            return None
        ((first, last),) = (ids for ids in drawn if ids is not None)
        return {"first_token_id": first, "last_token_id": last}

    @property
    def _instances(self) -> Collection[Instance]:
        return self.traffic.instances.values()

    @property
    def _said(self) -> list[Ready]:
        """What each engine said of itself, in this life or the last."""
        return [instance.said for instance in self._instances if instance.said is not None]

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

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

    # --- requests

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        model: str | None = None,
        level: ServiceLevel = NO_LEVEL,
        arrival: float | None = None,
    ) -> Generation:
        """Have a request run.

        Args:
            prompt: token ids.
            request_id: for logs; need not be unique.
            model: which of its served names the client used, for logs; None for the first.
            level: targets, priority, and whether it is offline work.
            arrival: when the request came in, by `clock`; TTFT counts from there. None is now.

        Raises:
            InvalidRequest, PromptTooLong: it cannot be served, ever.
            Unavailable: it cannot be served now.
            Overloaded: too many are held already.
        """
        if not self.ready:
            raise Unavailable(self.unhealthy_reason or "the model is still loading")
        count = len(self.traffic.held)
        over = count + params.n - self._max_requests
        if over > 0:
            raise Overloaded(
                f"the queue is full: {count} sequences, at most {self._max_requests} are allowed",
                retry_after=min(max(1.0, over * self.traffic.pace), 60.0),
            )
        limits = ModelLimits(self.max_model_len, self.vocab_size, self._eos_ids)
        unique = f"{request_id}-{secrets.token_hex(4)}"
        sequences = make_sequences(unique, prompt, params, limits, self._rng, level)
        arrival = self.clock.now() if arrival is None else arrival
        generation = Generation(self, request_id, sequences, params, arrival, model or self.served_names[0])
        held = [
            Held(generation, index, Flight(sequence, arrival, level.chat)) for index, sequence in enumerate(sequences)
        ]
        self.traffic.add(held)
        if self.traffic.wants_keys and len(prompt) >= BLOCK_TOKENS:
            root = self._said[0].root_key
            hashing = asyncio.get_running_loop().run_in_executor(self._workers, _prefix_keys, root, prompt)
            hashing.add_done_callback(partial(self._hashed, held))
        else:
            self.traffic.find_places(held)
        return generation

    def _hashed(self, sequences: Sequence[Held], hashing: asyncio.Future[list[bytes]]) -> None:
        if hashing.cancelled():  # the frontend is closed, and they are over
            return
        for held in sequences:
            held.flight.keys = hashing.result()
        self.traffic.find_places(sequences)

    def release(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences that are not wanted any longer, and have the engines drop them."""
        self.traffic.release(sequence_ids)


def _prefix_keys(root: bytes, prompt: Sequence[int]) -> list[bytes]:
    """Of the prompt's full blocks."""
    keys: list[bytes] = []
    extend_keys(keys, root, prompt, len(prompt) // BLOCK_TOKENS)
    return keys
