"""What a cache without end would have found."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.ideal import IdealCache
from penstock.kv.keys import extend_keys, root_key, salted

ROOT = root_key("m")


def keys_of(blocks, root=ROOT):
    """A block's number stands for its tokens."""
    keys = []
    extend_keys(keys, root, [number for number in blocks for _ in range(BLOCK_TOKENS)], len(blocks))
    return keys


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(1, BLOCK_TOKENS)), max_size=30)


@given(PROMPTS)
def test_it_finds_what_any_prompt_before_began_with(prompts):
    ideal, before, tokens, found = IdealCache(), [], 0, 0
    for blocks, rest in prompts:
        length = len(blocks) * BLOCK_TOKENS + rest - 1  # a block's last token may be the prompt's
        if not length:
            continue
        common = [
            next((i for i, (x, y) in enumerate(zip(b, blocks, strict=False)) if x != y), min(len(b), len(blocks)))
            for b in before
        ]
        expected = min(max(common, default=0), (length - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        assert ideal.ask(keys_of(blocks), length) == expected
        before.append(blocks)
        tokens, found = tokens + length, found + expected
    assert (ideal.prompt_tokens, ideal.found_tokens, ideal.complete) == (tokens, found, True)


def test_what_was_generated_is_found_too():
    ideal = IdealCache()
    ideal.ask(keys_of([1]), 100)
    ideal.learn(keys_of([1, 2]))
    assert ideal.ask(keys_of([1, 2, 3]), 200) == 128


def test_another_salt_finds_nothing():
    ideal = IdealCache()
    ideal.ask(keys_of([1, 2]), 200)
    assert ideal.ask(keys_of([1, 2], salted(ROOT, "theirs")), 200) == 0
    assert ideal.ask(keys_of([1, 2], salted(ROOT, "theirs")), 200) == 128


@given(PROMPTS, st.integers(2, 20))
def test_with_less_memory_it_says_that_it_finds_too_little(prompts, most):
    ideal, bounded = IdealCache(), IdealCache(most)
    for blocks, rest in prompts:
        length = len(blocks) * BLOCK_TOKENS + rest
        assert bounded.ask(keys_of(blocks), length) <= ideal.ask(keys_of(blocks), length)
        assert bounded._new.count + bounded._old.count <= max(2, most)
    assert bounded.found_tokens == ideal.found_tokens or not bounded.complete


def test_what_is_used_stays():
    ideal = IdealCache(most=8)
    for number in range(100):
        assert ideal.ask(keys_of([7]), 100) == (64 if number else 0)
        ideal.ask(keys_of([8 + number]), 100)
    assert not ideal.complete
    assert ideal.ask(keys_of([8]), 100) == 0
