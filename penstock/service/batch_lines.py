"""A batch's input: JSONL as OpenAI has it, one request a line, checked as a whole before anything runs; and the lines
of its results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_ERRORS = 100  # that are told of one input
MOST_ID_CHARS = 512
BOM = b"\xef\xbb\xbf"
SKIPPED = 1 << 16  # bytes of a line that is too long, at a time
LOOK = 1000  # lines between two questions whether it is still wanted
MODEL = re.compile(r"^[^\x00-\x1f]{1,512}$")

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode


class LineError(msgspec.Struct):
    """What is wrong with an input, as OpenAI tells it. Lines are counted from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BadLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class Line:
    """
    Attributes:
        number: of the line in its file, from 1.
        model: None where it names none.
        body: of the request, as it came, field by field.
    """

    number: int
    custom_id: str
    model: str | None
    body: dict[str, msgspec.Raw]

    def request(self) -> bytes:
        """The body to send: offline work, whatever it says."""
        return encode(self.body | {"service_tier": msgspec.Raw(b'"flex"')})


@dataclass(frozen=True, slots=True)
class Checked:
    """What an input is: errors, or lines that can run.

    Attributes:
        model: that all lines name; None where none names any.
    """

    total: int
    model: str | None
    errors: list[LineError]


class Record(msgspec.Struct, omit_defaults=False):
    """One line of an output or error file."""

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: dict[str, str] | None


def answered(batch: str, line: Line, status: int, body: bytes) -> bytes:
    """The line of a result. `body` is JSON."""
    name = request_id(batch, line.number)
    response = {"status_code": status, "request_id": name, "body": msgspec.Raw(body)}
    return encode(Record(name, line.custom_id, response, None))


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)
    completion_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Body(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


_decode_usage = msgspec.json.Decoder(_Body).decode


def tokens_of(body: bytes) -> tuple[int, int, int, int]:
    """What an answer says of tokens: of its prompt, those of them that were cached, its outputs', and what of these is
    reasoning."""
    usage = _decode_usage(body).usage
    cached, thought = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details.reasoning_tokens
    return usage.prompt_tokens, cached, usage.completion_tokens, thought


def not_run(batch: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """The line of what never ran."""
    return encode(Record(request_id(batch, number), custom_id, None, {"code": code, "message": message}))


def request_id(batch: str, number: int) -> str:
    """The same whenever a line runs, and wherever."""
    return f"batch_req_{batch.removeprefix('batch_')}-{number}"


def read_lines(path: Path, endpoint: str, longest: int) -> Iterator[Line | LineError]:
    """The lines of an input that are not blank. Raises OSError.

    Args:
        longest: bytes of a line, at most.
    """
    with path.open("rb") as file:
        number = 0
        while data := file.readline(longest + 1):
            number += 1
            try:
                if len(data) > longest and not data.endswith(b"\n"):
                    rest = data
                    while rest and not rest.endswith(b"\n"):
                        rest = file.readline(SKIPPED)
                    raise BadLine("line_too_long", f"the line has more than the {longest} bytes that are allowed")
                if number == 1:
                    data = data.removeprefix(BOM)
                if data := data.strip():
                    yield _line(data, number, endpoint)
            except BadLine as error:
                yield LineError(error.code, f"line {number}: {error}", error.param, number)


def check_lines(
    path: Path, endpoint: str, longest: int, served: Sequence[Sequence[str]], wanted: Callable[[], bool] = lambda: True
) -> Checked:
    """Look at every line. Raises OSError.

    Args:
        served: names of each model that is served.
        wanted: when it is no longer, what was found so far is returned.
    """
    errors: list[LineError] = []
    ids: dict[str, int] = {}  # of custom ids, their lines
    total, model = 0, None
    for line in read_lines(path, endpoint, longest):
        total += 1
        if isinstance(line, LineError):
            errors.append(line)
        else:
            model = model if ids else line.model
            errors += _misfits(line, ids, model, served)
            ids.setdefault(line.custom_id, line.number)
        if len(errors) >= MOST_ERRORS or (total % LOOK == 0 and not wanted()):
            break
    if not total:
        errors.append(
            LineError("empty_file", "the input file has no requests, at least one is needed", "input_file_id")
        )
    return Checked(total, model, errors[:MOST_ERRORS])


def _misfits(
    line: Line, ids: dict[str, int], model: str | None, served: Sequence[Sequence[str]]
) -> Iterator[LineError]:
    """What is wrong with it beside the others.

    Args:
        ids: lines by custom id.
        model: that the others name.
    """
    number = line.number
    if (first := ids.get(line.custom_id)) is not None:
        message = f"line {number}: custom_id: {line.custom_id!r} is line {first}'s already, each line needs its own"
        yield LineError("duplicate_custom_id", message, "custom_id", number)
    names = [name for each in served for name in each]
    if line.model is None and len(served) > 1:
        message = f"line {number}: body.model: missing, allowed are {', '.join(names)}"
        yield LineError("missing_required_parameter", message, "body.model", number)
    elif line.model is not None and line.model not in names:
        message = f"line {number}: body.model: {line.model!r} is not served here, allowed is {', '.join(names)}"
        yield LineError("model_not_found", message, "body.model", number)
    elif line.model != model:
        message = f"line {number}: body.model: {line.model!r}, in the lines before {model!r}; a batch has one model"
        yield LineError("mismatched_model", message, "body.model", number)


def _line(data: bytes, number: int, endpoint: str) -> Line:
    """Raises BadLine."""
    try:
        fields = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadLine("invalid_json_line", "this is no JSON object") from None
    custom_id = _text(fields, "custom_id")
    if not 1 <= len(custom_id) <= MOST_ID_CHARS:
        raise BadLine("invalid_value", f"custom_id: allowed are 1 to {MOST_ID_CHARS} characters", "custom_id")
    if (method := _text(fields, "method")) != "POST":
        raise BadLine("invalid_method", f"method: {method[:64]!r}, allowed is POST", "method")
    if (url := _text(fields, "url")) != endpoint:
        raise BadLine("invalid_url", f"url: {url[:64]!r}, allowed is the batch's endpoint, {endpoint}", "url")
    if "body" not in fields:
        raise BadLine("missing_required_parameter", "body: missing, it is required", "body")
    try:
        body = _decode(fields["body"])
    except msgspec.DecodeError:
        raise BadLine("invalid_type", "body: allowed is an object", "body") from None
    try:
        stream, model = (_decode_any(body[name]) if name in body else None for name in ("stream", "model"))
    except msgspec.DecodeError:
        raise BadLine("invalid_json_line", "this is no JSON object") from None
    if stream not in (None, False):
        raise BadLine("invalid_value", "body.stream: allowed is false, a batch's answers come in a file", "body.stream")
    if model is not None and not (isinstance(model, str) and MODEL.match(model)):
        raise BadLine("invalid_type", "body.model: allowed is a string", "body.model")
    return Line(number, custom_id, model, body)


def _text(fields: dict[str, msgspec.Raw], name: str) -> str:
    """Raises BadLine."""
    if name not in fields:
        raise BadLine("missing_required_parameter", f"{name}: missing, it is required", name)
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadLine("invalid_type", f"{name}: allowed is a string", name) from None


class LineReader:
    """The lines that are left to run, in order, some at a time. Blocks, as files do; for one thread at a time.

    Args:
        done: numbers of those that are answered.

    Attributes:
        ended: there are no more.
    """

    def __init__(self, path: Path, endpoint: str, longest: int, done: set[int]) -> None:
        lines = read_lines(path, endpoint, longest)
        self._lines = (line for line in lines if isinstance(line, Line) and line.number not in done)
        self.ended = False

    def next(self, count: int, size: int) -> list[Line]:
        """At most so many, and no more when these have `size` bytes. Raises OSError."""
        found: list[Line] = []
        while len(found) < count and size > 0:
            line = next(self._lines, None)
            if line is None:
                self.ended = True
                break
            found.append(line)
            size -= sum(len(bytes(value)) for value in line.body.values())
        return found
