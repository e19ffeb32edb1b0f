"""A real `penstock serve`, or another command that serves, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from penstock.drill.launched import told

READY = re.compile(r'ready: \S+ on (http://[^\s"]+)/v1')
QUICK = ("--max-num-batched-tokens", "512", "--kv-cache-memory", "64M", "--max-model-len", "4096")


class Served:
    """A command that serves over HTTP.

    Args:
        command: of `penstock`, with its arguments.
        new_group: so that a signal can be sent to the whole group.
        more: flags after the arguments.
        enter: what the command line begins with.

    Attributes:
        urls: of its frontends, such as http://127.0.0.1:41234; set by whoever knows how many there are.
        lines: what it wrote to standard error so far.
    """

    def __init__(
        self,
        *command: str,
        new_group: bool = False,
        more: Sequence[str] = ("--port", "0"),
        enter: Sequence[str] = (),
    ) -> None:
        words = [*enter, sys.executable, "-m", "penstock.cli.main", *command, *more]
        # one thread: several servers and tests share the cores
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, start_new_session=new_group, env=environment
        )
        self.urls: list[str] = []
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._new.put(line)
        self._new.put(None)

    @property
    def url(self) -> str:
        return self.urls[0]

    def log(self) -> str:
        """The end of it, for messages of assertions."""
        return "\n" + "".join(self.lines[-100:])

    def wait_for(self, pattern: re.Pattern[str] | str, timeout: float = 90) -> re.Match[str]:
        """The first match in a line that was not looked at before."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} within {timeout} s:{self.log()}") from None
            assert line is not None, f"it ended:{self.log()}"
            if found := re.search(pattern, line):
                return found

    def get(self, path: str, frontend: int = 0) -> str:
        with urllib.request.urlopen(self.urls[frontend] + path, timeout=30) as response:
            return response.read().decode()

    def metric(self, name: str, frontend: int = 0, **labels: str) -> float:
        """Sum of a `penstock:` metric over the series that have these labels."""
        total = 0.0
        for line in self.get("/metrics", frontend).splitlines():
            found = re.fullmatch(rf"penstock:{name}(?:{{(.*)}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    def _told(self) -> dict[int, tuple[str, dict[str, Any]]]:
        """Process id -> name and settings, of everything that this one has started."""
        return told(self.process.pid)

    def pids(self) -> dict[str, int]:
        """Every process that runs now, by name: kv-pool, master, frontend-0, engine-0, ..."""
        return {name: pid for pid, (name, _) in self._told().items()}

    def settings(self, name: str) -> dict[str, Any]:
        """What a process was told when it started."""
        return next(settings for known, settings in self._told().values() if known == name)

    def stop(self, how: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal and return the exit code; by then everything was written."""
        self.process.send_signal(how)
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code


class Server(Served):
    """`penstock serve`, or another command that takes --port and says when it is ready, such as "up"."""

    def __init__(
        self, *arguments: str, command: str = "serve", new_group: bool = False, enter: Sequence[str] = ()
    ) -> None:
        super().__init__(command, *arguments, new_group=new_group, enter=enter)
        self.urls.append(self.wait_for(READY).group(1))

    def engine_pid(self) -> int:
        return next(self._engine_pids())

    def has_engine(self, other: int | None) -> bool:
        """Whether an engine's process runs that is not `other`."""
        return any(pid != other for pid in self._engine_pids())

    def _engine_pids(self) -> Iterator[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            with contextlib.suppress(OSError):  # it has just gone
                if b"penstock.cli.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    yield int(pid)

    def memory(self, *, kv: bool = False) -> int:
        """Bytes that the server and its engine have to themselves. Not what they share with others: whoever else uses
        the same libraries changes that.

        Args:
            kv: with the KV cache, whose pages come one by one, when they are first written. An engine maps each in
                several places: they are counted once, where its resident size (RSS) counts each of those.
        """
        kinds = "Pss_(?:Anon|Shmem)" if kv else "Pss_Anon"
        total = 0
        for pid in (self.process.pid, self.engine_pid()):
            found = re.findall(rf"{kinds}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
            total += sum(map(int, found)) << 10
        return total


def refuses_while_it_drains(server: Served, send: Callable[[], object] | None = None) -> None:
    """Sends SIGTERM, or calls `send`, in the middle of a stream: new connections get a 503, /health
    says what happens, and the stream goes on to its end."""
    ask = {"model": "demo", "prompt": "a", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=ask, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        send() if send is not None else server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        for method, path in (("GET", "/ready"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
            refused = httpx.request(method, server.url + path, json={"prompt": "a"}, timeout=10)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        health = httpx.get(server.url + "/health", timeout=10)
        assert (health.status_code, health.json()["status"]) == (200, "draining")
        *_, last, done = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"


@contextlib.contextmanager
def serving(
    *arguments: str, command: str = "serve", new_group: bool = False, enter: Sequence[str] = ()
) -> Iterator[Server]:
    server = Server(*arguments, command=command, new_group=new_group, enter=enter)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@contextlib.contextmanager
def answering(answers: Mapping[str, object]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server with these answers in JSON, by path, and 404 for others. Its URL, and the headers of what came."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            known = self.path in answers
            body = json.dumps(answers[self.path] if known else {"error": {"message": "unknown"}}).encode()
            self.send_response(200 if known else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            serving.join()
