"""Answers of modelled engines compared with what they have to be: `core.digest` computes every one of them offline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from penstock.bench.client import Client
from penstock.bench.metrics import ClientRecord
from penstock.bench.server import Model, chat_tokens, text_of
from penstock.core.digest import offline
from penstock.core.errors import ConfigError
from penstock.core.request import FinishReason
from penstock.core.sampling import GREEDY_BELOW

# fields of a body beside the prompt: what is computed offline knows them, or they change nothing about a modelled text
KNOWN_FIELDS = ["ignore_eos", "max_tokens", "seed", "stop_token_ids", "temperature"]
HARMLESS_FIELDS = [
    *("frequency_penalty", "min_p", "presence_penalty", "priority", "prompt_cache_key", "repetition_penalty"),
    *("service_tier", "slo", "top_k", "top_p"),
]
SHOWN = 10  # differences that are described
AT_ONCE = 16  # requests to the server's tokenizer


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not what it has to be. `number` is the request's, `what` one line."""

    number: int
    what: str


@dataclass(slots=True)
class Verification:
    """
    Attributes:
        checked: complete answers that were compared in full.
        begun: failed requests that had brought some of their answer, which was compared with how it has to begin.
        unchecked: failed requests that had brought nothing.
        differ: how many of those compared were wrong.
        differences: the first of them.
    """

    checked: int = 0
    begun: int = 0
    unchecked: int = 0
    differ: int = 0
    differences: list[Difference] = field(default_factory=list)

    def count(self, record: ClientRecord, what: str | None) -> None:
        """One answer was compared; `what` is wrong about it, or None."""
        if record.error is None:
            self.checked += 1
        else:
            self.begun += 1
        if what is not None:
            self.differ += 1
            if len(self.differences) < SHOWN:
                self.differences.append(Difference(record.number, what))


def check_verifiable(model: Model, extra_body: Mapping[str, Any], url: str) -> None:
    """Raises `ConfigError` unless the text of every answer can be computed."""
    if model.sampled_ids is None:
        raise ConfigError(
            f"--verify: {model.name} at {url} does not say that its engines are modelled ones, so its text cannot be "
            "computed offline",
            "verify",
        )
    for name, value in extra_body.items():
        if value is None or name not in KNOWN_FIELDS + HARMLESS_FIELDS:
            allowed = ", ".join(sorted(KNOWN_FIELDS + HARMLESS_FIELDS))
            raise ConfigError(f"--extra-body: {name} {value!r} with --verify, allowed are {allowed}", "extra_body")


async def verify(
    client: Client, model: Model, bodies: Iterable[Mapping[str, Any]], records: Sequence[ClientRecord]
) -> Verification:
    """Compare every answer. Raises `Unavailable` when the server's tokenizer does not answer.

    Args:
        bodies: of the requests, in the order of `records`.
        records: with their answers.
    """
    result = Verification()
    waiting = zip(records, bodies, strict=True)  # shared by all workers: each takes the next

    async def work() -> None:
        for record, body in waiting:
            answer = record.answer
            assert answer is not None, "the client was not told to keep answers"
            if record.error is not None and not (answer.token_ids or answer.text):
                result.unchecked += 1
            else:
                result.count(record, await _wrong(client, model, body, record))

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    result.differences.sort(key=lambda difference: difference.number)
    return result


async def _wrong(client: Client, model: Model, body: Mapping[str, Any], record: ClientRecord) -> str | None:
    """What is wrong with an answer, or None."""
    prompt = body["prompt"] if "prompt" in body else await chat_tokens(client, model.name, body["messages"])
    tokens, finish = expect(prompt, body, model)
    shown = tokens[:-1] if finish is FinishReason.STOP else tokens
    text = await text_of(client, model.name, shown) if shown else ""
    return compare(record, tokens, text, finish)


def expect(prompt: Sequence[int], body: Mapping[str, Any], model: Model) -> tuple[list[int], FinishReason]:
    """The tokens that a modelled model gives to a request, and why they end."""
    assert model.sampled_ids is not None
    room = body["max_tokens"] if model.max_model_len is None else model.max_model_len - len(prompt)
    return offline(
        prompt,
        max_tokens=min(body["max_tokens"], room),
        token_ids=model.sampled_ids,
        seed=None if body["temperature"] < GREEDY_BELOW else body["seed"],
        stop_ids=frozenset(body.get("stop_token_ids", ())),
    )


def compare(record: ClientRecord, tokens: Sequence[int], text: str, finish: FinishReason) -> str | None:
    """One line on the first thing that is wrong with an answer, or None. A failed one has to be a beginning."""
    answer = record.answer
    assert answer is not None
    got, whole = answer.token_ids, record.error is None
    if got is not None and (wrong := _first_difference(got, tokens, whole)):
        return f"token {wrong}"
    said = answer.text
    # a stream that broke off may have ended in a part of a character
    if said != text if whole else not text.startswith(said.rstrip("\ufffd")):
        return f"character {_first_difference(said, text, whole)}"
    if whole and record.finish_reason != finish:
        return f"it ended with {record.finish_reason!r}, {finish.value!r} is right"
    return None


def _first_difference(got: Sequence[Any], right: Sequence[Any], whole: bool) -> str:
    """Where and how two sequences first differ; "" when they do not, or when one that is not whole ends before."""
    for i, (mine, theirs) in enumerate(zip_longest(got, right)):
        if mine != theirs and (whole or mine is not None):
            return f"{i} is {mine!r}, {theirs!r} is right ({len(got)} came, {len(right)} are right)"
    return ""
