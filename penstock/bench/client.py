"""An HTTP client for OpenAI-shaped servers that measures what it receives."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec

from penstock.bench.metrics import Answer, ClientRecord
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError, Unavailable

# Connections idle for longer are not reused: servers commonly close them at 5 s, and a request sent into a
# connection that is being closed would fail through no fault of the server.
KEEPALIVE_SECONDS = 2.0
RETRY_AFTER = 1.0  # seconds until what was too much is asked again, where the server does not say

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is ready to be sent: nothing is left to compute when its time comes.

    `at` is in seconds from the start of the workload, `body` is JSON, the counts are tokens. `name` is the request's id
    in the server's log; "" leaves it to the server.
    """

    number: int
    at: float
    body: bytes
    prompt_tokens: int
    output_tokens: int
    name: str = ""


class Client:
    """Async context manager over one connection pool without a limit on connections.

    Args:
        base_url: such as http://127.0.0.1:8000.
        endpoint: `completions` or `chat`.
        timeout: seconds that one request may take from being sent to its last byte.
        keep_answers: records hold the text and token ids, not only their counts.

    Raises `ConfigError` when aiohttp is not installed.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: str = "completions",
        *,
        timeout: float = 600.0,
        api_key: str | None = None,
        clock: Clock | None = None,
        keep_answers: bool = False,
    ) -> None:
        self._aiohttp = import_aiohttp()
        self.base_url = base_url.rstrip("/")
        self.endpoint = endpoint
        self.clock = clock or SystemClock()
        self._url = self.base_url + PATHS[endpoint]
        self._timeout = timeout
        self._keep_answers = keep_answers
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Client:
        _raise_file_limit()
        connector = self._aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, keepalive_timeout=KEEPALIVE_SECONDS)
        no_limit = self._aiohttp.ClientTimeout(total=None)  # `send` has its own, over the whole request
        self._session = self._aiohttp.ClientSession(connector=connector, timeout=no_limit, headers=self._headers)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def send(self, call: Call, start: float) -> ClientRecord:
        """Sends the request now and reads its answer to the end; `start` is when it was due. Never raises for what
        the server or the network does: that is in the record."""
        record, _ = await self._exchange(call, start)
        return record

    async def send_trial(self, call: Call) -> tuple[ClientRecord, bool]:
        """As `send`, and whether the answer carried token ids."""
        record, answer = await self._exchange(call, self.clock.now())
        return record, answer.token_ids_seen

    async def _exchange(self, call: Call, start: float) -> tuple[ClientRecord, AnswerParser]:
        record = ClientRecord(
            number=call.number,
            start=start,
            sent=self.clock.now(),
            prompt_tokens=call.prompt_tokens,
            asked_tokens=call.output_tokens,
            answer=Answer() if self._keep_answers else None,
        )
        answer = AnswerParser(record)
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(call, record, answer)
        except TimeoutError:
            record.fail("timeout", f"not complete after {self._timeout:g} s")
        except (self._aiohttp.ClientError, OSError) as error:
            record.fail("connection", f"{type(error).__name__}: {error}")
        record.end = self.clock.now()
        return record, answer

    async def _stream(self, call: Call, record: ClientRecord, answer: AnswerParser) -> None:
        headers = {"Content-Type": "application/json"} | ({"X-Request-Id": call.name} if call.name else {})
        async with self._session.post(self._url, data=call.body, headers=headers) as response:
            if response.status != 200:
                record.fail(f"http {response.status}", error_message(await response.text(errors="replace")))
                return
            async for data in response.content.iter_any():
                answer.feed(self.clock.now(), data)
            answer.close()

    async def get(self, path: str) -> tuple[int, str]:
        """(status, body) of a GET. Raises `Unavailable` when there is no answer."""
        status, text, _ = await self._ask("GET", path, None)
        return status, text

    async def post(self, path: str, body: dict[str, Any], name: str = "", *, patient: bool = False) -> tuple[int, str]:
        """(status, body) of a POST of JSON; `name` as in `Call`. Raises `Unavailable` when there is no answer.

        Args:
            patient: ask again where there are too many requests (429), after what `Retry-After` says, until the
                timeout.
        """
        content, until = msgspec.json.encode(body), self.clock.now() + self._timeout
        while True:
            status, text, wait = await self._ask("POST", path, content, name)
            if not patient or status != 429 or self.clock.now() + wait > until:
                return status, text
            await asyncio.sleep(wait)

    async def _ask(self, method: str, path: str, body: bytes | None, name: str = "") -> tuple[int, str, float]:
        """Status, body, and seconds after which to ask again."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        headers |= {"X-Request-Id": name} if name else {}
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.request(method, self.base_url + path, data=body, headers=headers) as response,
            ):
                wait = response.headers.get("Retry-After", "")
                seconds = float(wait) if wait.isascii() and wait.isdecimal() else RETRY_AFTER  # a date is not read
                return response.status, await response.text(errors="replace"), seconds
        except (TimeoutError, self._aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self.base_url}{path}: no answer ({type(error).__name__}: {error})") from error


def import_aiohttp() -> ModuleType:
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError(
            "aiohttp is not installed, which this benchmark needs: pip install 'penstock[bench]'"
        ) from error
    return aiohttp


def error_message(body: str) -> str:
    """The message of an OpenAI-shaped error body; the body itself when it is something else."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body


def _raise_file_limit() -> None:
    """Every connection is an open file, and the usual soft limit of 1024 is below what an open loop may need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        return self.text or (self.delta and self.delta.content) or ""

    def has_text(self) -> bool:
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT_DECODER = msgspec.json.Decoder(_Event)


class EventReader:
    """Server-sent events out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the `data:` lines that are complete by now."""
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerParser:
    """Counts the tokens of one streamed answer into its record. No sockets: bytes and times come as arguments.

    Of a server that reports token ids, every event is counted exactly. Otherwise the count in `usage`, at the end, is
    spread evenly over the events with text: an event is never taken for a token.
    """

    def __init__(self, record: ClientRecord) -> None:
        self._record = record
        self._reader = EventReader()
        self._text_times: list[float] = []
        self._last_time = record.sent
        self._usage: _Usage | None = None
        self.token_ids_seen = False

    def feed(self, time: float, data: bytes) -> None:
        """Bytes that arrived at `time`."""
        for payload in self._reader.feed(data):
            if payload != b"[DONE]" and self._record.error is None:
                self._payload(time, payload)

    def _payload(self, time: float, payload: bytes) -> None:
        try:
            event = _EVENT_DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._record.fail("bad event", f"{error}: {payload[:100]!r}")
            return
        if event.error is not None:
            self._record.fail("error event", str(event.error))
            return
        self._usage = event.usage or self._usage
        self._last_time = time
        for choice in event.choices:
            self._record.finish_reason = choice.finish_reason or self._record.finish_reason
            if choice.token_ids is not None:
                self.token_ids_seen = True
            if choice.token_ids:
                self._record.events.append((time, len(choice.token_ids)))
            if choice.has_text():
                self._text_times.append(time)
            if self._record.answer is not None:
                self._keep(self._record.answer, choice)

    def _keep(self, answer: Answer, choice: _Choice) -> None:
        answer.pieces.append(choice.content())
        if choice.token_ids is not None:
            answer.token_ids = answer.token_ids or []
            answer.token_ids.extend(choice.token_ids)

    def close(self) -> None:
        """The stream has ended well: settle the counts, or fail the record when the answer is not whole."""
        record, usage = self._record, self._usage
        if record.error is not None:
            return
        if record.finish_reason is None:
            record.fail("incomplete", f"the stream ended without a finish reason after {len(self._text_times)} events")
            return
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0
        if self.token_ids_seen:
            return
        if usage is None:
            record.fail("uncounted", "the server gave neither token ids nor usage")
        elif usage.completion_tokens:
            record.events = spread(usage.completion_tokens, self._text_times or [self._last_time])


def spread(tokens: int, times: list[float]) -> list[tuple[float, int]]:
    """`tokens` shared out evenly over events at `times` (at least one); the first is not given more than its share."""
    ends = [tokens * i // len(times) for i in range(len(times) + 1)]
    return [(time, ends[i + 1] - ends[i]) for i, time in enumerate(times)]
