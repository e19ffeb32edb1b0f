"""`penstock chat`: talk to a running server in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import mimetypes
import os
import select
import sys
import time
from base64 import b64encode
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from penstock.cli.options import add_flag, between, client_key, integer
from penstock.core.errors import ConfigError, PenstockError, Unavailable, UserError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 10.0  # to connect, and for anything but an answer

HELP = """/image FILE    send this file, or what is at this URL, with the next message; several times for several
/reset         forget the conversation
/system TEXT   start over with this system message; without TEXT, with none
/help          this
/quit          leave; so does Ctrl-D. Ctrl-C stops an answer"""


def add_parser(subparsers: Any) -> None:
    """Adds `chat` to the command line."""
    parser = subparsers.add_parser("chat", allow_abbrev=False, help="talk to a running server", description=__doc__)
    parser.add_argument("--url", "--base-url", default=DEFAULT_URL, help="of a server (default: %(default)s)")
    parser.add_argument("--model", help="a name that the server lists (default: its first)")
    parser.add_argument("--api-key", help="default: the first of PENSTOCK_API_KEY")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_flag(parser, "temperature", between(0, 2), help="default: the model's own")
    add_flag(parser, "max-tokens", integer(1), help="most tokens of one answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises `ConfigError` for a bad flag. Returns 1 when the server is not there or an answer failed for a pipe."""
    server = Server(parse_url(args.url), args.api_key or client_key(os.environ))
    try:
        model = server.find_model(args.model)
    except Unavailable as error:
        print(f"{error}; start one with: penstock serve MODEL --port {server.port}", file=sys.stderr)
        return 1
    except UserError:
        raise
    except PenstockError as error:
        print(error, file=sys.stderr)
        return 1
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    chat = Chat(server, model, args.system, {name: value for name, value in options.items() if value is not None})
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _talk(chat)
    return _answer_lines(chat)


def parse_url(url: str) -> SplitResult:
    """Of the flag --url. Raises `ConfigError` when it is no HTTP URL."""
    try:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        good = False
    if not good:
        raise ConfigError(f"--url: {url}, allowed is http://HOST:PORT or https://HOST:PORT", "url")
    return parts


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: text of the content or of the reasoning, whether it is the last, and the count of tokens."""

    content: str = ""
    reasoning: str = ""
    ends: bool = False
    tokens: int | None = None


class Server:
    """An OpenAI-shaped server. One connection per request, so that closing it cancels that request."""

    def __init__(self, url: SplitResult, api_key: str | None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    @property
    def port(self) -> int:
        return self._url.port or (443 if self._url.scheme == "https" else 80)

    def find_model(self, name: str | None) -> str:
        """`name` if it is served, or the first model. Raises `Unavailable`, or `ConfigError` when it is not."""
        content = self.get("/v1/models")
        try:
            served = [item["id"] for item in content["data"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"--url: {self._url.geturl()} is no OpenAI-shaped server", "url") from error
        if not served or (name is not None and name not in served):
            raise ConfigError(f"--model: {name}, this server has {', '.join(served) or 'none'}", "model")
        return name if name is not None else served[0]

    def get(self, path: str) -> Any:
        """The JSON at this path; None where it is something else. Raises `Unavailable` when the server is not there,
        `PenstockError` when it refuses."""
        with closing(self._connect()) as connection:
            try:
                return json.loads(self._ask(connection, "GET", path, None).read())
            except ValueError:
                return None
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self._url.geturl()} went away ({error})") from error

    def stream(self, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """The answer to a chat request as it comes. Closing the iterator early cancels the request.

        Raises `Unavailable` when the server goes away, `PenstockError` when it refuses or fails.
        """
        with closing(self._connect()) as connection:
            connection.sock.settimeout(None)  # an answer may take its time
            response = self._ask(connection, "POST", "/v1/chat/completions", json.dumps(body).encode())
            whole = False  # http.client ends quietly when a chunked answer breaks off
            try:
                for line in response:
                    if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                        piece = _piece(payload)
                        whole = whole or piece.ends
                        yield piece
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self._url.geturl()} went away ({error})") from error
            if not whole:
                raise Unavailable(f"{self._url.geturl()} broke off its answer")

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        assert self._url.hostname is not None, "parse_url has checked it"
        connection = kind(self._url.hostname, self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise Unavailable(f"no server at {self._url.geturl()} ({error})") from error
        return connection

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._url.path + path, body, self._headers)
            response = connection.getresponse()
            text = b"" if response.status == 200 else response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no answer from {self._url.geturl()} ({type(error).__name__}: {error})") from error
        if response.status == 200:
            return response
        raise PenstockError(f"the server answered {response.status}: {_message(text)}")


def _piece(payload: bytes) -> Piece:
    try:
        event = json.loads(payload)
        if event.get("error"):
            raise PenstockError(f"the server failed: {_message(payload)}")
        choice = event["choices"][0] if event.get("choices") else {}
        delta = choice.get("delta") or {}
        return Piece(
            content=delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
            ends=bool(choice.get("finish_reason")),
            tokens=(event.get("usage") or {}).get("completion_tokens"),
        )
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise PenstockError(f"the server sent {payload[:100]!r}, which is no chat event") from error


def _message(body: bytes) -> str:
    """The message of an OpenAI-shaped error, else the start of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


@dataclass
class Chat:
    """A conversation: its messages so far, and the options of the next request."""

    server: Server
    model: str
    system: str | None
    options: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # URLs, for the next message

    def ask(self, prompt: str) -> Generator[Piece, None, None]:
        """The answer as it comes. Its text is remembered, even when the caller stops it half way; a prompt without any
        text of an answer is forgotten."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        seen = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.images.clear()
        turn = {"role": "user", "content": [*seen, {"type": "text", "text": prompt}] if seen else prompt}
        body = {
            "model": self.model,
            "messages": [*head, *self.turns, turn],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        content: list[str] = []
        try:
            with closing(self.server.stream(body)) as pieces:
                for piece in pieces:
                    content.append(piece.content)
                    yield piece
        finally:
            if any(content):
                self.turns += [turn, {"role": "assistant", "content": "".join(content)}]

    def reset(self, system: str | None) -> None:
        self.turns.clear()
        self.images.clear()
        self.system = system


def _command(chat: Chat, line: str) -> str | None:
    """What to say after a line that begins with a slash; None to leave."""
    name, _, text = line.partition(" ")
    if name == "/quit":
        return None
    if name == "/reset":
        chat.reset(chat.system)
        return "forgotten"
    if name == "/system":
        chat.reset(text.strip() or None)
        return f"system message: {chat.system or 'none'}"
    if name == "/image":
        return _attach(chat, text.strip())
    return HELP if name == "/help" else f"{name} is no command\n{HELP}"


def _attach(chat: Chat, name: str) -> str:
    if urlsplit(name).scheme in ("http", "https", "data"):
        chat.images.append(name)
        return "sent with the next message"
    try:
        data = Path(name).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        return f"/image {name}: cannot be read ({getattr(error, 'strerror', None) or error})"
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    chat.images.append(f"data:{kind};base64,{b64encode(data).decode()}")
    return f"{name} is sent with the next message"


def _answer_lines(chat: Chat) -> int:
    """One prompt per line of standard input, one plain answer each; ends at the first failure."""
    for line in sys.stdin:
        prompt = line.strip()
        if not prompt:
            continue
        if prompt.startswith("/"):
            reply = _command(chat, prompt)
            if reply is None:
                break
            print(reply, file=sys.stderr)
            continue
        try:
            for piece in chat.ask(prompt):
                print(piece.content, end="", flush=True)
            print(flush=True)
        except PenstockError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
    return 0


def _talk(chat: Chat) -> int:
    from rich.console import Console
    from rich.markup import escape

    _edit_lines()
    console = Console(highlight=False)
    console.print(f"{escape(chat.model)}  [dim]/help for commands, Ctrl-D to leave[/dim]")
    while True:
        try:
            prompt = _read_prompt()
        except EOFError:
            console.print()
            return 0
        except KeyboardInterrupt:
            console.print("  [dim]Ctrl-D or /quit to leave[/dim]")
            continue
        if prompt.startswith("/"):
            reply = _command(chat, prompt)
            if reply is None:
                return 0
            console.print(reply, style="dim", markup=False)
        elif prompt:
            _show_answer(chat, prompt, console)


def _show_answer(chat: Chat, prompt: str, console: Any) -> None:
    begin, first, tokens, thinking = time.monotonic(), None, 0, False
    pieces = chat.ask(prompt)
    try:
        with closing(pieces):
            for piece in pieces:
                if first is None and (piece.content or piece.reasoning):
                    first = time.monotonic()
                if thinking and piece.content:
                    console.print("\n")
                thinking = bool(piece.reasoning) or (thinking and not piece.content)
                console.print(piece.reasoning, end="", style="dim italic", markup=False, soft_wrap=True)
                console.print(piece.content, end="", markup=False, soft_wrap=True)
                tokens = piece.tokens or tokens
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/dim]")
        return
    except PenstockError as error:
        console.print(f"\n{error}", style="red", markup=False)
        return
    console.print()
    if first is not None and tokens > 1 and (decode := time.monotonic() - first) > 0:
        speed = (tokens - 1) / decode
        console.print(f"{tokens} tokens, first after {1e3 * (first - begin):.0f} ms, then {speed:.1f}/s", style="dim")


def _edit_lines() -> None:
    """History and editing for `input`, and pasted text as one line with others in it, where readline can do that."""
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")


def _read_prompt() -> str:
    """What was typed or pasted. Lines that are there already as the first one ends were pasted with it."""
    lines = [input("> ")]
    while select.select([sys.stdin], [], [], 0)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines).strip()
