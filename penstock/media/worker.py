"""A process that decodes: python -m penstock.media.worker. Tasks come on its standard input, and what was made of them
goes to its standard output, each as its length in 8 bytes and msgpack. It ends when its input does."""

from __future__ import annotations

import os
import resource
import sys
from typing import IO

import msgspec

from penstock.core.request import MediaKind
from penstock.media.limits import MediaLimits
from penstock.media.processor import AnyProcessor, Made, Refused

MEMORY = 3 << 30  # bytes of address space


class Task(msgspec.Struct, frozen=True):
    kind: MediaKind
    data: bytes
    processor: AnyProcessor
    limits: MediaLimits
    alone: bool


class Answer(msgspec.Struct, frozen=True):
    """
    Attributes:
        made: None where it is refused, and why.
    """

    made: Made | None
    why: str = ""


def write(file: IO[bytes], body: bytes) -> None:
    file.write(len(body).to_bytes(8, "little"))
    file.write(body)
    file.flush()


def read(file: IO[bytes]) -> bytes | None:
    """None at the end."""
    head = file.read(8)
    if len(head) < 8:
        return None
    size = int.from_bytes(head, "little")
    body = file.read(size)
    return body if len(body) == size else None


def main() -> int:
    from penstock.media.decode import make

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    decode, encode = msgspec.msgpack.Decoder(Task).decode, msgspec.msgpack.Encoder().encode
    while (body := read(source)) is not None:
        task = decode(body)
        try:
            answer = Answer(make(task.kind, task.data, task.processor, task.limits, alone=task.alone))
        except Refused as why:
            answer = Answer(None, str(why))
        except MemoryError:
            answer = Answer(None, "takes more memory to decode than is allowed")
        del body, task
        write(sink, encode(answer))
        del answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
