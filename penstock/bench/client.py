"""An HTTP client for OpenAI-shaped servers that measures what it receives."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec

from penstock.bench.record import Answer, RequestRecord
from penstock.bench.stream import AnswerTally
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError, Unavailable

# Connections idle for longer are not reused: servers commonly close them at 5 s, and a request sent into a
# connection that is being closed would fail through no fault of the server.
KEEPALIVE_SECONDS = 2.0

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is ready to be sent: nothing is left to compute when its time comes.

    `at` is in seconds from the start of the workload, `body` is JSON, the counts are tokens.
    """

    number: int
    at: float
    body: bytes
    prompt_tokens: int
    output_tokens: int


class Client:
    """Async context manager over one connection pool without a limit on connections.

    Args:
        base_url: such as http://127.0.0.1:8000.
        endpoint: `completions` or `chat`.
        timeout: seconds that one request may take from being sent to its last byte.
        keep_answers: records hold what was said, not only how much.

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

    async def send(self, call: Call, start: float) -> RequestRecord:
        """Sends the request now and reads its answer to the end; `start` is when it was due. Never raises for what
        the server or the network does: that is in the record."""
        record, _ = await self._exchange(call, start)
        return record

    async def try_out(self, call: Call) -> tuple[RequestRecord, bool]:
        """As `send`, and whether the answer carried token ids."""
        record, tally = await self._exchange(call, self.clock.now())
        return record, tally.token_ids_seen

    async def _exchange(self, call: Call, start: float) -> tuple[RequestRecord, AnswerTally]:
        record = RequestRecord(
            number=call.number,
            start=start,
            sent=self.clock.now(),
            prompt_tokens=call.prompt_tokens,
            asked_tokens=call.output_tokens,
            answer=Answer() if self._keep_answers else None,
        )
        tally = AnswerTally(record)
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(call.body, record, tally)
        except TimeoutError:
            record.fail("timeout", f"not complete after {self._timeout:g} s")
        except (self._aiohttp.ClientError, OSError) as error:
            record.fail("connection", f"{type(error).__name__}: {error}")
        record.end = self.clock.now()
        return record, tally

    async def _stream(self, body: bytes, record: RequestRecord, tally: AnswerTally) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                record.fail(f"http {response.status}", error_message(await response.text(errors="replace")))
                return
            async for data in response.content.iter_any():
                tally.feed(self.clock.now(), data)
            tally.close()

    async def get(self, path: str) -> tuple[int, str]:
        """(status, body) of a GET. Raises `Unavailable` when nobody answers."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """(status, body) of a POST of JSON. Raises `Unavailable` when nobody answers."""
        return await self._ask("POST", path, msgspec.json.encode(body))

    async def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.request(method, self.base_url + path, data=body, headers=headers) as response,
            ):
                return response.status, await response.text(errors="replace")
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
