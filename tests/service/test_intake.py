"""From a user's request to sequences: checks, seeds, lengths."""

import random
from dataclasses import replace

import pytest

from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.sampling import SamplingParams
from penstock.service.intake import ModelLimits, check_room, check_salt, make_sequences, truncated

LIMITS = ModelLimits(max_model_len=100, vocab_size=50, eos_ids=frozenset([3]), max_sequences=8, search_blocks=10)


def make(prompt, **params):
    return make_sequences("r", prompt, SamplingParams(**params), LIMITS, random.Random(0))


def test_outputs_of_one_request_differ_only_in_name_and_seed():
    one, two, three = make([1, 2], n=3, seed=7)
    assert [s.seed for s in (one, two, three)] == [7, 8, 9]
    assert len({s.id for s in (one, two, three)}) == 3
    assert make([1], seed=7)[0].seed == 7


def test_seeds_wrap_and_unseeded_requests_differ():
    assert [s.seed for s in make([1], n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]
    rng = random.Random(1)
    seeds = {make_sequences("r", [1], SamplingParams(), LIMITS, rng)[0].seed for _ in range(50)}
    assert len(seeds) == 50


@pytest.mark.parametrize(("asked", "prompt", "want"), [(None, 10, 90), (5, 10, 5), (500, 10, 90), (16, 99, 1)])
def test_max_tokens_is_cut_to_what_is_left(asked, prompt, want):
    assert make([1] * prompt, max_tokens=asked)[0].max_tokens == want


def test_stop_ids():
    assert make([1], stop_token_ids=[5])[0].stop_ids == {3, 5}
    assert make([1], stop_token_ids=[5], ignore_eos=True)[0].stop_ids == {5}


@pytest.mark.parametrize(
    ("prompt", "params", "error", "field"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([1, 50], {}, InvalidRequest, "prompt"),
        ([-1], {}, InvalidRequest, "prompt"),
        ([1] * 100, {}, PromptTooLong, "prompt"),
        ([1], {"stop_token_ids": [50]}, InvalidRequest, "stop_token_ids"),
        ([1], {"logit_bias": {77: 1.0}}, InvalidRequest, "logit_bias"),
        ([1], {"allowed_token_ids": [1, 50]}, InvalidRequest, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_served_names_its_field(prompt, params, error, field):
    with pytest.raises(error) as caught:
        make(prompt, **params)
    assert caught.value.field == field


def test_what_is_told_beside_the_parameters_reaches_every_sequence():
    made = make_sequences(
        "r", [1], SamplingParams(n=2), LIMITS, random.Random(0), bad_words=((4, 5), (6,)), cache_salt="mine"
    )
    assert [(s.bad_words, s.cache_salt) for s in made] == [(((4, 5), (6,)), "mine")] * 2


def test_there_must_always_be_a_token_that_may_be_sampled():
    def left(bad_words=(), **params):
        make_sequences("r", [1], SamplingParams(**params), LIMITS, random.Random(0), bad_words=bad_words)

    left(allowed_token_ids=[3])  # an output of nothing but its end
    left(allowed_token_ids=[3, 4], min_tokens=2)
    left(allowed_token_ids=[4, 5], bad_words=((5, 4),))
    left(allowed_token_ids=[3, 5], min_tokens=2, ignore_eos=True, stop_token_ids=[5])
    for params in (
        {"allowed_token_ids": [3], "min_tokens": 1},
        {"allowed_token_ids": [4, 5], "bad_words": ((4,), (1, 5))},
        {"allowed_token_ids": [3, 4], "min_tokens": 1, "bad_words": ((4,),)},
        {"stop_token_ids": list(range(50)), "min_tokens": 1},
    ):
        field = "allowed_token_ids" if "allowed_token_ids" in params else "bad_words"
        with pytest.raises(InvalidRequest, match=rf"^{field}: .* no token left to draw") as caught:
            left(**params)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("count", "max_tokens", "kept"),
    [(None, 16, 100), (1, 16, 1), (7, 16, 7), (100, 16, 100), (-1, 16, 84), (-1, None, 99), (-1, 500, 1)],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_end_or_the_beginning(count, max_tokens, kept, side):
    prompt = list(range(100))
    params = SamplingParams(truncate_prompt_tokens=count, max_tokens=max_tokens, truncation_side=side)
    assert truncated(prompt, params, 100) == (prompt[100 - kept :] if side == "left" else prompt[:kept])
    assert truncated([1], params, 100) == [1]


def test_truncation_to_more_than_the_model_takes_is_refused():
    with pytest.raises(InvalidRequest, match=r"^truncate_prompt_tokens: 101, allowed is .* 1 to 100$"):
        truncated([1], SamplingParams(truncate_prompt_tokens=101), 100)


@pytest.mark.parametrize("salt", ["", 3, True, None, ["a"], "x" * 1025, "\u00e9" * 513, "\ud800"])
def test_what_is_no_salt(salt):
    with pytest.raises(InvalidRequest, match=r"^cache_salt: .* allowed is a string of 1 to 1024 bytes"):
        check_salt(salt)


def test_a_beam_search_is_one_request():
    (one,) = make([1, 2], n=4, use_beam_search=True, max_tokens=20)
    assert (one.id, one.params.n, one.max_tokens) == ("r", 4, 20)
    assert make([1] * 10, n=4, use_beam_search=True, max_tokens=None)[0].max_tokens == 90


@pytest.mark.parametrize(("width", "blocks", "most"), [(8, 10, 73), (3, 10, 90), (8, 2, 9), (1, 2, 65)])
def test_beams_are_no_longer_than_the_cache_holds(width, blocks, most):
    def beams(max_tokens):
        params = SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens)
        (one,) = make_sequences("r", [1] * 10, params, replace(LIMITS, search_blocks=blocks), random.Random(0))
        return one.max_tokens

    assert beams(None) == beams(most) == most
    if most == 90:
        assert beams(91) == 90  # the model's length: that is cut
    else:
        with pytest.raises(InvalidRequest, match=f"max_tokens: {most + 1}, allowed are at most {most}: ") as caught:
            beams(most + 1)
        assert caught.value.field == "max_tokens"


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_no_cache_holds_is_not_searched_behind(max_tokens):
    params = SamplingParams(n=1, use_beam_search=True, max_tokens=max_tokens)
    limits = replace(LIMITS, search_blocks=1)
    assert make_sequences("r", [1] * 64, params, limits, random.Random(0))[0].max_tokens == 1
    with pytest.raises(InvalidRequest, match="max_tokens: 1, allowed are at most 0"):
        make_sequences("r", [1] * 65, params, limits, random.Random(0))


def test_more_beams_than_run_at_once_are_refused():
    with pytest.raises(InvalidRequest, match="n: 9 beams, allowed are at most max-num-seqs, which is 8") as caught:
        make([1], n=9, use_beam_search=True)
    assert caught.value.field == "n"


def test_a_prompt_and_its_output_may_fill_the_model_and_no_more():
    check_room(60, 40, 100)
    with pytest.raises(InvalidRequest, match="max_tokens: 41 is too large"):
        check_room(60, 41, 100)
