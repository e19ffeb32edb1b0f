"""Prefix keys name what a block's KV was computed from: the tokens, and the media that some of them stand for."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import MediaSpan
from penstock.kv.keys import extend_keys, root_key

ROOT = root_key("model")


def keys_of(tokens: list[int], media: tuple[MediaSpan, ...] = (), pieces: tuple[int, ...] = ()) -> list[bytes]:
    keys: list[bytes] = []
    for blocks in (*pieces, len(tokens) // BLOCK_TOKENS):
        extend_keys(keys, ROOT, tokens, blocks, media)
    return keys


@st.composite
def prompts(draw):
    """Tokens, and spans of them in order: beside each other, across blocks, of one token."""
    tokens = [7] * draw(st.integers(BLOCK_TOKENS, 6 * BLOCK_TOKENS))
    gaps = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 150)), min_size=1, max_size=4))
    ends = accumulate(gap + length for gap, length in gaps)
    spans = [MediaSpan(end - length, length, b"one") for end, (_, length) in zip(ends, gaps, strict=True)]
    fitting = tuple(span for span in spans if span.start + span.length <= len(tokens))
    return tokens, fitting


@given(prompts(), st.data())
def test_media_tell_blocks_apart_from_the_first_that_they_touch(prompt, data):
    tokens, media = prompt
    plain = keys_of(tokens)
    assert len(set(plain)) == len(plain)
    if not media:
        return
    keys = keys_of(tokens, media)
    assert keys_of(tokens, media, tuple(sorted(data.draw(st.lists(st.integers(0, len(keys))))))) == keys
    untouched = media[0].start // BLOCK_TOKENS
    assert keys[:untouched] == plain[:untouched]
    assert not set(keys[untouched:]) & set(plain)

    changed = data.draw(st.integers(0, len(media) - 1))
    span = media[changed]
    for other in (
        MediaSpan(span.start, span.length, b"two"),
        MediaSpan(span.start, span.length, b"one more"),
        *([MediaSpan(span.start, span.length - 1, span.digest)] if span.length > 1 else []),
    ):
        others = keys_of(tokens, (*media[:changed], other, *media[changed + 1 :]))
        touched = span.start // BLOCK_TOKENS
        assert others[:touched] == keys[:touched]
        assert not set(others[touched:]) & set(keys)


def test_keys_without_media_are_what_they_were():
    found = keys_of([*range(2 * BLOCK_TOKENS)])
    assert [key.hex() for key in found] == ["2a7d70163f57c356946985cfd7704cd8", "83dac42c9a099fa9c7f33a4e92905332"]
