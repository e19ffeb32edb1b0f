"""Groups of layers: how they are made, what each needs at once, and which prefixes are found."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import attention_groups, bytes_per_block, bytes_per_token
from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.groups import (
    WHOLE,
    first_seen,
    key_of,
    largest_chunk,
    longest_sequence,
    most_held,
    parent_of,
)
from penstock.kv.pool import BlockPool
from penstock.sched.local.sequence import Sequence
from tests.helpers.engines import make_request

GEMMA_27B = tuple(None if (i + 1) % 6 == 0 else 1024 for i in range(62))
windows = st.sampled_from([None, None, 1, 2, 63, 64, 65, 100, 200, 1000])
some = st.lists(windows, min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ((None,) * 28, [28]),
        ((4096,) * 32, [32]),
        (tuple(None if (i + 1) % 6 == 0 else 512 for i in range(26)), [4, 3, 4, 4, 3, 4, 4]),  # Gemma 3, 1B
        (GEMMA_27B, [10, 8, 9, 9, 8, 9, 9]),
        ((128, None) * 12, [12, 12]),  # gpt-oss, 20B
        ((None, 100, 100, 100, 100, None, None, None, None), [5, 4]),  # nearly as many of both
        ((None, 100, 100, 100, 100, None, None), [3, 2, 2]),
        ((None, 50, 100), [1, 1, 1]),
    ],
)
def test_layers_are_grouped_so_that_all_blocks_are_alike(layers, sizes):
    groups = attention_groups(layers, 2, 4, "bfloat16")
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    assert all({layers[layer] for layer in group.layers} == {group.window} for group in groups)
    assert [len(group.layers) for group in groups] == sizes
    assert groups[0].window == (None if None in layers else max(layers))
    assert bytes_per_block(groups) == max(sizes) * 2 * 2 * 4 * 2 * BLOCK_TOKENS
    assert bytes_per_token(groups) == len(layers) * 2 * 2 * 4 * 2


def test_a_long_sequence_of_gemma_needs_a_fifth_of_the_blocks():
    groups = attention_groups(GEMMA_27B, 16, 128, "bfloat16")
    held = tuple(group.window for group in groups)
    for tokens, share, of_windows in ((4096, 0.478, 0.391), (32768, 0.185, 0.049), (131072, 0.153, 0.012)):
        blocks = tokens // BLOCK_TOKENS
        assert most_held(held, tokens, 512) / (len(held) * blocks) == pytest.approx(share, abs=1e-3)
        assert most_held(held[1:], tokens, 512) / (len(held[1:]) * blocks) == pytest.approx(of_windows, abs=1e-3)


@given(some, st.integers(1, 3000), st.integers(1, 300), st.integers(0, 3000))
def test_no_sequence_holds_more_at_once_than_was_said_before(windows, tokens, chunk, found):
    """However it is cut, and also if some of it was found."""
    most = most_held(windows, tokens, chunk)
    sequence = Sequence(make_request("a", [1] * tokens), 0, 0.0, windows=windows)
    sequence.computed = min(found, tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    sequence.blocks = [0] * sequence.blocks_until(sequence.computed)
    sequence.dropped = sequence.seen_from(sequence.computed)
    promised = len(sequence.held) + sequence.missing(chunk)
    while sequence.pending:
        sequence.dropped = sequence.seen_from(sequence.computed)
        before = len(sequence.held) + sequence.missing(chunk)
        sequence.computed = min(sequence.computed + chunk, tokens)
        sequence.blocks = [0] * sequence.blocks_until(sequence.computed)
        assert len(sequence.held) <= before <= max(promised, most)
        assert promised <= most + len(windows)
    assert sequence.missing(chunk) == 0


@given(some, st.integers(2, 3000), st.integers(1, 200))
def test_the_chunk_and_the_length_that_fit_are_the_largest(windows, tokens, blocks):
    chunk = largest_chunk(windows, tokens, blocks)
    assert not chunk or most_held(windows, tokens, chunk) <= blocks
    if chunk < tokens:
        assert most_held(windows, tokens, chunk + BLOCK_TOKENS) > blocks
    length = longest_sequence(windows, 512, blocks, tokens)
    assert most_held(windows, length, min(512, length)) <= blocks
    if length < tokens:
        assert most_held(windows, length + 1, min(512, length + 1)) > blocks


@settings(max_examples=200)
@given(some, st.integers(0, 12), st.data())
def test_the_longest_prefix_is_found_that_has_all_that_is_seen(windows, count, data):
    groups = len(windows)
    pool = BlockPool(range(count * groups + 1), windowed=True)
    keys = [bytes([i + 1] * 16) for i in range(count)]
    there = {}
    for i in range(count):
        for group in range(groups):
            if data.draw(st.integers(0, 7)):
                (block,) = pool.allocate(1)
                there[i, group] = pool.publish(block, key_of(keys[i], group), parent_of(b"", group))
    hit = pool.find(keys, windows)

    def whole(length: int) -> bool:
        seen = [first_seen(window, length * BLOCK_TOKENS) for window in windows]
        return all((i, group) in there for group in range(groups) for i in range(seen[group], length))

    assert hit.length == max(length for length in range(count + 1) if whole(length))
    assert hit.tokens == hit.length * BLOCK_TOKENS
    assert len(hit.blocks) == hit.length * groups
    for place, block in enumerate(hit.blocks):
        i, group = divmod(place, groups)
        assert block == there[max(i, hit.dropped[group]), group]
    assert len(set(hit.held)) == len(hit.held) == len(hit.blocks) - sum(hit.dropped)
    assert set(hit.held) >= set(hit.blocks)


def test_with_one_group_nothing_is_other_than_without():
    assert key_of(b"k" * 16, 0) == b"k" * 16
    assert parent_of(b"p" * 16, 0) == b"p" * 16
    assert len({key_of(b"k" * 16, group) for group in range(300)}) == 300
    assert most_held(WHOLE, 1000, 64) == 16
