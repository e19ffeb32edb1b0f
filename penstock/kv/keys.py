"""Prefix keys: the name of a block is a hash of every token up to its end, and of the media that they stand for.

128 bits of BLAKE2b, chained. A collision would expose another user's text, so the hash is cryptographic; at the
size of a block (a 16-byte parent and 256 bytes of tokens) BLAKE2b and BLAKE3 take the same time, under a microsecond,
and BLAKE2b is in the standard library.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

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
            block += touching(media, len(keys) * BLOCK_TOKENS)
        key = blake2b(key + block, digest_size=KEY_BYTES).digest()
        keys.append(key)


def touching(media: Sequence[MediaSpan], start: int) -> bytes:
    """The spans that overlap with the block from `start` on, so that no two lists of them are the same bytes."""
    found = b""
    for span in media:
        if span.start < start + BLOCK_TOKENS and start < span.start + span.length:
            for number in (span.start, span.length, len(span.digest)):
                found += number.to_bytes(8, "little")
            found += span.digest
    return found
