"""Recorded requests run again, by a deployment that serves, and their tokens compared.

Each is sent to /v1/completions as token ids, with its images and videos, every sampling field and the seed that was
really used. What ended early has to be the beginning of what comes now. Log-probabilities of the same tokens, and
embeddings, may differ by a tolerance: another device sums in another order.
"""

from __future__ import annotations

import asyncio
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from math import inf
from typing import Any, Literal

import msgspec

from penstock.bench.client import Client, error_message
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.sampling import ALL_LOGPROBS, MAX_LOGPROBS
from penstock.service.request_record import Line, RecordedOutput, RecordedRequest, RequestRecord

PATH, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
NAMED = "replay-"  # before the id of a request, in the log of the deployment
MOST_NAME = 128  # characters of such a name

Tell = Callable[[int], None]  # how many more are done


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class Choice(msgspec.Struct):
    """An output as it came."""

    index: int
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs | None = None


class _Embedding(msgspec.Struct):
    embedding: str  # float32s in base64


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


class _Answer(msgspec.Struct):
    choices: list[Choice]


class _Card(msgspec.Struct):
    id: str
    fingerprint: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """
    Attributes:
        speed: factor on the rate at which requests came; None sends one as soon as another has ended.
        at_once: requests in flight at most; None is any number, allowed only with a speed.
    """

    speed: float | None
    at_once: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment.

    Attributes:
        model: a name that it serves.
        fingerprint: of its engines; None replays what any model has generated.
        tolerance: by which two log-probabilities, or numbers of embeddings, may differ.
    """

    client: Client
    model: str
    fingerprint: str | None
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output first differs.

    Attributes:
        output: which of the request's.
        position: in the output; 0 is its first token.
        recorded, replayed: the token there; or the finish reason of the one that had ended.
        of: what differs: "token", "logprob", or a number of an "embedding".
    """

    request: str
    output: int
    position: int
    recorded: int | str | float
    replayed: int | str | float
    of: Literal["token", "logprob", "embedding"] = "token"


@dataclass(frozen=True, slots=True)
class Note:
    """Why a request was not compared."""

    request: str
    why: str


@dataclass(slots=True, kw_only=True)
class Result:
    """
    Attributes:
        requests: that were to be replayed.
        same: of them, with the recorded tokens in all outputs.
        beginnings: of these, that had ended early, so that only their beginnings are known.
        outputs, tokens: that were compared.
        numbers: log-probabilities and numbers of embeddings that were; `equal`: those that are so to the bit.
        largest_gap: of two such numbers.
        differences: the first one of each output that differs.
        failed: what the deployment did not answer.
        skipped: what cannot be compared, and was not sent.
        seconds: that it took.
    """

    requests: int
    same: int = 0
    beginnings: int = 0
    outputs: int = 0
    tokens: int = 0
    numbers: int = 0
    equal: int = 0
    largest_gap: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    failed: list[Note] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def differ(self) -> int:
        """Requests with an output that differs."""
        return self.requests - self.same - len(self.failed) - len(self.skipped)

    @property
    def good(self) -> bool:
        """Whether something was compared, and nothing differs or failed."""
        return bool(self.same) and not self.differences and not self.failed

    def document(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "same": self.same,
            "beginnings": self.beginnings,
            "differ": self.differ,
            "failed": len(self.failed),
            "not_compared": len(self.skipped),
            "outputs": self.outputs,
            "tokens": self.tokens,
            "numbers": self.numbers,
            "equal_numbers": self.equal,
            "largest_gap": self.largest_gap,
            "duration_s": self.seconds,
            "differences": [asdict(each) for each in self.differences],
            "failed_requests": [asdict(each) for each in self.failed],
            "not_compared_requests": [asdict(each) for each in self.skipped],
        }


async def find_target(client: Client, model: str | None, *, any_model: bool, tolerance: float = 0.0) -> Target:
    """The deployment of a client; `tolerance`: see `Target`.

    Args:
        model: which of its names to use; None is the first.
        any_model: replay also what another model has generated.

    Raises:
        ConfigError: it is no such server, or does not serve this name.
        Unavailable: it does not answer, or its engines do not all have one model.
    """
    status, text = await client.get("/v1/models")
    if status == 503:
        raise Unavailable(f"{client.base_url} does not serve: {error_message(text)[:200]}")
    if status != 200:
        raise ConfigError(f"--url: {client.base_url}/v1/models answered {status}: {error_message(text)[:200]}", "url")
    try:
        cards = {card.id: card for card in msgspec.json.decode(text, type=_Cards).data}
    except msgspec.DecodeError as error:
        raise ConfigError(f"--url: {client.base_url}/v1/models is not OpenAI's shape ({error})", "url") from None
    if not cards or (model is not None and model not in cards):
        raise ConfigError(f"--model: {model}, served at {client.base_url}: {', '.join(cards) or 'none'}", "model")
    card = cards[model] if model is not None else next(iter(cards.values()))
    if any_model:
        return Target(client, card.id, None, tolerance)
    if card.fingerprint is None:
        raise Unavailable(
            f"{client.base_url} does not say which model it has: it is no penstock server, or is changing its "
            "checkpoint; --any-model replays nevertheless"
        )
    return Target(client, card.id, card.fingerprint, tolerance)


async def replay(record: RequestRecord, lines: Sequence[Line], target: Target, pace: Pace, tell: Tell) -> Result:
    """Run requests of a record again.

    Args:
        lines: by arrival.
    """
    result = Result(requests=len(lines))
    clock = target.client.clock
    slots = asyncio.Semaphore(pace.at_once or max(1, len(lines)))

    async def one(request: RecordedRequest) -> None:
        try:
            await _exchange(request, record, target, result)
        finally:
            slots.release()
            tell(1)

    began = clock.now()
    async with asyncio.TaskGroup() as group:
        for line in lines:
            if pace.speed is not None:
                due = began + (line.at - lines[0].at) / pace.speed
                while (wait := due - clock.now()) > 0:  # timers may fire early by part of a millisecond
                    await asyncio.sleep(wait)
            request = record.read(line)
            if why := why_not(request, target.fingerprint) or _lacking(record, request):
                result.skipped.append(Note(request.id, why))
                tell(1)
                await asyncio.sleep(0)  # there may be many in a row
                continue
            await slots.acquire()
            group.create_task(one(request))
    result.seconds = clock.now() - began
    return result


def why_not(request: RecordedRequest, fingerprint: str | None) -> str | None:
    """Why nothing can be said of a request by running it again; None when it can.

    Args:
        fingerprint: of what it would run on; None is not compared.
    """
    if request.pooling is not None and request.embedding is None:
        return "there is no embedding of it in the record"
    if request.pooling is None and request.seed is None:
        return "its seed is not known"
    if request.pooling is None and not any(output.tokens or output.finish_reason for output in request.outputs):
        return f"it ended before its first token: {request.failure}"
    if fingerprint is None or request.fingerprints == [fingerprint]:
        return None
    if len(request.fingerprints) > 1:
        return "it went on at another checkpoint"
    ran_on = ", ".join(request.fingerprints) or "an unknown one"
    return f"it ran on another model, {ran_on}; this is {fingerprint}"


def _lacking(record: RequestRecord, request: RecordedRequest) -> str | None:
    lacks = [one for one in request.media if not record.has(one.file)]
    return f"the record lacks an {lacks[0].kind} of it, {lacks[0].file}" if lacks else None


def body_of(request: RecordedRequest, model: str, files: Sequence[bytes] = ()) -> dict[str, Any]:
    """What is sent to `PATH`. Every field is said, whatever the defaults are there.

    Args:
        files: of each of its `media`.
    """
    params = {name: value for name, value in request.params.items() if value is not None}
    most = request.max_tokens
    if any(output.finish_reason is None for output in request.outputs):
        most = max(1, *(len(output.tokens) for output in request.outputs))
    params["min_tokens"] = min(params.get("min_tokens", 0), most)  # more than there was room for, too
    if params.get("logprobs") == ALL_LOGPROBS:  # which chats alone may have; the tokens are the same
        params["logprobs"] = MAX_LOGPROBS
    body = {"model": model, "prompt": _written(request), **params, "seed": request.seed, "max_tokens": most}
    if files:
        body["urls"] = [f"data:;base64,{b64encode(file).decode()}" for file in files]
    body |= {"priority": request.priority, "return_token_ids": True}
    if request.offline:
        body["service_tier"] = "flex"
    targets = {"ttft_ms": request.ttft_ms, "tpot_ms": request.tpot_ms}
    if any(targets.values()):
        body["slo"] = targets
    return body


def _written(request: RecordedRequest) -> list[int]:
    """Its prompt as a chat template writes it: with one token for each image, not all that stand for it."""
    rest, done = list[int](), 0
    for one in request.media:
        rest += request.prompt[done : one.start + 1]
        done = one.start + one.length
    return [*rest, *request.prompt[done:]]


def compare(request: RecordedRequest, choices: Sequence[Choice]) -> list[Difference]:
    """The first difference of each output, as many as were recorded."""
    found = []
    for number, (recorded, choice) in enumerate(zip(request.outputs, choices, strict=True)):
        mine = _ended(recorded)
        theirs: list[int | str] = [*choice.token_ids, choice.finish_reason]
        pairs = zip(mine, theirs, strict=False)  # where one is longer, the end of the other differs from a token
        where = next((position for position, (one, other) in enumerate(pairs) if one != other), None)
        if where is not None:
            found.append(Difference(request.id, number, where, mine[where], theirs[where]))
    return found


def _ended(output: RecordedOutput) -> list[int | str]:
    """Its tokens, and its end if it had one."""
    return [*output.tokens, *([] if output.finish_reason is None else [output.finish_reason])]


def _gaps(recorded: Sequence[float], replayed: Sequence[float]) -> list[float]:
    """Between the numbers of both, as many as there are of either; inf where one has an end."""
    pairs = zip_longest(recorded, replayed)
    return [inf if one is None or other is None else abs(one - other) for one, other in pairs]


async def _exchange(request: RecordedRequest, record: RequestRecord, target: Target, result: Result) -> None:
    """Run it again, and count what came of it."""
    try:
        if request.embedding is not None:
            replayed = await _embedding(request, target)
            differences = _compare_numbers(request.id, 0, "embedding", request.embedding, replayed, target, result)
        else:
            files = [file for one in request.media if (file := record.image(one.file)) is not None]
            choices = await _answer(request, files, target)
            differences = compare(request, choices) or _compare_logprobs(request, choices, target, result)
    except Unavailable as error:
        result.failed.append(Note(request.id, str(error)))
        return
    result.outputs += len(request.outputs)
    result.tokens += sum(len(output.tokens) for output in request.outputs)
    result.differences += differences
    if not differences:
        result.same += 1
        result.beginnings += any(output.finish_reason is None for output in request.outputs)


def _compare_logprobs(
    request: RecordedRequest, choices: Sequence[Choice], target: Target, result: Result
) -> list[Difference]:
    """The first difference of each output whose tokens are the same."""
    found = []
    for number, (recorded, choice) in enumerate(zip(request.outputs, choices, strict=True)):
        if recorded.logprobs is not None:
            came = [] if choice.logprobs is None else choice.logprobs.token_logprobs[: len(recorded.logprobs)]
            found += _compare_numbers(request.id, number, "logprob", recorded.logprobs, came, target, result)
    return found


def _compare_numbers(
    request: str,
    output: int,
    of: Literal["logprob", "embedding"],
    recorded: Sequence[float],
    replayed: Sequence[float],
    target: Target,
    result: Result,
) -> list[Difference]:
    """The first that differ by more than is tolerated, if any do; all are counted."""
    between = _gaps(recorded, replayed)
    result.numbers += len(between)
    result.equal += between.count(0.0)
    result.largest_gap = max(result.largest_gap, *(gap for gap in between if gap < inf), 0.0)
    where = next((place for place, gap in enumerate(between) if gap > target.tolerance), None)
    if where is None:
        return []
    one, other = (_at(numbers, where) for numbers in (recorded, replayed))
    return [Difference(request, output, where, one, other, of)]


def _at(numbers: Sequence[float], place: int) -> float | str:
    return numbers[place] if place < len(numbers) else "none"


async def _embedding(request: RecordedRequest, target: Target) -> Sequence[float]:
    """As engines bring it. Raises Unavailable when there is no good answer."""
    body: dict[str, Any] = {"model": target.model, "input": [request.prompt], "priority": request.priority}
    body |= {"encoding_format": "base64", "normalize": False}
    if request.offline:
        body["service_tier"] = "flex"
    text = await _asked(EMBEDDINGS, body, request, target)
    try:
        (found,) = msgspec.json.decode(text, type=_Embeddings).data
        content = b64decode(found.embedding)
        return struct.unpack(f"<{len(content) // 4}f", content)
    except (msgspec.DecodeError, ValueError, struct.error) as error:
        raise Unavailable(f"an answer without an embedding ({error})") from None


async def _asked(path: str, body: dict[str, Any], request: RecordedRequest, target: Target) -> str:
    """Raises Unavailable when it is refused."""
    status, text = await target.client.post(path, body, (NAMED + request.id)[:MOST_NAME], patient=True)
    if status != 200:
        raise Unavailable(f"http {status}: {error_message(text)}")
    return text


async def _answer(request: RecordedRequest, files: Sequence[bytes], target: Target) -> Sequence[Choice]:
    """Its outputs, in order. Raises Unavailable when there is no good answer."""
    text = await _asked(PATH, body_of(request, target.model, files), request, target)
    try:
        choices = msgspec.json.decode(text, type=_Answer).choices
    except msgspec.DecodeError as error:
        raise Unavailable(f"an answer without token ids or finish reasons ({error})") from None
    if len(choices) != len(request.outputs):
        raise Unavailable(f"{len(choices)} outputs came, {len(request.outputs)} are recorded")
    return sorted(choices, key=lambda choice: choice.index)


def chosen(record: RequestRecord, requests: Sequence[str], path: str) -> Sequence[Line]:
    """Those that are to be replayed, by arrival.

    Args:
        requests: ids as clients know them, of whole requests or single prompts; none is all.
        path: of the record.

    Raises ConfigError when one is not in the record, or the record is empty.
    """
    if not record.lines:
        raise ConfigError(f"RECORD: {path} has no requests", "record")
    if not requests:
        return record.lines
    wanted = {_plain(request): request for request in requests}
    found: Mapping[str, list[Line]] = {request: [] for request in wanted}
    for line in record.lines:
        whole, _, number = line.id.rpartition("-")
        for name in {line.id, whole if number.isdecimal() else line.id}:
            if name in found:
                found[name].append(line)
    for name, lines in found.items():
        if not lines:
            raise ConfigError(f"--request: {wanted[name]} is not in {path}", "request")
    return sorted({line for lines in found.values() for line in lines}, key=lambda line: line.at)


def _plain(request: str) -> str:
    """A request's id, of an answer's."""
    return request.removeprefix("chatcmpl-").removeprefix("cmpl-")
