"""From a user's request to sequences: checks, seeds, lengths."""

import random

import pytest

from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.sampling import SamplingParams
from penstock.service.intake import ModelLimits, make_sequences

LIMITS = ModelLimits(max_model_len=100, vocab_size=50, eos_ids=frozenset([3]))


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
    ],
)
def test_what_cannot_be_served_names_its_field(prompt, params, error, field):
    with pytest.raises(error) as caught:
        make(prompt, **params)
    assert caught.value.field == field
