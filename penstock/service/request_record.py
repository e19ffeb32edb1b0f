"""Requests as they were served, with what came of them: one JSON object a line, from which `penstock replay` runs them
again.

A record is a folder with FRONTEND.jsonl of each frontend, and FRONTEND.jsonl.1 from before its last rotation. A line
stands for itself, so that files may be joined and filtered, but for images and videos: each is a line of its own
(`RecordedFile`), before the first request of its file that has it. A line without an end is being written, or was when
its frontend was killed; it is not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.request import MediaKind
from penstock.core.sampling import SamplingParams

VERSION = 1
BEGINS = b'{"version":'  # every line
FIRST = 32  # bytes of a line that have its version and the name of its next field
SUFFIX, OLDER = ".jsonl", ".1"
RESOLVED = {"seed", "max_tokens", "truncate_prompt_tokens", "truncation_side"}  # a record has what came of them
LOWEST = -9999.0  # stands for minus infinity in log-probabilities, which JSON has not
_PARAMS = tuple(f.name for f in fields(SamplingParams) if f.name not in RESOLVED)


class RecordedOutput(msgspec.Struct, omit_defaults=True):
    """
    Attributes:
        tokens: all that the client was due, the one that ended it among them.
        finish_reason: as the client was told; None where it had not ended.
        stop_reason: see `Delta`.
        logprobs: of these tokens, where the client asked for any; at least `LOWEST`.
    """

    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[float] | None = None


class Interruption(msgspec.Struct):
    """An instance was lost, and an output went on elsewhere.

    Attributes:
        output: its number.
        tokens: that it had.
        why: a sentence.
    """

    output: int
    tokens: int
    why: str


class RecordedFile(msgspec.Struct):
    """An image or a video as it came.

    Attributes:
        file: its digest; see `file_digest`.
    """

    version: int
    file: str
    content: bytes


class RecordedMedia(msgspec.Struct):
    """Tokens [start, start + length) of a prompt stand for an image or a video: the one of `RecordedFile.file`."""

    kind: MediaKind
    start: int
    length: int
    file: str


class RecordedRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt of a client's request, with all its outputs.

    Attributes:
        id: in the log.
        at: when it arrived, in seconds since 1970, UTC.
        seconds: from then to its end.
        model: what its client called the model.
        fingerprints: of the engines that it ran on; more than one when it went on at another checkpoint.
        prompt: token ids, after truncation.
        params: fields of `SamplingParams`, but for those in `RESOLVED`.
        seed: of output 0, also where the client gave none; output i has seed + i.
        max_tokens: of each output, cut to the model's length.
        priority, ttft_ms, tpot_ms, offline: see `ServiceLevel`.
        pooling: how it was embedded, which brings no tokens; None for what generates.
        embedding: what came of that, as engines bring it: of the model's own length; None where nothing did.
        instance: where its sequences ran, as in the log.
        interruptions: that it survived.
        media: of its prompt, in order.
        failure: what ended it early; "" when all outputs ended by themselves.
        penstock: version of the server.
    """

    version: int
    id: str
    at: float
    seconds: float
    model: str
    prompt: Sequence[int]
    params: dict[str, Any]
    max_tokens: int
    outputs: list[RecordedOutput]
    fingerprints: list[str] = []
    seed: int | None = None
    priority: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    offline: bool = False
    pooling: str | None = None
    embedding: list[float] | None = None
    instance: str = ""
    interruptions: list[Interruption] = []
    media: list[RecordedMedia] = []
    failure: str = ""
    penstock: str = ""


def file_digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def recorded_params(params: SamplingParams) -> dict[str, Any]:
    """What a record has of them."""
    return {name: getattr(params, name) for name in _PARAMS}


@dataclass(frozen=True, slots=True)
class Line:
    """Where a request is in the files of a record.

    Attributes:
        id, at: see `RecordedRequest`; of a `RecordedFile` its digest, and inf.
        start, length: bytes.
    """

    id: str
    at: float
    file: int
    start: int
    length: int


class RequestRecord:
    """A record that is read; a context that closes its files. Requests are looked at once, and read again when they are
    wanted: a record may be larger than memory.

    Args:
        path: a folder, or one of its files, which brings the one from before its rotation.

    Attributes:
        lines: of requests, by arrival.

    Raises ConfigError when there is no record, or a line is none.
    """

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        try:
            self._files = [self._stack.enter_context(file) for file in _opened(path)]
            if not self._files:
                allowed = f"allowed is a folder of --record-requests, or a file NAME{SUFFIX} of it"
                raise ConfigError(f"RECORD: {path}, {allowed}", "record")
            found = [line for number, file in enumerate(self._files) for line in _scan(number, file)]
        except OSError as error:
            self._stack.close()
            raise ConfigError(f"RECORD: {path} cannot be read ({error.strerror or error})", "record") from None
        except BaseException:
            self._stack.close()
            raise
        self.lines: Sequence[Line] = sorted((line for line in found if line.at < inf), key=lambda line: line.at)
        self._images = {line.id: line for line in found if line.at == inf}

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, line: Line) -> RecordedRequest:
        return _DECODER.decode(self._content(line))

    def has(self, digest: str) -> bool:
        """Whether it has the file of `RecordedMedia.file`."""
        return digest in self._images

    def image(self, digest: str) -> bytes | None:
        """The file of `RecordedMedia.file`; None where it is not in this record."""
        line = self._images.get(digest)
        return None if line is None else _FILE_DECODER.decode(self._content(line)).content

    def _content(self, line: Line) -> bytes:
        return os.pread(self._files[line.file].fileno(), line.length, line.start)


_DECODER = msgspec.json.Decoder(RecordedRequest)
_FILE_DECODER = msgspec.json.Decoder(RecordedFile)


def older_file(path: Path) -> Path:
    """What it was before its last rotation."""
    return path.with_name(path.name + OLDER)


def _opened(path: Path) -> Iterator[BinaryIO]:
    """Each file of a record, what is older before what came after it."""
    names = [path]
    if path.is_dir():
        found = {file.with_name(file.name.removesuffix(OLDER)) for file in path.iterdir()}
        names = sorted(file for file in found if file.suffix == SUFFIX)
    for name in names:
        # the newer one first: where it is rotated meanwhile, it is the same file that comes second
        files = [file.open("rb") for file in (name, older_file(name)) if file.exists()]
        if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
            files.pop().close()
        yield from reversed(files)


def _scan(number: int, file: BinaryIO) -> Iterator[Line]:
    start = 0
    for count, content in enumerate(file, 1):
        if not content.endswith(b"\n"):
            return
        if content.strip():
            found = _decoded(content, f"RECORD: {file.name}:{count}")
            name, at = (found.file, inf) if isinstance(found, RecordedFile) else (found.id, found.at)
            yield Line(name, at, number, start, len(content))
        start += len(content)


def _decoded(content: bytes, named: str) -> RecordedRequest | RecordedFile:
    """Raises ConfigError."""
    try:
        found = (_FILE_DECODER if b'"file"' in content[:FIRST] else _DECODER).decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named}: no recorded request ({error})", "record") from None
    if found.version != VERSION:
        raise ConfigError(f"{named}: version {found.version}, allowed is {VERSION}", "record")
    return found
