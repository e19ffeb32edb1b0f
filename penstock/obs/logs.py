"""Log lines: how they look, and the one line that every request leaves behind. Never a prompt, never a token."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec

Format = Literal["text", "json"]

ONLINE, OFFLINE = SERVICE_CLASSES = ("online", "offline")
SLO = {True: "met", False: "missed", None: "-"}

logger = logging.getLogger("penstock.request")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What a request was and how it went, once it is over.

    Attributes:
        request_id: the client's `X-Request-Id`, or ours.
        model: the name that the client called it by.
        instance: where it ran: "engine-0"; "p0>d1" with a hand-off; several, separated by commas, when its outputs
            ran in several places; "" when nowhere.
        prompt_tokens, cached_tokens, completion_tokens: of all its outputs together.
        longest_completion: tokens of its longest output.
        n: how many outputs it has.
        max_tokens: how long each may have become.
        finish_reason: "stop", "length" or "abort"; None when it failed.
        ttft, tpot, e2e, queue, prefill, decode: seconds; None when unknown (no token came, say).
        seed: the one its noise was drawn from; None when no token was asked of an engine.
        service_class: "online", or "offline" for what runs in the gaps that others leave.
        slo_met: whether it kept what its client was promised; None without a promise, and when the client left.
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
    seed: int | None = None
    service_class: str = ONLINE
    slo_met: bool | None = None
    status: int = 200


def log_request(record: RequestRecord, format: Format) -> None:
    """Write the request's line, at level INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return
    if format == "json":
        fields = asdict(record)
        logger.info("%s", msgspec.json.encode(fields).decode(), extra={"fields": fields})
    else:
        logger.info("%s", _line(record))


def _line(record: RequestRecord) -> str:
    return (
        f"{record.status} {record.finish_reason or 'failed':<6} prompt={record.prompt_tokens:<6} "
        f"cached={record.cached_tokens:<6} completion={record.completion_tokens:<6} "
        f"ttft={_seconds(record.ttft)} tpot={_seconds(record.tpot)} e2e={_seconds(record.e2e)} "
        f"queue={_seconds(record.queue)} prefill={_seconds(record.prefill)} decode={_seconds(record.decode)} "
        f"slo={SLO[record.slo_met]:<6} seed={'-' if record.seed is None else record.seed} "
        f"instance={record.instance or '-'} model={record.model} id={record.request_id}"
    )


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


def setup_logging(level: str, format: Format, process: str = "") -> None:
    """Send every logger of the process to standard error, once, in one format.

    Args:
        level: a name such as "INFO".
        process: its name, where several write to the same place.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _timestamp(record: logging.LogRecord) -> str:
    """ISO 8601, UTC, with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
