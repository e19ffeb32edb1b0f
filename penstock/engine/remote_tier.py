"""Copies of KV blocks in a store that engines share, below an engine's cache (`engine.mover`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.layout import KVLayout
from penstock.core.version import VERSION
from penstock.engine.mover import Complaints, Mover
from penstock.kv.connector import Move
from penstock.kv.keys import KEY_BYTES
from penstock.transfer.block_store import BlockStore

if TYPE_CHECKING:  # an engine of a modelled device has none of it
    from penstock.engine.block_views import BlockViews
    from penstock.engine.cache import KVCache

T = TypeVar("T")
Open = Callable[[], BlockStore]
log = logging.getLogger("penstock.engine")
OPTION = "remote-cache"
PIECE_BYTES = 8 << 20  # of a push, after which something else may come first
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds for which a store that failed, or is full, is left alone
TRIALS = 3  # reads at the start, of which the best counts
UNMEASURED = 200e6  # bytes/s of a store of which nothing could be tried
TRIAL = blake2b(b"trial", digest_size=KEY_BYTES).digest()  # the key of what is put and got at the start


class RemoteTier(NamedTuple):
    """
    Attributes:
        name: of the store, and of what in it is the same for all that name the same.
        block_seconds: that getting a block took at the start.
    """

    mover: Mover
    name: str
    block_seconds: float


class _Pause:
    """For which something that has failed is left alone: twice as long each time, until it works."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._next = FIRST_PAUSE

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self._ends

    def begin(self) -> None:
        self._ends = time.monotonic() + self._next
        self._next = min(LONGEST_PAUSE, 2 * self._next)

    def end(self) -> None:
        self._ends, self._next = 0.0, FIRST_PAUSE


class StoreCopier:
    """A `Copier` to and from a store.

    A store that cannot be reached, or takes nothing more, is left alone for a while: whatever is ordered meanwhile
    fails at once.

    Args:
        views: of the device's blocks.
        opens: the store, as often as needed.
        store: as it was opened; None where it was not there.
    """

    def __init__(self, views: BlockViews, opens: Open, store: BlockStore | None) -> None:
        self.piece = max(1, min(views.most, PIECE_BYTES // views.block_bytes))
        self._views, self._opens, self._store = views, opens, store
        self._away, self._full = _Pause(), _Pause()
        self._complain = Complaints()
        if store is None:
            self._away.begin()

    @property
    def block_bytes(self) -> int:
        return self._views.block_bytes

    @property
    def away(self) -> bool:
        return self._away.lasts

    @property
    def full(self) -> bool:
        return self._full.lasts

    def store(self, moves: Sequence[Move]) -> None:
        if self.full:
            raise Unavailable("the remote cache takes nothing")
        keys = [move.key for move in moves]
        there = self._call(lambda store: store.contains(keys))  # others may have put them, the first ones most likely
        rest = moves[there:]
        if not rest:
            return
        views = self._views.of([move.block for move in rest])
        kept = self._call(lambda store: store.put([*zip(keys[there:], views, strict=True)]))
        if all(kept):
            self._full.end()
            return
        self._full.begin()
        raise Unavailable(f"{kept.count(False)} of {len(kept)} were not kept")

    def load(self, moves: Sequence[Move]) -> int:
        count = 0
        while count < len(moves):
            part = moves[count : count + self._views.most]
            blocks = [move.block for move in part]
            views = self._views.into(blocks)
            named = [(move.key, view) for move, view in zip(part, views, strict=True)]
            came = self._call(lambda store, named=named: store.get(named))  # type: ignore[misc]
            self._views.arrived(blocks[:came])
            count += came
            if came < len(part):
                break
        return count

    def find(self, moves: Sequence[Move]) -> int:
        return self._call(lambda store: store.contains([move.key for move in moves]))

    def trial_seconds(self) -> float:
        """That getting a block takes; what is believed where that cannot be tried."""
        size = self.block_bytes
        try:
            return size / UNMEASURED if self.away else self._call(lambda store: _trial_seconds(store, size))
        except Unavailable:
            return size / UNMEASURED

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._views.close()

    def _call(self, call: Callable[[BlockStore], T]) -> T:
        """Raises Unavailable when the store cannot be reached, or could not be a moment ago."""
        if self.away:
            raise Unavailable("the remote cache is away")
        try:
            if self._store is None:
                self._store = self._opens()
            result = call(self._store)
        except Exception as error:
            self._away.begin()
            self._complain("the remote cache fails, all is computed meanwhile: %s", error)
            raise
        self._away.end()
        return result


def open_remote_tier(cache: KVCache, url: str, rounding: str = "1") -> RemoteTier:
    """Open the tier below a cache. Where the store is away it is tried again when it is needed. Raises ConfigError when
    it cannot be used.

    Args:
        rounding: see `Layout.rounding`.
    """
    import torch

    from penstock.engine.block_views import processor_of, views_of

    computed = torch.__version__, processor_of(cache.slots.device), rounding
    namespace = namespace_of(cache.layout, *computed)
    copier = open_copier(views_of(cache), url, namespace)
    seconds = copier.trial_seconds()
    if not copier.away:
        log.info("copies in %s as %s, a block comes in %.2f ms", url, namespace, seconds * 1e3)
    return RemoteTier(Mover(copier), name_of(url, namespace), seconds)


def open_copier(views: BlockViews, url: str, namespace: str) -> StoreCopier:
    """To and from the store at a URL; see `open_remote_tier`."""
    from penstock.transfer import stores  # with libraries that an engine without one never needs

    def opens() -> BlockStore:
        return stores.open_store(url, namespace, views.block_bytes)

    store = None
    try:
        store = opens()
    except Unavailable as error:
        log.warning("%s: %s; it is tried again later, and all is computed meanwhile", OPTION, error)
    return StoreCopier(views, opens, store)


def namespace_of(layout: KVLayout, *computed: object) -> str:
    """Names all that decides what bytes stand for, or that they are the same bits as if they were computed here.

    Args:
        computed: by what.
    """
    parts = (VERSION, *computed, sorted(asdict(layout).items()))
    return blake2b(repr(parts).encode(), digest_size=16, person=b"penstock.remote").hexdigest()


def name_of(url: str, namespace: str) -> str:
    """See `RemoteTier`."""
    return f"{url.partition('?')[0]} {namespace}"


def _trial_seconds(store: BlockStore, size: int) -> float:
    """That getting a block takes. Raises Unavailable."""
    if not all(store.put([(TRIAL, memoryview(os.urandom(size)))])):
        return size / UNMEASURED
    times = []
    for _ in range(TRIALS):
        began = time.perf_counter()
        came = store.get([(TRIAL, memoryview(bytearray(size)))])
        times.append(time.perf_counter() - began)
        if not came:
            return size / UNMEASURED
    return min(times)


def check_remote_tier(url: str, device: str, ranks: int, *, prefix_cache: bool) -> None:
    """Raise ConfigError when there is no such tier below what was asked for.

    Args:
        device: a type, such as "cpu".
        ranks: that the model is spread over.
    """
    from penstock.transfer.stores import check_store

    check_store(url)
    if device == "cuda" and ranks > 1:
        what = f"on {device} with {ranks} ranks"
        raise ConfigError(f"{OPTION}: {url!r}, not supported yet {what}, allowed with 1, or on a CPU", OPTION)
    if not prefix_cache:
        raise ConfigError(f"{OPTION}: {url!r} without prefix caching, allowed only with enable-prefix-caching", OPTION)
