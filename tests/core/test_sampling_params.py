"""Sampling parameters: what is taken, and what is said about the rest."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.core.sampling import SamplingParams

GOOD = [
    {"temperature": 0},
    {"temperature": np.float32(0.5), "top_k": np.int64(3)},
    {"stop": "x"},
    {"stop": ["x", "y"], "stop_token_ids": [1]},
    {"stop": None, "stop_token_ids": None, "logit_bias": None, "seed": None, "max_tokens": None},
    {"top_k": -1},
    {"seed": -(2**63)},
    {"logit_bias": {3: -100}},
    {"logprobs": 0},
    {"min_tokens": 16},
    {"min_tokens": 10**9, "max_tokens": None},
    {"bad_words": ["x", " y"], "allowed_token_ids": [0, 7]},
    {"bad_words": None, "allowed_token_ids": None, "prompt_logprobs": None, "truncate_prompt_tokens": None},
    {"prompt_logprobs": 20},
    {"prompt_logprobs": -1, "logprobs": -1},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": np.int64(5)},
]
BAD = {
    "temperature": [-0.1, float("nan"), float("inf"), "hot", True, 10**400],
    "top_p": [0, 1.01, -1],
    "top_k": [-2, 1.5, True],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0],
    "n": [0, 129, None],
    "max_tokens": [0, -1, 2.0],
    "logprobs": [21, -2],
    "seed": [2**63, 0.5],
    "min_tokens": [-1, 17, 1.0, True, float("nan"), 10**400],
    "bad_words": ["x", 3, [""], [" "], [3], ["x" * 257], ["x"] * 257, [None]],
    "allowed_token_ids": [[], 3, "3", [-1], [True], [1.0], [float("nan")]],
    "prompt_logprobs": [-2, 21, True, 1.5, "1"],
    "truncate_prompt_tokens": [0, -2, True, 1.5, "1"],
    "stop": [5, [""], ["x"] * 17, ["y" * 1025], [3]],
    "stop_token_ids": [5, [-1], ["a"], [True]],
    "logit_bias": [{1: 101}, {-1: 0}, {1: float("nan")}, {"1": 0}],
}


@pytest.mark.parametrize("params", GOOD, ids=str)
def test_taken(params):
    SamplingParams(**params)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(name)
    assert len(str(caught.value)) < 200


def test_normal_forms():
    p = SamplingParams(top_k=-1, stop="a", temperature=1, logit_bias=None)
    assert (p.top_k, p.stop, p.temperature, p.logit_bias) == (0, ("a",), 1.0, {})
    assert type(p.temperature) is float


@given(
    st.sampled_from(sorted(BAD)), st.one_of(st.none(), st.text(), st.floats(), st.integers(), st.lists(st.integers()))
)
def test_anything_at_all_is_taken_or_refused(name, value):
    with contextlib.suppress(InvalidRequest):
        SamplingParams(**{name: value})
