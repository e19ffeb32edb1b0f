import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workload.requests import (
    WorkRequest,
    between,
    follow_chats,
    limit_context,
    materialise,
    offered_rate,
    reusable_tokens,
    safe_ids,
    scale_rate,
    spread_ticks,
    unrelated,
)

IDS = safe_ids(5000)


def request(number=0, at=0.0, prompt=100, output=10, prefix=(), block=0):
    return WorkRequest(
        number=number, at=at, prompt_tokens=prompt, output_tokens=output, prefix=tuple(prefix), block_tokens=block
    )


def test_safe_ids_leave_special_tokens_out():
    assert safe_ids(6, special=[0, 4]).tolist() == [1, 2, 3, 5]


@given(
    st.integers(1, 200),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 60),
    st.integers(0, 5),
    st.integers(0, 9),
)
def test_tokens_have_the_asked_length_range_and_prefix(prompt, prefix, block, seed, number):
    ids = safe_ids(300, special=range(0, 300, 7))
    tokens = materialise(request(number=number, prompt=prompt, prefix=prefix, block=block), seed, ids)
    assert tokens.shape == (prompt,)
    assert set(tokens.tolist()) <= set(ids.tolist())
    longer = materialise(request(number=number + 1, prompt=prompt + 500, prefix=prefix, block=block), seed, ids)
    shared = min(len(prefix) * block, prompt)
    assert tokens[:shared].tolist() == longer[:shared].tolist()


def test_tokens_depend_on_seed_number_and_block_and_nothing_else():
    one = request(prompt=256, prefix=[7], block=128)
    tokens = materialise(one, 1, IDS).tolist()
    assert materialise(one, 1, IDS).tolist() == tokens
    assert materialise(request(prompt=256, prefix=[7], block=128, number=1), 1, IDS)[:128].tolist() == tokens[:128]
    assert materialise(request(prompt=256, prefix=[7], block=128, number=1), 1, IDS)[128:].tolist() != tokens[128:]
    assert materialise(request(prompt=256, prefix=[8], block=128), 1, IDS)[:128].tolist() != tokens[:128]
    assert materialise(one, 2, IDS)[:128].tolist() != tokens[:128]
    assert materialise(one, 2, IDS)[128:].tolist() != tokens[128:]
    # a shared block and private tokens of the same number are different streams
    assert materialise(request(prompt=64, number=7), 1, IDS).tolist() != tokens[:64]


def test_rate_of_arrivals():
    spaced = [request(number=i, at=2.0 + 0.5 * i) for i in range(11)]
    assert offered_rate(spaced) == pytest.approx(2.0)
    assert offered_rate(scale_rate(spaced, 3.0)) == pytest.approx(6.0)
    assert math.isinf(offered_rate([request(), request(number=1)]))


def test_between_counts_time_from_its_start():
    spaced = [request(number=i, at=float(i)) for i in range(10)]
    part = between(spaced, 3.0, 6.0)
    assert [(r.number, r.at) for r in part] == [(3, 0.0), (4, 1.0), (5, 2.0)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50), st.integers(0, 1000))
def test_spreading_keeps_order_and_stays_inside_the_tick(ticks, seed):
    requests = [request(number=i, at=3.0 * tick) for i, tick in enumerate(sorted(ticks))]
    spread = spread_ticks(requests, 3.0, np.random.default_rng(seed))
    assert [r.number for r in spread] == list(range(len(ticks)))
    times = [r.at for r in spread]
    assert times == sorted(times)
    assert all(old.at <= new.at < old.at + 3.0 for old, new in zip(requests, spread, strict=True))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=20), st.integers(2, 400))
def test_limit_context_cuts_what_does_not_fit_and_only_that(lengths, limit):
    requests = [request(number=i, prompt=p, output=o) for i, (p, o) in enumerate(lengths)]
    fitting, cut = limit_context(requests, limit)
    assert cut == sum(p + o > limit for p, o in lengths)
    for old, new in zip(requests, fitting, strict=True):
        assert new.prompt_tokens >= 1
        assert new.output_tokens >= 1
        if old.prompt_tokens + old.output_tokens <= limit:
            assert new == old
        else:
            assert new.prompt_tokens + new.output_tokens == limit


def test_limit_context_keeps_the_shape_of_a_request():
    (cut,), _ = limit_context([request(prompt=3000, output=1000)], 1000)
    assert (cut.prompt_tokens, cut.output_tokens) == (750, 250)


def test_reuse_needs_every_block_before():
    requests = [
        request(0, prompt=25, prefix=[1, 2, 3], block=10),  # nothing seen yet
        request(1, prompt=22, prefix=[1, 2, 9], block=10),  # 1 and 2
        request(2, prompt=30, prefix=[8, 2, 3], block=10),  # 8 is new, so 2 and 3 are other text
        request(3, prompt=25, prefix=[1, 2, 3], block=10),  # all of it, the last block in part
        request(4, prompt=50),
    ]
    assert [reusable_tokens(requests[:n]) for n in range(1, 6)] == [0, 20, 20, 45, 45]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12))
def test_reuse_equals_a_set_of_seen_prefixes(prefixes):
    seen, reusable = set(), 0
    for prefix in prefixes:
        paths = [tuple(prefix[: i + 1]) for i in range(len(prefix))]
        reusable += 10 * sum(path in seen for path in paths)
        seen.update(paths)
    requests = [request(i, prompt=10 * len(p) + 5, prefix=p, block=10) for i, p in enumerate(prefixes)]
    assert reusable_tokens(requests) == reusable


def test_unrelated_requests_have_the_lengths_and_none_of_the_tokens():
    requests = [request(4, at=1.0, prompt=90, prefix=[1], block=30), request(7, at=2.0, prompt=50)]
    others = unrelated(requests, 5)
    assert [(r.prompt_tokens, r.at) for r in others] == [(90, 0.0), (50, 0.0), (90, 0.0), (50, 0.0), (90, 0.0)]
    tokens = [tuple(materialise(r, 0, IDS)[:30].tolist()) for r in [*requests, *others]]
    assert len(set(tokens)) == 7
    assert unrelated(requests, 0) == []


def test_a_chat_goes_on_with_the_longest_prompt_that_is_repeated():
    prompts = [
        [0, 1, 2],  # begins; its last block may have been cut
        [0, 1, 3, 4],  # goes on
        [0, 1, 3, 5, 6],  # goes on
        [0, 1, 7],  # as the first turn did: nobody's newest prompt
        [0, 8],  # shares with all of them what everybody does
        [],
        [0, 1, 3, 5, 9],
    ]
    requests = [request(i, prompt=10 * len(p) + 1, prefix=p, block=10) for i, p in enumerate(prompts)]
    followed = follow_chats(requests, least_blocks=2)
    assert [r.chat for r in followed] == ["chat-0", "chat-0", "chat-0", "chat-3", "chat-4", "chat-5", "chat-0"]
    assert [r.prefix for r in followed] == [r.prefix for r in requests]
