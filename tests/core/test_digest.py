"""The modelled model: every token depends on every digest, and outputs end as an engine's do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.digest import ModelledSequence, offline, sample
from penstock.core.request import FinishReason

IDS = range(3, 4096)
texts = st.lists(st.integers(0, 4095), min_size=1, max_size=200)


@given(texts, st.data())
def test_how_tokens_are_appended_makes_no_difference(tokens, data):
    cut = data.draw(st.integers(0, len(tokens)))
    whole, parts = ModelledSequence(), ModelledSequence(tokens[:cut])
    digests = ModelledSequence().extend(tokens[:cut]) + parts.extend(tokens[cut:])
    assert whole.extend(tokens) == digests
    assert (whole.position, whole.context) == (parts.position, parts.context)


@given(texts, st.data())
def test_one_other_token_changes_every_digest_from_there_on(tokens, data):
    i = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 4095).filter(lambda t: t != tokens[i]))
    here, there = ModelledSequence(), ModelledSequence()
    mine, theirs = here.extend(tokens), there.extend([*tokens[:i], other, *tokens[i + 1 :]])
    assert [a != b for a, b in zip(mine, theirs, strict=True)] == [False] * i + [True] * (len(tokens) - i)
    assert here.context != there.context


def test_draws_depend_on_context_position_and_seed_and_cover_the_range():
    assert len({sample(c, 5, range(1 << 60)) for c in range(1000)}) == 1000
    assert len({sample(7, p, range(1 << 60)) for p in range(1000)}) == 1000
    assert len({sample(7, 5, range(1 << 60), s) for s in (None, *range(-500, 500))}) == 1001
    sampled = [sample(c, 5, range(100, 110)) for c in range(2000)]
    assert set(sampled) == set(range(100, 110))
    assert all(150 < sampled.count(token) < 250 for token in set(sampled))


@pytest.mark.parametrize("seed", [None, -(2**63), 0, 2**63 - 1])
def test_offline_goes_on_from_its_own_tokens(seed):
    output, finish = offline([5, 6, 7], max_tokens=30, token_ids=IDS, seed=seed)
    assert finish is FinishReason.LENGTH
    for i, token in enumerate(output):
        assert ModelledSequence([5, 6, 7, *output[:i]]).next_token(IDS, seed) == token


def test_the_definition_stays_what_it_is():
    """Deployments of different versions exchange blocks, and results are compared over years."""
    assert offline([1, 2, 3], max_tokens=6, token_ids=IDS)[0] == [3519, 503, 1556, 755, 3931, 459]
    assert offline([1, 2, 3], max_tokens=6, token_ids=IDS, seed=42)[0] == [679, 2436, 3845, 135, 1034, 2196]


def test_stop_ids_end_the_output():
    free, _ = offline([9], max_tokens=30, token_ids=IDS)
    output, finish = offline([9], max_tokens=30, token_ids=IDS, stop_ids=frozenset({free[12], 1}))
    assert (output, finish) == (free[: free.index(free[12]) + 1], FinishReason.STOP)
    assert offline([9], max_tokens=13, token_ids=IDS, stop_ids=frozenset({free[12]}))[1] is FinishReason.STOP
