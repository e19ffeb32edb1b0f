"""`penstock serve`: an engine process, and in this one the frontend behind an HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Option, add_options, integer, number, one_of, read_options, size, switch, text, words
from penstock.core.errors import ConfigError, Unavailable
from penstock.service.checkpoint import find_checkpoint

if TYPE_CHECKING:
    import uvicorn

    from penstock.obs.logs import Format
    from penstock.service.frontend import Frontend

log = logging.getLogger("penstock.server")
STOP_TIMEOUT = 5.0  # seconds that an engine gets to leave once it was told to

ENGINE_OPTIONS = (
    Option("device", text, None, "cpu, cuda or cuda:N; by default CUDA where there is one"),
    Option(
        "dtype", one_of("auto", "bfloat16", "float16", "float32"), "auto", "of weights and KV; auto is the checkpoint's"
    ),
    Option("max-model-len", integer(2), None, "prompt and output tokens of one sequence; by default the checkpoint's"),
    Option("max-num-seqs", integer(1, 65536), 128, "sequences that run at once"),
    Option("max-num-batched-tokens", integer(1), None, "tokens in one step; by default measured at start-up"),
    Option("step-time-limit-ms", number(0), 100.0, "what a step may take when the tokens in it are measured"),
    Option("kv-cache-memory", size, None, "of the KV cache, such as 4G; by default what is free, on a CPU at most 4G"),
    Option("gpu-memory-utilization", number(0, 1), 0.9, "share of a GPU's memory that may be used"),
    Option("enable-prefix-caching", switch, True, "find computed prefixes again"),
)
SERVER_OPTIONS = (
    Option("host", text, "127.0.0.1", "address to listen on"),
    Option("port", integer(0, 65535), 8000, "port to listen on; 0 takes a free one"),
    Option("served-model-name", words, None, "names that clients may use, separated by commas; by default MODEL"),
    Option("api-key", words, (), "keys, separated by commas, one of which every request must bring"),
    Option("chat-template", text, None, "a Jinja file, or the template itself, instead of the checkpoint's"),
    Option("max-queued-requests", integer(1), 4096, "sequences held at once, running and waiting; more get a 429"),
    Option("seed", integer(0), None, "of the seeds given to requests that bring none; by default unpredictable"),
    Option("drain-timeout", integer(0), 30, "seconds that running requests get to finish after SIGTERM"),
    Option("log-level", one_of("debug", "info", "warning", "error"), "info", "of the log on standard error"),
    Option("log-format", one_of("text", "json"), "text", "of the log"),
)
OPTIONS = (*SERVER_OPTIONS, *ENGINE_OPTIONS)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="demo", help="a Hugging Face folder, a hub name, or demo (default)")
    add_options(parser, OPTIONS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. 0 after that, 1 when the engine fails, 2 when it cannot be served."""
    values = read_options(OPTIONS, args, os.environ)
    directory = find_checkpoint(args.model)
    server = ServerOptions(
        directory=directory,
        names=list(values["served_model_name"] or (args.model,)),
        **{option.key: values[option.key] for option in SERVER_OPTIONS if option.key != "served_model_name"},
    )
    from penstock.obs.logs import setup_logging

    setup_logging(server.log_level, server.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # starts and stops are told in our own words
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server takes over: leave, tidily
    listener = bind(server.host, server.port)
    with tempfile.TemporaryDirectory(prefix="penstock-", dir=short_folder()) as scratch:
        address = f"ipc://{scratch}/engine"
        with engine_process(address, engine_options(directory, values), server) as engine:
            import uvloop

            return uvloop.run(serve(server, engine, address, listener))


def short_folder() -> str | None:
    """Where a socket's path stays under the 107 bytes that Unix allows."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What concerns the HTTP side; the flags' meaning."""

    directory: Path
    names: list[str]
    host: str
    port: int
    api_key: tuple[str, ...]
    chat_template: str | None
    max_queued_requests: int
    seed: int | None
    drain_timeout: int
    log_level: str
    log_format: Format


def engine_options(directory: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Fields of `EngineOptions` from the flags."""
    chosen = {option.key: values[option.key] for option in ENGINE_OPTIONS}
    chosen["prefix_cache"] = chosen.pop("enable_prefix_caching")
    chosen["dtype"] = None if chosen["dtype"] == "auto" else chosen["dtype"]
    return {"model": str(directory), **chosen}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        flag = "host" if isinstance(error, socket.gaierror) else "port"
        raise ConfigError(f"--{flag}: cannot listen on {host}:{port} ({error.strerror or error})", flag) from None
    return listener


@contextlib.contextmanager
def engine_process(address: str, options: dict[str, Any], server: ServerOptions) -> Iterator[subprocess.Popen[bytes]]:
    """The engine, started. At the end it has been told to stop, or it is killed."""
    settings = {
        "address": address,
        "parent": os.getpid(),
        "options": options,
        "log_level": server.log_level,
        "log_format": server.log_format,
    }
    process = subprocess.Popen([sys.executable, "-m", "penstock.cli.engine", json.dumps(settings)])
    try:
        yield process
    finally:
        try:
            process.wait(STOP_TIMEOUT if sys.exc_info()[0] is None else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def serve(options: ServerOptions, engine: subprocess.Popen[bytes], address: str, listener: socket.socket) -> int:
    """Run the HTTP server until a signal, or until the engine ends; returns the exit code."""
    frontend, http = make_server(options, address)
    loop = asyncio.get_running_loop()
    for number_ in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number_, drain, http, frontend, options.drain_timeout)
    frontend.start()
    watch = asyncio.create_task(watch_engine(engine, frontend, http))
    announce = asyncio.create_task(announce_ready(frontend, options, listener))
    try:
        await http.serve(sockets=[listener])
    finally:
        lost = frontend.lost
        for task in (watch, announce):
            task.cancel()
        await asyncio.gather(watch, announce, return_exceptions=True)
        await frontend.close()
        if not frontend.max_model_len:  # still loading, it hears nobody
            engine.kill()
    return 0 if not lost else 2 if engine.poll() == 2 else 1


def drain(http: uvicorn.Server, frontend: Frontend, timeout: float) -> None:
    """Take nothing new and let what runs finish; what still runs after `timeout` seconds, or at the second signal, is
    ended with an error that its client sees."""
    over = Unavailable("the server is shutting down")
    if http.should_exit:
        frontend.end_all(over)
        return
    log.info("draining: running requests have %g s", timeout)
    http.should_exit = True
    asyncio.get_running_loop().call_later(timeout, frontend.end_all, over)


def make_server(options: ServerOptions, address: str) -> tuple[Frontend, uvicorn.Server]:
    import uvicorn

    from penstock.api.app import create_app
    from penstock.core.clock import SystemClock
    from penstock.obs.metrics import Metrics
    from penstock.service.checkpoint import read_defaults
    from penstock.service.frontend import Frontend
    from penstock.service.link import EngineLink
    from penstock.text.tokenizer import Tokenizer

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # uvicorn would raise the signal again at the end; a drained server exits with 0

    metrics = Metrics(options.names[0])
    tokenizer = Tokenizer(options.directory, options.chat_template)
    frontend = Frontend(
        tokenizer,
        options.names,
        read_defaults(options.directory, tokenizer.eos_id),
        EngineLink(address),
        metrics,
        SystemClock(),
        random.Random(options.seed) if options.seed is not None else random.SystemRandom(),
        options.log_format,
        options.max_queued_requests,
    )
    app = create_app(frontend, metrics, api_keys=options.api_key)
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=options.drain_timeout + 5,  # by then every request has been ended
    )
    return frontend, Server(config)


async def watch_engine(engine: subprocess.Popen[bytes], frontend: Frontend, http: uvicorn.Server) -> None:
    """When the engine ends or cannot be understood, end every request with an error, and then the server."""
    while engine.poll() is None and not frontend.lost:
        await asyncio.sleep(0.1)
    frontend.engine_lost(f"the engine ended with exit code {engine.returncode}")
    if engine.returncode != 2:  # then it has said why itself
        log.error("%s", frontend.unhealthy_reason)
    http.should_exit = True


async def announce_ready(frontend: Frontend, options: ServerOptions, listener: socket.socket) -> None:
    with contextlib.suppress(Unavailable):
        await frontend.wait_ready()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info("ready: %s on http://%s:%s/v1", options.names[0], shown, port)
