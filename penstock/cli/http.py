"""An HTTP server with a frontend: shared by `penstock serve` and a deployment's frontends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from penstock.cli.reloaded import Reloaded, ServerTLS, read_keys
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.garbage import collect_rarely
from penstock.core.host_port import join_host_port

if TYPE_CHECKING:
    import uvicorn
    import zmq

    from penstock.api.http import Application
    from penstock.core.clock import Clock
    from penstock.core.wire.engine import MediaRoute
    from penstock.core.wire.master import Endpoint
    from penstock.media.loader import MediaLoader
    from penstock.obs.logs import Format
    from penstock.obs.metrics import Compat
    from penstock.obs.tracing import Tracing
    from penstock.sched.cluster import SlowInstances
    from penstock.service.batch_runner import BatchRunner
    from penstock.service.batch_store import BatchStore
    from penstock.service.channel import EngineChannel
    from penstock.service.curve import Curve
    from penstock.service.frontend import Frontend, Models
    from penstock.service.master_pump import MasterPump
    from penstock.service.placement import Placement
    from penstock.service.policies import Policies
    from penstock.service.registry import LocalRegistry, Registry
    from penstock.service.session import FleetLimits

log = logging.getLogger("penstock.server")
MOST_PATIENCE = 60.0  # upper bound of the seconds that requests wait for an engine to restart
READABLE_HEADERS = ("x-request-id", "retry-after", "x-penstock-ignored-fields")  # for pages of other origins
CLOSING_SECONDS = 5  # to send the remaining output once every request has ended
KEEP_ALIVE = (
    120  # seconds that a connection may be idle: longer than clients keep theirs, which lose a request otherwise
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP side, as the flags of `penstock serve`."""

    host: str
    port: int
    api_key: tuple[str, ...]
    api_key_file: str | None
    share_prefixes: bool
    ssl_certfile: str | None
    ssl_keyfile: str | None
    ssl_ca_certs: str | None
    ssl_cert_reqs: str
    allowed_origins: Sequence[str]
    allowed_methods: Sequence[str]
    allowed_headers: Sequence[str]
    allow_credentials: bool
    root_path: str
    max_queued_requests: int
    max_queued_tokens: int | None
    seed: int | None
    drain_timeout: float
    send_timeout: float
    log_level: str
    log_format: Format
    max_body_size: int
    metrics_compat: Compat
    otlp_traces_endpoint: str | None
    enable_sleep_mode: bool
    record_requests: str | None
    record_requests_size: int
    batch_dir: str | None
    max_file_size: int
    return_tokens_as_token_ids: bool
    enable_force_include_usage: bool
    enable_per_request_metrics: bool
    enable_tokenizer_info_endpoint: bool
    max_media_count: int = 16
    max_media_bytes: int = 20 << 20
    max_media_pixels: int = 1 << 26
    max_video_frames: int = 64
    allowed_media_domains: Sequence[str] = ()
    media_fetch_timeout: float = 5.0
    media_decode_timeout: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of one of the models that are served, likewise.

    Attributes:
        directory: of its checkpoint.
        names: that clients may use; the first is its name in answers.
        prefix: see `Deployment`.
    """

    directory: Path
    names: list[str]
    prefix: str = ""
    chat_template: str | None
    override_generation_config: str | None
    tool_call_parser: str
    enable_auto_tool_choice: bool
    reasoning_parser: str | None
    pooling: Literal["auto", "last", "mean"]


def bind(host: str, port: int, named: str = "") -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had.

    Args:
        named: the setting that it is from, where that is no flag.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        flag = "host" if isinstance(error, socket.gaierror) else "port"
        raise ConfigError(
            f"{named or f'--{flag}'}: cannot listen on {join_host_port(host, port)} ({error.strerror or error})", flag
        ) from None
    return listener


def allow_connections() -> None:
    """Raise the limit of open files to the system's maximum: each connection needs one."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def set_up_logging(options: ServerOptions, process: str = "") -> None:
    from penstock.obs.logs import setup_logging

    setup_logging(options.log_level, options.log_format, process)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # penstock logs start and stop itself


@dataclass(frozen=True, slots=True)
class OwnMaster:
    """A model's master in the frontend's process.

    Attributes:
        registry: of its engines.
        policy: a name in `service.policies.BUNDLES`.
        flight_recorder: file where it writes what it decides; None for none.
    """

    registry: LocalRegistry
    policy: str
    flight_recorder: str | None = None


@dataclass(slots=True)
class Site:
    """The frontends of all models and the HTTP server over them, on one listening socket.

    Interrupted requests that no engine can continue wait for one to restart: an error would make the client retry and
    lose what was computed. They wait four times as long as the first engine took to start: the next start takes about
    as long, unless the machine is busier by then.

    Attributes:
        context: of all its ZMQ sockets.
        placements: one for each model.
        began: when engines began to start, by the frontend's clock.
        reloaded: what is read again when files change.
    """

    options: ServerOptions
    listener: socket.socket
    context: zmq.SyncContext
    models: Models
    placements: Sequence[Placement]
    http: uvicorn.Server
    began: float
    tracing: Tracing | None = None
    reloaded: Sequence[Reloaded] = ()
    batch_store: BatchStore | None = None
    batch_runner: BatchRunner | None = None
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def run(self, *watches: Any) -> None:
        """Serve until `drain` or `stop`; returns when all requests have ended.

        Args:
            watches: coroutines that run meanwhile.
        """
        for frontend in self.models.frontends:
            frontend.start()
        announcements = [self._announce(frontend) for frontend in self.models.frontends]
        reloads = [each.run() for each in self.reloaded]
        batches = [] if self.batch_runner is None else [self.batch_runner.run()]
        self._tasks = [asyncio.create_task(work) for work in (*announcements, *reloads, *batches, *watches)]
        try:
            await self.http.serve(sockets=[self.listener])
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def reload(self) -> None:
        """Read the files again that it was given, now."""
        for each in self.reloaded:
            each.read_again("at SIGHUP")

    def stop(self) -> None:
        """Stop listening; returns at once."""
        self.http.should_exit = True

    def drain(self) -> None:
        """Drain: finish running requests, and answer new ones with 503. After the drain timeout, or at the second
        signal, running requests end with an error."""
        if self.models.draining:
            self._end()
            return
        log.info("draining: running requests have %g s", self.options.drain_timeout)
        self.models.draining = True
        self._tasks.append(asyncio.create_task(self._finish()))

    async def _finish(self) -> None:
        running = set(self.http.server_state.tasks)  # one for each request; later ones are refused
        if running:
            await asyncio.wait(running, timeout=self.options.drain_timeout)
        self._end()

    def _end(self) -> None:
        for frontend in self.models.frontends:
            frontend.end_all(Unavailable("the server is shutting down"))
        self.stop()

    async def close(self) -> None:
        for frontend in self.models.frontends:
            await frontend.close()
        self.context.term()
        if self.batch_store is not None:
            await asyncio.to_thread(self.batch_store.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def _announce(self, frontend: Frontend) -> None:
        from penstock.service.flight import PATIENCE

        await frontend.wait_ready()
        collect_rarely()
        took = frontend.clock.now() - self.began
        frontend.engine_client.dispatcher.patience = min(max(PATIENCE, 4 * took), MOST_PATIENCE)
        where = join_host_port(*self.listener.getsockname()[:2])
        scheme = "http" if self.options.ssl_certfile is None else "https"
        log.info("ready: %s on %s://%s%s/v1", frontend.served_names[0], scheme, where, self.options.root_path)


def make_site(
    options: ServerOptions,
    models: Sequence[tuple[ModelOptions, str | OwnMaster]],
    listener: socket.socket,
    name: str,
    began: float,
    link: socket.socket | None = None,
    curve: Curve | None = None,
    kept_responses: Path | None = None,
) -> Site:
    """
    Args:
        models: each with its master's ZMQ endpoint, "" when a registry has to tell; or with what a master in this
            process has. Raises ConfigError where its flight recorder cannot be written.
        name: of the frontend.
        began: when the engines began to start, by `SystemClock`.
        curve: protects the links to master and engines.
        link: to the launcher, which ends the answers if this process is killed; see `AnswerGuard`.
        kept_responses: see `create_app`.
    """
    from penstock.api.app import create_app
    from penstock.api.schema import AnswerDefaults
    from penstock.core.clock import SystemClock
    from penstock.obs.exposition import Exposition
    from penstock.service.batch_runner import BatchRunner
    from penstock.service.batch_store import BatchStore
    from penstock.service.channel import make_context
    from penstock.service.frontend import Models

    clock, context = SystemClock(), make_context()
    placements: list[Placement] = []
    frontends: list[Frontend] = []
    for model, master in models:
        placement, registry = _make_placement(context, master, name, clock, curve, options.seed)
        connect = _connector(context, name, "frontend", clock, curve)
        placements.append(placement)
        frontends.append(_make_frontend(options, model, name, registry, connect, placement, clock))
    served = Models(frontends)
    tracing = None
    if options.otlp_traces_endpoint is not None:
        from penstock.obs.tracing import otlp_tracing

        tracing = otlp_tracing(options.otlp_traces_endpoint)
    store = None if options.batch_dir is None else BatchStore(Path(options.batch_dir))
    app = create_app(
        served,
        Exposition([frontend.metrics for frontend in frontends], options.metrics_compat),
        api_keys=options.api_key,
        keys_change=options.api_key_file is not None,
        share_prefixes=options.share_prefixes,
        max_body_bytes=options.max_body_size,
        tracing=tracing,
        sleep_mode=options.enable_sleep_mode,
        root_path=options.root_path,
        batch_store=store,
        max_file_bytes=options.max_file_size,
        kept_responses=kept_responses,
        answer_defaults=AnswerDefaults(
            options.return_tokens_as_token_ids, options.enable_force_include_usage, options.enable_per_request_metrics
        ),
        shows_tokenizer=options.enable_tokenizer_info_endpoint,
    )
    runner = None if store is None else BatchRunner(store, served, app.ask, name, options.max_body_size, clock)
    reloaded = _reloaded_keys(app, options)
    tls = None
    if options.ssl_certfile is not None:
        tls = ServerTLS(asdict(options))
        reloaded.append(Reloaded("TLS", tls.paths, tls.read))
    http = _http_server(with_cors(app, options), options, link, tls)
    return Site(options, listener, context, served, placements, http, began, tracing, reloaded, store, runner)


def _make_placement(
    context: zmq.SyncContext,
    master: str | OwnMaster,
    name: str,
    clock: Clock,
    curve: Curve | None,
    seed: int | None,
) -> tuple[Placement, Registry]:
    """Who decides where requests of a model run, and the engines that it has. Arguments as of `make_site`."""
    from penstock.service.channel import master_channel
    from penstock.service.master_pump import LocalPlacement
    from penstock.service.placement import RemotePlacement
    from penstock.service.policies import BUNDLES, Circumstances

    if isinstance(master, str):
        remote = RemotePlacement(master_channel(context, master, name, clock, curve), clock)
        return remote, remote.registry
    policies, registry = BUNDLES[master.policy].make(Circumstances()), master.registry
    pump = make_master(context, registry, policies, seed, clock, f"{name}-master", master.flight_recorder)
    return LocalPlacement(pump, name), registry


def _make_frontend(
    options: ServerOptions,
    model: ModelOptions,
    name: str,
    registry: Registry,
    connect: Callable[[Endpoint], EngineChannel],
    placement: Placement,
    clock: Clock,
) -> Frontend:
    from penstock.obs.metrics import Metrics
    from penstock.service.checkpoint import model_type, read_defaults
    from penstock.service.embedding import read_embedding
    from penstock.service.engine_client import EngineClient
    from penstock.service.frontend import Frontend
    from penstock.service.placement import RemotePlacement
    from penstock.service.request_recorder import RequestRecorder
    from penstock.text.dialect import make_dialect
    from penstock.text.tokenizer import Tokenizer

    metrics = Metrics(model.names[0], [])
    engine_client = EngineClient(registry, connect, placement, metrics, clock, told=True)
    if isinstance(placement, RemotePlacement):
        placement.engine_ended = engine_client.engine_ended
        placement.troubled = engine_client.troubled
    recorder = None
    if options.record_requests is not None:
        folder = Path(options.record_requests) / model.prefix
        recorder = RequestRecorder(folder, name, options.record_requests_size, metrics, clock)
    tokenizer = Tokenizer(model.directory, model.chat_template)
    return Frontend(
        tokenizer,
        model.names,
        read_defaults(model.directory, tokenizer.eos_id, model.override_generation_config),
        engine_client,
        metrics,
        clock,
        random.Random(options.seed) if options.seed is not None else random.SystemRandom(),
        options.log_format,
        options.max_queued_requests,
        options.max_queued_tokens,
        read_embedding(model.directory, None if model.pooling == "auto" else model.pooling),
        recorder,
        make_dialect(
            tokenizer,
            model_type(model.directory),
            model.tool_call_parser,
            model.enable_auto_tool_choice,
            model.reasoning_parser,
        ),
        _make_media(options, model.directory),
    )


def _make_media(options: ServerOptions, directory: Path) -> MediaLoader | None:
    from penstock.media.limits import MediaLimits
    from penstock.media.loader import MediaLoader
    from penstock.media.processor import read_processor

    if (processor := read_processor(directory)) is None:
        return None
    limits = MediaLimits(
        count=options.max_media_count,
        bytes=options.max_media_bytes,
        pixels=options.max_media_pixels,
        frames=options.max_video_frames,
        domains=tuple(domain.lower() for domain in options.allowed_media_domains),
        fetch_seconds=options.media_fetch_timeout,
        decode_seconds=options.media_decode_timeout,
    )
    return MediaLoader(processor, limits)


def _reloaded_keys(app: Application, options: ServerOptions) -> list[Reloaded]:
    path = options.api_key_file
    if path is None:
        return []
    return [Reloaded("API keys", [path], lambda: app.set_api_keys((*options.api_key, *read_keys(path))))]


def with_cors(app: Application, options: ServerOptions) -> Any:
    """The application, with answers to browsers that ask whether pages of other origins may call it. They ask without
    an API key, so they are answered in front of it."""
    if not options.allowed_origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=READABLE_HEADERS,
    )


def make_master(
    context: zmq.SyncContext,
    registry: Registry,
    policies: Policies,
    seed: int | None,
    clock: Clock,
    name: str = "master",
    flight_recorder: str | None = None,
    fleet: FleetLimits | None = None,
    slow: SlowInstances | None = None,
    curve: Curve | None = None,
    media_route: MediaRoute | None = None,
) -> MasterPump:
    """A master with its own channels to the engines.

    Args:
        registry: of these.
        name: its name at the engines; two masters of one name would receive each other's messages.
        flight_recorder: the file where it writes what it decides. Raises ConfigError when it cannot.
        fleet: what scaling may do.
        slow: says which instances are restarted because they are slow; None where none ever is.
        curve: protects the links to the engines.
        media_route: see `Master`.
    """
    import time

    from penstock.service.master import Master
    from penstock.service.master_pump import MasterPump, Minutes
    from penstock.service.recorder import RECENT, RECENT_LOADS, FlightRecorder
    from penstock.service.recorder_file import RecorderFile

    if flight_recorder is None:
        recorder, recording = FlightRecorder(RECENT, RECENT_LOADS), None
    else:
        recorder = FlightRecorder()
        recording = RecorderFile(Path(flight_recorder), recorder, clock)
    minutes = Minutes(recorder)
    master = Master(
        (),
        policies,
        random.Random(seed),
        time.time_ns(),
        limits=fleet,
        recorder=minutes,
        slow=slow,
        media_route=media_route,
    )
    return MasterPump(master, registry, _connector(context, name, "master", clock, curve), clock, recording, minutes)


def _connector(
    context: zmq.SyncContext, name: str, kind: Literal["frontend", "master"], clock: Clock, curve: Curve | None
) -> Callable[[Endpoint], EngineChannel]:
    """What makes channels to engines."""
    from penstock.service.channel import engine_channel

    return lambda endpoint: engine_channel(context, endpoint.address, name, kind, clock, curve)


def _http_server(app: Any, options: ServerOptions, link: socket.socket | None, tls: ServerTLS | None) -> uvicorn.Server:
    import uvicorn

    from penstock.api.connection import Connection, endings
    from penstock.service.answer_guard import AnswerLog

    # whoever ends the answers of a killed process does not know what they were encrypted with
    answers = None if link is None or tls is not None else AnswerLog(link, endings())
    connection = partial(Connection, send_seconds=options.send_timeout, answers=answers)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # uvicorn would raise the signal again at the end; a drained server exits with 0

    config = uvicorn.Config(
        app,
        loop="none",
        http=cast(type[Connection], connection),  # it is only called
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # client addresses are not used
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    config.load()
    config.ssl = None if tls is None else tls.context
    return Server(config)
