"""Prefix keys: the name of a block is a hash of every token up to its end, and of the media that they stand for.

128 bits of BLAKE2b, chained. A collision would expose another user's text, so the hash is cryptographic; at the
size of a block (a 16-byte parent and 256 bytes of tokens) BLAKE2b and BLAKE3 take the same time, under a microsecond,
and BLAKE2b is in the standard library.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import MediaSpan

KEY_BYTES = 16
TAIL_INTERVAL = 4  # tokens between two places inside a block at which a match may end
_BLOCK_BYTES = BLOCK_TOKENS * array("I").itemsize


def root_key(*parts: str) -> bytes:
    """The parent key of every first block. `parts` are what separates caches: model, adapter, tenant's salt."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"penstock.root")
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def salted(root: bytes, salt: str) -> bytes:
    """The parent key of first blocks of requests with a cache salt; "" is no salt."""
    if not salt:
        return root
    return blake2b(root + salt.encode(), digest_size=KEY_BYTES, person=b"penstock.salt").digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], full_blocks: int, media: Sequence[MediaSpan] = ()
) -> None:
    """Append the keys that are missing until `keys` names the first `full_blocks` blocks of `tokens`.

    Args:
        media: spans of `tokens`, in order: placeholders are equal for different images, and their KV is not.
    """
    if len(keys) >= full_blocks:
        return
    assert len(tokens) >= full_blocks * BLOCK_TOKENS
    data = array("I", tokens[len(keys) * BLOCK_TOKENS : full_blocks * BLOCK_TOKENS]).tobytes()
    key = keys[-1] if keys else root
    for start in range(0, len(data), _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        if media:
            block += _touching(media, len(keys) * BLOCK_TOKENS)
        key = blake2b(key + block, digest_size=KEY_BYTES).digest()
        keys.append(key)


# --- inside a block


class Tail(NamedTuple):
    """A block in which a match may end.

    Attributes:
        keys: of its first tokens, at the sampled places.
        filled: tokens of it that are known; whole: key of all of these.
    """

    parent: bytes
    keys: Sequence[bytes]
    filled: int
    whole: bytes


def sampled(tokens: int, interval: int) -> range:
    """After how many of a block's first tokens a match may end: every so many, but for the end of a full block, whose
    key says it all (RTP-LLM, section 5.2.3, which begins with the 208th token of a larger block)."""
    return range(interval, min(tokens, BLOCK_TOKENS - 1) + 1, interval)


def beginning_keys(
    parent: bytes, tokens: Sequence[int], start: int, counts: Iterable[int], media: Sequence[MediaSpan] = ()
) -> list[bytes]:
    """Keys of the beginnings of one block, which is full or not.

    Args:
        parent: key of the block before it.
        start: place of its first token in `tokens`.
        counts: tokens of each beginning, in ascending order.
        media: see `extend_keys`.
    """
    spans = _touching(media, start) if media else b""
    digest = blake2b(parent + len(spans).to_bytes(8, "little") + spans, digest_size=KEY_BYTES, person=b"penstock.tail")
    keys, done = [], 0
    for count in counts:
        digest.update(array("I", tokens[start + done : start + count]).tobytes())
        keys.append(digest.digest())
        done = count
    return keys


class TailIndex:
    """The blocks of one instance in which a match may end. Of several with the same beginning the one that was added
    last is found."""

    def __init__(self) -> None:
        self._tails: dict[int, Tail] = {}
        self._block: dict[bytes, int] = {}
        self._behind: Counter[bytes] = Counter()  # tails that have this parent

    def __contains__(self, block: int) -> bool:
        return block in self._tails

    def behind(self, parent: bytes) -> bool:
        """Whether there are any behind that block."""
        return parent in self._behind

    def filled(self, block: int) -> int:
        """Tokens of the block that are known."""
        return self._tails[block].filled

    def find(self, keys: Sequence[bytes]) -> tuple[int, int, Tail] | None:
        """The longest of these beginnings that is there: its place in `keys`, the block, and all of that."""
        for place in reversed(range(len(keys))):
            block = self._block.get(keys[place])
            if block is not None:
                return place, block, self._tails[block]
        return None

    def add(self, block: int, tail: Tail) -> int:
        """What is known of a block. Returns the one that has all of it: perhaps another, and then this one is none."""
        known = self._tails.get(block)
        if known is not None:
            if known.filled >= tail.filled:
                return block
            self.remove(block)
        other = self._block.get(tail.keys[-1])
        if other is not None and self._covers(self._tails[other], tail):
            for key in tail.keys:
                self._block.setdefault(key, other)
            return other
        self._tails[block] = tail
        self._behind[tail.parent] += 1
        for key in tail.keys:
            self._block[key] = block
        return block

    @staticmethod
    def _covers(other: Tail, tail: Tail) -> bool:
        """Whether a block that has this one's last sampled key is known to have all of its tokens."""
        return other.whole == tail.whole or tail.whole == tail.keys[-1]

    def remove(self, block: int) -> None:
        """The block will be something else; nothing if it is none of these."""
        tail = self._tails.pop(block, None)
        if tail is None:
            return
        for key in tail.keys:
            if self._block.get(key) == block:
                del self._block[key]
        self._behind[tail.parent] -= 1
        if not self._behind[tail.parent]:
            del self._behind[tail.parent]

    def items(self) -> Iterable[tuple[int, Tail]]:
        return self._tails.items()

    def check(self) -> None:
        """Raise AssertionError unless what is found is there."""
        assert all(key in self._tails[block].keys for key, block in self._block.items())
        assert self._behind == Counter(tail.parent for tail in self._tails.values())
        assert all(0 < tail.filled <= BLOCK_TOKENS for tail in self._tails.values())


def _touching(media: Sequence[MediaSpan], start: int) -> bytes:
    """The spans that overlap with the block from `start` on, so that no two lists of them are the same bytes."""
    found = b""
    for span in media:
        if span.start < start + BLOCK_TOKENS and start < span.start + span.length:
            for number in (span.start, span.length, len(span.digest)):
                found += number.to_bytes(8, "little")
            found += span.digest
    return found
