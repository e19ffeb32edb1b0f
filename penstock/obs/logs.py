"""Log formats, and one log line per request. Prompts and tokens are never logged."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, fields
from typing import Literal, TextIO

import msgspec

Format = Literal["text", "json"]

ONLINE, OFFLINE = SERVICE_CLASSES = ("online", "offline")
SLO = {True: "met", False: "missed", None: "-"}

AMBIGUOUS = set(' "=')
MOMENT = 0.1  # seconds that a request's line is held back, to be written with others

logger = logging.getLogger("penstock.request")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A finished request: its parameters, outcome and timing.

    Attributes:
        request_id: the client's `X-Request-Id`, or ours.
        model: the name that the client called it by.
        instance: where it ran: "engine-0"; "p0>d1" with a hand-off; several, separated by commas, when its outputs ran
            on several instances; "" for none.
        prompt_tokens, cached_tokens, completion_tokens: of all its outputs together.
        longest_completion: tokens of its longest output.
        n: how many outputs it has.
        max_tokens: the limit of each; 0 where prompts are embedded.
        finish_reason: "stop", "length" or "abort"; None when it failed.
        ttft, tpot, e2e, queue, prefill, decode: seconds; None when unknown (without a token, say). An embedding comes
            in place of the first token.
        image_wait, encode: seconds for which its prompt waited for images, and that looking at them took; None where
            it has none, or none was looked at.
        preemptions: how often its sequences lost their KV cache to others, where they ended.
        seed: the one its noise was sampled from; None when no token was asked of an engine.
        service_class: "online" or "offline".
        slo_met: whether it met its targets; None without targets, and when the client left.
        status: the HTTP status that the client saw; 499 when it left before one was sent.
    """

    request_id: str
    model: str
    instance: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    longest_completion: int = 0
    n: int = 1
    max_tokens: int | None = None
    finish_reason: str | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    image_wait: float | None = None
    encode: float | None = None
    preemptions: int = 0
    seed: int | None = None
    service_class: str = ONLINE
    slo_met: bool | None = None
    status: int = 200


FIELDS = tuple(each.name for each in fields(RequestRecord))


def log_request(record: RequestRecord, format: Format) -> None:
    """Log the request's line at level INFO, after `MOMENT` together with others, which costs a fraction of logging each
    by itself. The lines left at the end of the process are logged then."""
    if logger.isEnabledFor(logging.INFO):
        _ended.add(time.time(), record, format)


def log_ended() -> None:
    """Log the lines held back now."""
    _ended.log()


class _Ended:
    """Requests whose lines are not logged yet."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, RequestRecord, Format]] = deque()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, at: float, record: RequestRecord, format: Format) -> None:
        """
        Args:
            at: when it ended, seconds since 1970.
        """
        self._waiting.append((at, record, format))
        if not self._some.is_set():
            self._some.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
            self._thread.start()
            atexit.register(self.log)

    def log(self) -> None:
        with contextlib.suppress(IndexError):  # none is left
            while True:
                at, record, format = self._waiting.popleft()
                logger.handle(_log_record(at, record, format))
        for handler in logging.getLogger().handlers:
            handler.flush()

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(MOMENT)
            self._some.clear()
            self.log()


_ended = _Ended()


def _log_record(at: float, record: RequestRecord, format: Format) -> logging.LogRecord:
    if format == "json":
        found = {name: getattr(record, name) for name in FIELDS}
        line, extra = msgspec.json.encode(found).decode(), {"fields": found}
    else:
        line, extra = _line(record), None
    made = logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None, extra=extra)
    made.created, made.msecs = at, at % 1 * 1e3
    return made


def _line(record: RequestRecord) -> str:
    return (
        f"{record.status} {record.finish_reason or 'failed':<6} prompt={record.prompt_tokens:<6} "
        f"cached={record.cached_tokens:<6} completion={record.completion_tokens:<6} "
        f"ttft={_seconds(record.ttft)} tpot={_seconds(record.tpot)} e2e={_seconds(record.e2e)} "
        f"queue={_seconds(record.queue)} prefill={_seconds(record.prefill)} decode={_seconds(record.decode)} "
        f"{_images(record)}slo={SLO[record.slo_met]:<6} seed={'-' if record.seed is None else record.seed} "
        f"instance={record.instance or '-'} model={quoted(record.model)} id={quoted(record.request_id)}"
    )


def _images(record: RequestRecord) -> str:
    if record.image_wait is None:
        return ""
    return f"image_wait={_seconds(record.image_wait)} encode={_seconds(record.encode)} "


def quoted(text: str) -> str:
    """A text that a client chose, as one word: a JSON string when it could pass for several, or for another field."""
    return text if text.isprintable() and not AMBIGUOUS & set(text) else json.dumps(text)


def _seconds(value: float | None) -> str:
    """Nine characters: milliseconds below a second, seconds from there."""
    if value is None:
        return f"{'-':<9}"
    return f"{f'{value * 1000:.2f}ms' if value < 1 else f'{value:.2f}s':<9}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a request's fields stand at the top level.

    Args:
        process: which of several processes it is that writes; "" where there is one.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": _timestamp(record), "level": record.levelname, "logger": record.name}
        line |= self._process
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        shown = f" [{process.replace('%', '%%')}]" if process else ""
        super().__init__(f"%(asctime)s %(levelname)-7s %(name)s{shown}: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _timestamp(record)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records immediately, but requests' lines together when it is flushed."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        at_once = record.name != logger.name
        if at_once:
            log_ended()  # the order stays
        try:
            self._lines.append(self.format(record) + self.terminator)
        except Exception:
            self.handleError(record)
        if at_once:
            self.flush()

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext():
            lines, self._lines = self._lines, []
            with contextlib.suppress(OSError, ValueError):  # standard error is closed
                self.stream.write("".join(lines))
                self.stream.flush()


def setup_logging(level: str, format: Format, process: str = "") -> None:
    """Send every logger of the process to standard error, once, in one format.

    Args:
        level: a name such as "INFO".
        process: its name, where several write to the same place.
    """
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _timestamp(record: logging.LogRecord) -> str:
    """ISO 8601, UTC, with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
