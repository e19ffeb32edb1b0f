"""Stores of blocks, their places, and what befalls them. As a program: an engine's end of one, without the engine."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from os import rename
from pathlib import Path

from penstock.cli.engine import preset_mooncake
from penstock.core.errors import Unavailable
from penstock.transfer.block_store import Backend, BlockStore
from penstock.transfer.memory import PAGE, PoolMemory
from penstock.transfer.store_url import StoreURL
from penstock.transfer.stores import BACKENDS, open_store
from tests.helpers.mooncake import memory_owner, mooncake_master

BLOCK_BYTES = 20_000  # no whole pages
RECORD_BYTES = 6 * PAGE
NAMESPACE = "model-1"
ROOM, SECONDS = 683, 5  # of 16 MiB, which Mooncake gives in one piece
MASTER_FLAGS = ("--put_start_discard_timeout_sec=1", "--put_start_release_timeout_sec=2", "--default_kv_lease_ttl=2000")
Blocks = list[tuple[bytes, memoryview]]


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def contents(number: int, size: int = BLOCK_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


def blocks(*numbers: int) -> Blocks:
    """To be put."""
    return [(key(number), memoryview(contents(number))) for number in numbers]


def buffers(*numbers: int) -> Blocks:
    """To be got."""
    return [(key(number), memoryview(bytearray(BLOCK_BYTES))) for number in numbers]


def got(store: BlockStore, *numbers: int) -> int:
    """How many came. AssertionError when one of them is not what was put, or more was written to than came."""
    asked = buffers(*numbers)
    count = store.get(asked)
    for place, (number, (_, buffer)) in enumerate(zip(numbers, asked, strict=True)):
        assert buffer == (contents(number) if place < count else bytes(BLOCK_BYTES)), f"block {number}"
    return count


@dataclass
class Place:
    """Where a store lies.

    Attributes:
        url: of a store with room for thousands of blocks.
        small: of another one, with room for `room` blocks or a few more.
        seconds: its time-out.
        stop: nobody answers there, until `go_on`; what is begun meanwhile hangs or fails.
    """

    url: str
    small: str
    room: int
    seconds: float
    stop: Callable[[], None]
    go_on: Callable[[], None]

    def open(self, namespace: str = NAMESPACE, url: str = "", block_bytes: int = BLOCK_BYTES) -> BlockStore:
        return open_store(url or self.url, namespace, block_bytes)


@contextmanager
def directory(folder: Path) -> Iterator[Place]:
    away = folder.with_name("away")
    folder.mkdir()
    yield Place(
        url=f"file://{folder}?timeout=20",
        small=f"file://{folder}?timeout=20&size={256 * 2 * RECORD_BYTES}",
        room=512,
        seconds=20,
        stop=lambda: rename(folder, away),
        go_on=lambda: rename(away, folder),
    )


@contextmanager
def mooncake(folder: Path) -> Iterator[Place]:
    folder.mkdir()
    preset_mooncake()
    with ExitStack() as stack:
        masters = [stack.enter_context(mooncake_master(folder, *MASTER_FLAGS)) for _ in range(2)]
        stack.enter_context(memory_owner(masters[0].address, 256 << 20))
        stack.enter_context(memory_owner(masters[1].address, ROOM * RECORD_BYTES))
        url, small = (f"mooncake://{master.address}?segment=0&timeout={SECONDS}" for master in masters)
        yield Place(
            url=url,
            small=small,
            room=ROOM,
            seconds=SECONDS,
            stop=partial(masters[0].send, signal.SIGSTOP),
            go_on=partial(masters[0].send, signal.SIGCONT),
        )


class Raw:
    """Records as they lie there, of any length."""

    def __init__(self, backend: Backend, record_bytes: int) -> None:
        self._backend = backend
        self.memory = PoolMemory.anonymous(1, record_bytes)
        backend.open(self.memory)

    def read(self, key: bytes) -> bytes:
        assert list(self._backend.read([key], [0])) == [True]
        return bytes(self.memory.block(0))

    def replace(self, key: bytes, record: bytes) -> None:
        self._backend.drop(key)
        self.memory.block(0)[:] = record
        assert list(self._backend.write([key], [0])) == [True]

    def close(self) -> None:
        self._backend.close()
        self.memory.close()


def raw(url: str, namespace: str = NAMESPACE, record_bytes: int = RECORD_BYTES) -> closing[Raw]:
    parsed = StoreURL(url)
    return closing(Raw(BACKENDS[parsed.scheme](parsed, namespace), record_bytes))


@contextmanager
def engine(url: str, *numbers: int) -> Iterator[subprocess.Popen[str]]:
    """A process that puts and gets these blocks until it is killed, and says what has become of them line by line."""
    words = [sys.executable, "-m", __name__, url, *map(str, numbers)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def main(url: str, numbers: Sequence[int]) -> None:
    """Prints "N put, N got" of every round."""
    with closing(open_store(url, NAMESPACE, BLOCK_BYTES)) as store:
        while True:
            order = random.sample(numbers, len(numbers))
            kept = count = 0
            with suppress(Unavailable):
                kept = sum(store.put(blocks(*order)))
                count = sum(got(store, number) for number in order)
            print(f"{kept} put, {count} got", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(number) for number in sys.argv[2:]])
