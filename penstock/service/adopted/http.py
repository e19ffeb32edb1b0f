"""How a vLLM server is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.sampling import ALL_LOGPROBS
from penstock.service.adopted.vllm import Dropped, Piece, Rejected, ServerLoad, read_chunk, read_metrics

ANSWERS_WITHIN = 5.0  # seconds; but for completions
KEPT_SECONDS = 2.0  # that an idle connection is used again: servers close them after 5 s, under a request's feet
INVALID = (400, 413, 422)  # statuses of requests that it never takes
DONE = b"[DONE]"
SHOWN = 300  # characters of an error


class Silent(Unavailable):
    """The server has not answered in time."""


class VllmServer:
    """
    Args:
        url: such as http://10.0.0.7:8000.
        api_key: that it needs, if any.

    Raises ConfigError when aiohttp is not installed.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("url: adopting a server needs penstock[adopt]", "url") from None
        self.url = url.rstrip("/").removesuffix("/v1")
        self._aiohttp = aiohttp
        # not its own time-outs: an answer may take its time; whoever hangs up has the request aborted
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        )
        self._lost = (aiohttp.ClientError, OSError)

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes | None:
        """The body; None where there is nothing at this path. Raises Unavailable, or ConfigError when it refuses."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> bytes | None:
        """Likewise."""
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> bytes | None:
        try:
            async with (
                asyncio.timeout(ANSWERS_WITHIN),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                content = await response.read()
        except TimeoutError:
            raise Silent(f"{self.url} has not answered for {ANSWERS_WITHIN:g} s") from None
        except self._lost as error:
            raise Unavailable(f"{self.url} does not answer ({_said(error)})") from None
        if response.status == 404:
            return None
        if response.status in (401, 403):
            raise ConfigError(f"url: {self.url} refuses the API key", "url")
        if response.status != 200:
            raise Unavailable(f"{self.url}{path} answered {response.status}: {_message(content)}")
        return content

    async def load(self) -> ServerLoad:
        """Raises Unavailable, Dropped."""
        content = await self.get("/metrics")
        return read_metrics("" if content is None else content.decode(errors="replace"))

    async def complete(self, body: dict[str, Any]) -> AsyncIterator[Piece]:
        """What comes of a request, until its stream ends; the last piece with tokens has `finish`. Closing the
        iterator aborts it.

        Raises Rejected, Dropped; Unavailable when the server cannot be reached, or breaks off.
        """
        wanted = ALL_LOGPROBS if "logprob_token_ids" in body else body.get("logprobs")
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    message = _message(await response.read())
                    kind = Rejected if response.status in INVALID else Dropped
                    raise kind(message if kind is Rejected else f"it answered {response.status}: {message}")
                async for data in _events(response.content.iter_any()):
                    if data == DONE:
                        return
                    yield read_chunk(data, wanted)
        except self._lost as error:
            raise Unavailable(f"{self.url} broke off ({_said(error)})") from None


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of every event of a stream. A line may be as long as a prompt."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest[:] = last
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()


def _message(content: bytes) -> str:
    """Of an error as vLLM has it, now and formerly."""
    try:
        value = msgspec.json.decode(content)
        return str(value["error"]["message"] if "error" in value else value["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content[:SHOWN].decode(errors="replace")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
