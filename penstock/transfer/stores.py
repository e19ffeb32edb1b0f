"""Stores of blocks that engines share: the menu of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf

from penstock.transfer.block_store import Backend, BlockStore
from penstock.transfer.directory import Directory
from penstock.transfer.mooncake_store import MooncakeStore
from penstock.transfer.store_url import StoreURL

BACKENDS: dict[str, Callable[[StoreURL, str], Backend]] = {
    "file": Directory.of_url,
    "mooncake": MooncakeStore.of_url,
}
SECONDS = 5.0


def open_store(url: str, namespace: str, block_bytes: int) -> BlockStore:
    """Open the store at a URL, such as file:///PATH?size=100GiB.

    Args:
        namespace: see `BlockStore`.

    Raises:
        ConfigError: the URL is wrong, or the place cannot be used.
        Unavailable: it cannot be reached now.
    """
    backend, name, seconds = _read(url, namespace)
    return BlockStore(backend, name, namespace, block_bytes, seconds)


def check_store(url: str) -> None:
    """Raise ConfigError when the URL is wrong, as far as can be told without its place."""
    _read(url, "any")


def _read(text: str, namespace: str) -> tuple[Backend, str, float]:
    url = StoreURL(text)
    if url.scheme not in BACKENDS:
        raise url.wrong(", ".join(f"{scheme}://..." for scheme in BACKENDS))
    seconds = url.option("timeout", _seconds, SECONDS)
    backend = BACKENDS[url.scheme](url, namespace)
    url.finish()
    return backend, text.partition("?")[0], seconds


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < inf:
            return value
    raise ValueError("seconds, more than 0")
