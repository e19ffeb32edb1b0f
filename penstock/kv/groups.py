"""Groups of layers as bookkeeping: which blocks of a sequence each of them needs, and how many at once.

A sequence has one block of each group for every BLOCK_TOKENS positions (`core.layout.attention_groups`). They are one
list, in order of positions, and for the same positions in the order of the groups: the block at `place` is of group
`place % groups` and holds positions from `place // groups * BLOCK_TOKENS` on. A group with a window needs no blocks
before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.keys import KEY_BYTES

Windows = tuple[int | None, ...]  # of each group: positions that a token sees, itself included; None is all before it
WHOLE: Windows = (None,)  # of a model with one group, which sees everything
BESIDE = bytes(KEY_BYTES)  # stands for the parent of a block that is found by its own key alone


def key_of(key: bytes, group: int) -> bytes:
    """The key of a group's block, where `key` names the tokens up to its end; it is that of the first group itself."""
    return key if not group else key[:-2] + (int.from_bytes(key[-2:]) ^ group).to_bytes(2)


def parent_of(parent: bytes, group: int) -> bytes:
    """What a group's block is published behind. Those of the first group are a chain from the first one on, which other
    instances know a prefix by; the others are found beside them, each by its own key alone."""
    return parent if not group else BESIDE


def first_seen(window: int | None, position: int) -> int:
    """Index of the first block that a row at a position sees, and so of the first that any row from there on does; the
    block before the row's own is seen in any case, so that something stands in for those that are gone."""
    return 0 if window is None else max(0, position + 1 - max(window, 2)) // BLOCK_TOKENS


def most_held(windows: Windows, tokens: int, chunk: int) -> int:
    """Blocks that a sequence of so many tokens holds at once at most, when it is computed in chunks: of a group with a
    window those of the window before a chunk, and of the chunk."""
    total = -(-tokens // BLOCK_TOKENS)
    return sum([total if window is None else min(total, spanned(window, chunk)) for window in windows])


def largest_chunk(windows: Windows, tokens: int, num_blocks: int) -> int:
    """Tokens of a chunk at most, a multiple of BLOCK_TOKENS, if a sequence of so many tokens is to fit so many blocks;
    0 when it does not fit at all."""
    low, high = 0, -(-tokens // BLOCK_TOKENS)
    while low < high:
        middle = (low + high + 1) // 2
        if most_held(windows, tokens, middle * BLOCK_TOKENS) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_TOKENS


def longest_sequence(windows: Windows, chunk: int, num_blocks: int, most: int) -> int:
    """Tokens of the longest sequence that fits so many blocks; at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if most_held(windows, middle, min(chunk, middle)) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def spanned(window: int, chunk: int) -> int:
    """Blocks of a group with a window that the rows of a chunk see at most, wherever it begins."""
    return (max(window, 2) + chunk + 2 * BLOCK_TOKENS - 3) // BLOCK_TOKENS


def held_of(blocks: list[int], dropped: Sequence[int]) -> list[int]:
    """Of a sequence's blocks those that were not given back."""
    groups = len(dropped)
    return [block for place, block in enumerate(blocks) if place // groups >= dropped[place % groups]]


def stand_in(blocks: list[int], groups: int, group: int, end: int) -> None:
    """Have the block after them in the places of a group's first `end` blocks."""
    blocks[group : end * groups : groups] = [blocks[end * groups + group]] * end


def keys_of_all(keys: Sequence[bytes], groups: int) -> list[Sequence[bytes]]:
    """Of each group's blocks."""
    return [keys if not group else [key_of(key, group) for key in keys] for group in range(groups)]


def reach(windows: Windows, tables: Sequence[Sequence[int | None]], most: int) -> int:
    """How many leading blocks up to `most` make a prefix of which there is everything that the tokens after it see.

    Args:
        tables: for each group what there is of its blocks, None where there is nothing.
    """
    before = -1
    while most != before:
        before = most
        for window, table in zip(windows, tables, strict=True):
            most = _reach(window, table, most)
    return most


def _reach(window: int | None, table: Sequence[int | None], most: int) -> int:
    """The longest prefix up to `most` blocks of which one group has all that is needed."""
    if window is None:
        return next((i for i in range(most) if table[i] is None), most)
    end, place = most, most
    while place > first_seen(window, end * BLOCK_TOKENS):
        place -= 1
        if table[place] is None:
            end = place
    return end
