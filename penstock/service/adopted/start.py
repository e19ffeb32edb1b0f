"""From a URL to what an engine says when it is ready: what the server serves, whether that is the same model, and how
fast it is."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.clock import Clock
from penstock.core.device import ModelShape
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.hf_config import count
from penstock.core.wire.engine import Peer, Ready
from penstock.kv.keys import root_key
from penstock.sched.steptime import read_shape
from penstock.service.adopted.beliefs import Trial, device_of
from penstock.service.adopted.http import VllmServer
from penstock.service.adopted.vllm import Dropped, Rejected, ServerLoad
from penstock.text.tokenizer import Tokenizer

log = logging.getLogger("penstock.engine")
AGAIN = 2.0  # seconds between two looks for a server that is not there
SAMPLE = "def f(x):\n    return 'Grüße, 世界' + str(x ** 2)  # 3.14159"  # of text that tokenizers cut differently
TRIED = (32, 512)  # tokens of the two prompts that show how fast it is
TRIED_OUTPUT = 9
TRIES = 3
LARGE_PRIME = 7919


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedOptions:
    """
    Attributes:
        model: folder of the checkpoint; of its config.json, and its tokenizer.
        url: of the server.
        served_model_name: what that calls the model; None takes the first it lists.
        max_num_seqs, max_num_batched_tokens: that the server was started with.
        kv_blocks: of 64 tokens; None takes what it says.
    """

    model: str
    url: str
    served_model_name: str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Adopted:
    """A server that can be used.

    Attributes:
        model: as it calls it.
        priorities: whether it schedules by them.
    """

    ready: Ready
    model: str
    load: ServerLoad
    priorities: bool


async def until_there(server: VllmServer) -> None:
    """Wait for a server that is still starting, or not there."""
    said = ""
    while True:
        try:
            if await server.get("/health") is not None:
                return
            raise ConfigError(f"url: {server.url} has no /health: it is no vLLM server", "url")
        except Unavailable as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting: %s", said)
        await asyncio.sleep(AGAIN)


async def adopt(server: VllmServer, options: AdoptedOptions, name: str, incarnation: int, clock: Clock) -> Adopted:
    """
    Raises:
        ConfigError: it serves another model, is no vLLM server, or one that is too old.
        Unavailable: it does not answer.
    """
    model, longest = await _model(server, options)
    await _compare(server, model, Path(options.model))
    config = _config(Path(options.model))
    try:
        load = await server.load()
    except Dropped as error:
        raise ConfigError(f"url: {server.url}: {error}; it is no vLLM server", "url") from None
    blocks = options.kv_blocks or load.num_blocks
    if not blocks:
        raise ConfigError(f"kv-blocks: missing, and {server.url} does not say how many it has", "kv_blocks")
    vocab, shape = count(config, "vocab_size"), _shape(config)
    short, long, priorities = await _try(server, model, vocab, longest, clock)
    device = None if shape is None else device_of(shape, short, long)
    ready = Ready(
        peer=Peer(name, incarnation, ""),
        root_key=root_key("adopted", json.dumps(config, sort_keys=True)),
        max_model_len=longest,
        vocab_size=vocab,
        num_blocks=blocks,
        token_budget=options.max_num_batched_tokens,
        device="vllm",
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "auto"),
        max_sequences=options.max_num_seqs,
        device_model=device,
        shape=shape,
    )
    return Adopted(ready, model, load, priorities)


async def _model(server: VllmServer, options: AdoptedOptions) -> tuple[str, int]:
    """What it calls the model, and tokens of its longest sequence."""
    content = await server.get("/v1/models")
    try:
        cards = {str(card["id"]): int(card["max_model_len"]) for card in msgspec.json.decode(content or b"")["data"]}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        raise ConfigError(f"url: {server.url}/v1/models does not list models as vLLM does", "url") from None
    name = options.served_model_name or next(iter(cards), "")
    if name not in cards:
        listed = ", ".join(cards) or "none"
        raise ConfigError(f"served-model-name: {name!r}, {server.url} serves {listed}", "served_model_name")
    return name, cards[name]


async def _compare(server: VllmServer, model: str, folder: Path) -> None:
    """Raise ConfigError when it cuts text into other tokens than the deployment's tokenizer."""
    content = await server.post("/tokenize", {"model": model, "prompt": SAMPLE, "add_special_tokens": False})
    if content is None:
        log.warning("%s has no /tokenize: it is not checked that its tokens are those of %s", server.url, folder)
        return
    ours, theirs = Tokenizer(folder).encode(SAMPLE, False), msgspec.json.decode(content)["tokens"]
    if ours != theirs:
        raise ConfigError(f"model: {server.url} has another tokenizer than {folder}: it serves another model", "model")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {folder}/config.json cannot be read ({error})", "model") from None
    return config if isinstance(config, dict) else {}


def _shape(config: dict[str, Any]) -> ModelShape | None:
    """None of what is no decoder: then its steps are not predicted."""
    try:
        return read_shape(config)
    except ConfigError as error:
        log.warning("steps of this server are not predicted: %s", error)
        return None


async def _try(server: VllmServer, model: str, vocab: int, longest: int, clock: Clock) -> tuple[Trial, Trial, bool]:
    """A short and a long request, and whether it takes priorities."""
    short, long = (min(size, (longest - TRIED_OUTPUT) // part) for size, part in zip(TRIED, (2, 1), strict=True))
    body = {"model": model, "max_tokens": TRIED_OUTPUT, "stream": True, "return_token_ids": True}
    body |= {"ignore_eos": True, "temperature": 0.0}
    priorities = True
    try:
        try:
            await _trial(server, {**body, "priority": 1}, short, vocab, clock)  # the first one is slow
        except Rejected as error:
            if "priority" not in str(error).lower():
                raise
            priorities = False
        return (
            await _best(server, body, short, vocab, clock),
            await _best(server, body, long, vocab, clock),
            priorities,
        )
    except (Rejected, Dropped) as error:
        raise ConfigError(f"url: {server.url} does not complete a prompt of token ids: {error}", "url") from None


async def _best(server: VllmServer, body: dict[str, Any], tokens: int, vocab: int, clock: Clock) -> Trial:
    """Of a few: others use the server too, and the first of a size may compile something."""
    trials = [await _trial(server, body, tokens, vocab, clock) for _ in range(TRIES)]
    return Trial(tokens, min(trial.first for trial in trials), min(trial.interval for trial in trials))


async def _trial(server: VllmServer, body: dict[str, Any], tokens: int, vocab: int, clock: Clock) -> Trial:
    start = time.time_ns()  # so that no cache has it
    prompt = [(start + LARGE_PRIME * i * i) % vocab for i in range(tokens)]
    began, first, last, came = clock.now(), None, 0.0, 0
    async for piece in server.complete({**body, "prompt": prompt}):
        if piece.tokens:
            last, came = clock.now(), came + len(piece.tokens)
            first = last if first is None else first
    if first is None or came < TRIED_OUTPUT:
        raise Dropped(f"{came} tokens came of {TRIED_OUTPUT}")
    return Trial(tokens, first - began, (last - first) / (came - 1))
