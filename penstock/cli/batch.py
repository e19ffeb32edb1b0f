"""`penstock batch FILE -o OUT`: a file of requests, answered by a server of its own, or by a running one."""

from __future__ import annotations

import argparse
import heapq
import http.client
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.cli.chat import parse_url
from penstock.cli.options import client_key
from penstock.core.errors import ConfigError, PenstockError, Unavailable

PIECE = 1 << 20  # bytes that are sent or read at a time
LOOK = 0.5  # seconds between two looks at how far it is
PATIENCE = 300.0  # seconds for which a server that does not answer is asked again
TIMEOUT = 60.0
SHOWN_ERRORS = 20
OVER = ("completed", "failed", "expired", "cancelled")
FORM = (
    b'--%(boundary)b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--%(boundary)b\r\nContent-Disposition: form-data; name="file"; filename="batch.jsonl"\r\n\r\n'
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="have a file of requests answered",
        description="Has every line of FILE answered, which is JSONL as OpenAI's batches have it, and writes answers "
        "and errors to OUT, in the order of the lines. Interrupted, the same command goes on where it was. 0 when "
        "every line has its answer, 1 when some have errors.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help='lines such as {"custom_id": "1", "method": "POST", "url": '
        '"/v1/chat/completions", "body": {"messages": [...]}}',
    )
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="file for the answers")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--model",
        default="demo",
        help="what `penstock serve` takes (default: demo), which is started for this and ends with it; its flags are "
        "those of the environment (PENSTOCK_DTYPE for --dtype, and so on)",
    )
    where.add_argument("--url", help="of a running server with --batch-dir, instead")
    parser.add_argument("--api-key", help="for it (default: the first of PENSTOCK_API_KEY)")
    parser.add_argument(
        "--completion-window", default="24h", help="time in which lines are run, such as 2h or 7d (default: 24h)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for a bad flag or input, Unavailable when no server answers; returns the exit code."""
    from rich.console import Console

    from penstock.bench.document import check_writable
    from penstock.cli.replay import serving

    source, output = Path(args.file), Path(args.output)
    endpoint = _endpoint(source)
    check_writable(args.output, "--output")
    key = args.api_key or client_key(os.environ)
    state = State(output.with_name(f"{output.name}.batch"), source)
    served: AbstractContextManager[str] = nullcontext(args.url)
    if args.url is None:
        served = serving(args.model, "--batch-dir", str(state.folder / "server"))
    console = Console(stderr=True)
    with served as url:
        server = BatchServer(url, key)
        batch_id = state.batch_of(args.url or "", server)
        if batch_id is None:
            batch_id = server.create(server.upload(source), endpoint, args.completion_window)
            state.keep(args.url or "", batch_id)
        batch = _waited(server, batch_id, console)
        if batch["status"] == "failed":
            state.remove()
            for error in batch["errors"]["data"][:SHOWN_ERRORS]:
                console.print(error["message"], highlight=False, markup=False, soft_wrap=True)
            raise ConfigError(f"{source}: not run, as {len(batch['errors']['data'])} lines or more are wrong", "file")
        files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
        _write(output, source, [server.content(file_id) for file_id in files])
        for file_id in (*files, batch["input_file_id"]):
            server.ask("DELETE", f"/v1/files/{file_id}")
    state.remove()
    counts = batch["request_counts"]
    said = (
        f"{batch['status']}: {counts['completed']:,} of {counts['total']:,} lines answered, {counts['failed']:,} failed"
    )
    console.print(said, highlight=False)
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1


class State:
    """What is known of a batch that was begun for an output, in a folder beside it.

    Args:
        folder: is made when something is kept.
        source: its input; another one is another batch.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder = folder
        self._file = folder / "batch.json"
        with source.open("rb") as file:
            digest = sha256()
            while data := file.read(PIECE):
                digest.update(data)
        self._input = digest.hexdigest()

    def batch_of(self, url: str, server: BatchServer) -> str | None:
        """The batch to go on with, if it was begun there, with this input, and is known there still."""
        try:
            kept = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return None
        if (kept.get("input"), kept.get("url")) != (self._input, url):
            return None
        try:
            server.batch(kept["batch"])
        except Unavailable:
            raise
        except PenstockError:
            return None
        return str(kept["batch"])

    def keep(self, url: str, batch_id: str) -> None:
        from penstock.cli.output import as_json, write

        self.folder.mkdir(exist_ok=True)
        write(self._file, as_json({"input": self._input, "url": url, "batch": batch_id}))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class BatchServer:
    """A server with files and batches. Whatever is asked is asked again for `PATIENCE` while it does not answer."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = parse_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def upload(self, source: Path) -> str:
        """The file's id."""
        boundary = secrets.token_hex(16).encode()
        head, tail = FORM % {b"boundary": boundary}, b"\r\n--%b--\r\n" % boundary

        def pieces() -> Iterator[bytes]:
            yield head
            with source.open("rb") as file:
                while data := file.read(PIECE):
                    yield data
            yield tail

        size = len(head) + source.stat().st_size + len(tail)
        kind = f"multipart/form-data; boundary={boundary.decode()}"
        headers = {"Content-Type": kind, "Content-Length": str(size)}
        return str(json.loads(self._patiently("POST", "/v1/files", headers, pieces))["id"])

    def create(self, file_id: str, endpoint: str, window: str) -> str:
        """The batch's id."""
        asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return str(self.ask("POST", "/v1/batches", asked)["id"])

    def batch(self, batch_id: str) -> Any:
        return self.ask("GET", f"/v1/batches/{batch_id}")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises Unavailable when it does not answer, PenstockError when it refuses."""
        data = None if body is None else json.dumps(body).encode()
        return json.loads(self._patiently(method, path, {"Content-Type": "application/json"}, lambda: data))

    def content(self, file_id: str) -> Iterator[bytes]:
        """Its lines."""
        with closing(self._connect()) as connection:
            response = self._sent(connection, "GET", f"/v1/files/{file_id}/content", {}, None)
            try:
                while line := response.readline():
                    yield line
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self._url.geturl()} went away ({error}); run the same again") from error

    def _patiently(self, method: str, path: str, headers: dict[str, str], body: Any) -> bytes:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                with closing(self._connect()) as connection:
                    return self._sent(connection, method, path, headers, body()).read()
            except Unavailable:
                if time.monotonic() > until:
                    raise
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > until:
                    raise Unavailable(f"{self._url.geturl()} went away ({error})") from error
            time.sleep(LOOK)

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        assert self._url.hostname is not None, "parse_url has checked it"
        return kind(self._url.hostname, self._url.port, timeout=TIMEOUT)

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str], body: Any
    ) -> http.client.HTTPResponse:
        """Raises Unavailable when it may answer later, PenstockError when it refuses."""
        try:
            connection.request(method, self._url.path + path, body, self._headers | headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no answer from {self._url.geturl()} ({type(error).__name__}: {error})") from error
        try:
            message = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = text[:200].decode("utf-8", "replace")
        error_class = Unavailable if response.status in (429, 503) else PenstockError
        raise error_class(f"the server answered {response.status}: {message}")


def _endpoint(source: Path) -> str:
    """Of the first line; whether it fits is for the server to say. Raises ConfigError."""
    try:
        with source.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        return str(json.loads(first)["url"])
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})", "file") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{source}: its first line is no request with a url, see penstock batch --help", "file"
        ) from None


def _waited(server: BatchServer, batch_id: str, console: Any) -> Any:
    """The batch, when it is over."""
    from penstock.cli.output import make_progress

    console.quiet = not console.is_terminal
    try:
        with make_progress(console) as bars:
            bar = bars.add_task("validating", total=None)
            while True:
                batch = server.batch(batch_id)
                counts = batch["request_counts"]
                done = counts["completed"] + counts["failed"]
                bars.update(bar, description=batch["status"], total=counts["total"] or None, completed=done)
                if batch["status"] in OVER:
                    return batch
                time.sleep(LOOK)
    finally:
        console.quiet = False


def _write(output: Path, source: Path, results: list[Iterator[bytes]]) -> None:
    """The results in the order of the input's lines."""
    with source.open("rb") as file:
        places = {
            json.loads(line.lstrip(b"\xef\xbb\xbf"))["custom_id"]: i for i, line in enumerate(file) if line.strip()
        }
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            merged = heapq.merge(*results, key=lambda line: places[json.loads(bytes(line))["custom_id"]])
            file.writelines(merged)
        part.replace(output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written ({error.strerror})", "output") from None
    finally:
        part.unlink(missing_ok=True)
