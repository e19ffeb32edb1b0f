"""Draws: filters in the right order, the right distribution, and nothing but one's own row."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine import sampling
from penstock.engine.masks import Masks
from penstock.engine.sampling import score

VOCAB = 50


def sample(rows: torch.Tensor, steps: list[SequenceStep]) -> SimpleNamespace:
    masks = Masks(rows.shape[1])
    drawn = sampling.sample(rows, steps, masks.end(masks.begin(StepPlan(()), steps), rows.device))
    assert drawn.tokens.tolist() == drawn.ids
    return SimpleNamespace(tokens=drawn.ids, logprobs=drawn.logprobs)


def step(seed=0, position=10, generated=None, prompt=(), **params) -> SequenceStep:
    p = SamplingParams(**params)
    return SequenceStep("r", position - 1, [0], (0,), 1, p, seed, generated, prompt)


def logits(rows=1, seed=0, vocab=VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def allowed_by_hand(row: torch.Tensor, p: SamplingParams) -> set[int]:
    """Tokens that survive min_p, top_k and top_p, spelled out."""
    probabilities = (row / p.temperature).double().softmax(-1)
    keep = {t for t in range(len(row)) if probabilities[t] >= p.min_p * probabilities.max() * (1 - 1e-6)}
    order = sorted(keep, key=lambda t: -float(probabilities[t]))
    if p.top_k:
        order = order[: p.top_k]
    total, out = sum(float(probabilities[t]) for t in order), set()
    mass = 0.0
    for t in order:
        if mass >= p.top_p * total * (1 + 1e-6):
            break
        out.add(t)
        mass += float(probabilities[t])
    return out


@settings(max_examples=40)
@given(
    st.integers(0, 1000),
    st.floats(0.2, 3),
    st.sampled_from([0, 1, 5, 49, 50, 2000]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_only_tokens_that_pass_the_filters_are_sampled(seed, temperature, top_k, top_p, min_p):
    row = logits(seed=seed)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    allowed = allowed_by_hand(row[0], SamplingParams(**params))
    sampled = sample(row.repeat(200, 1), [step(seed=s, **params) for s in range(200)]).tokens
    assert set(sampled) <= allowed


@pytest.mark.parametrize("params", [{}, {"top_k": 8}, {"top_p": 0.8}, {"temperature": 0.5, "min_p": 0.02}])
def test_draws_follow_the_distribution(params):
    row = logits(seed=3, vocab=12)
    p = SamplingParams(**params)
    allowed = sorted(allowed_by_hand(row[0], p))
    want = (row[0][allowed] / p.temperature).softmax(-1)
    count = 20000
    sampled = sample(row.repeat(count, 1), [step(seed=5, position=1 + i, **params) for i in range(count)]).tokens
    seen = torch.bincount(torch.tensor(sampled), minlength=12)[allowed] / count
    chi_square = float(((seen - want) ** 2 / want).sum() * count)
    degrees = len(allowed) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_a_row_is_sampled_alike_in_any_company():
    rows = logits(40, seed=1)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}]
    steps = [step(seed=i, position=3 + i, **kinds[i % 5]) for i in range(40)]
    together = sample(rows.clone(), steps).tokens
    alone = [sample(rows[i : i + 1].clone(), [s]).tokens[0] for i, s in enumerate(steps)]
    assert together == alone


def test_seed_and_position_change_the_draw():
    row = torch.zeros(1, VOCAB)
    draws = {sample(row.clone(), [step(seed=s, position=p)]).tokens[0] for s in range(8) for p in range(8)}
    assert len(draws) > 20
    assert sample(row.clone(), [step(seed=-(2**63))]).tokens == sample(row.clone(), [step(seed=-(2**63))]).tokens


def test_penalties():
    row = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.5]])

    def greedy(**params):
        spoken = step(generated=[2, 2, 2, 3], prompt=[1, 1], temperature=0.0, **params)
        return sample(row.clone(), [spoken]).tokens[0]

    assert greedy() == 1
    assert greedy(repetition_penalty=4.0) == 0  # 3 -> 0.75 and 2 -> 0.5: the prompt counts
    assert greedy(presence_penalty=2.0) == 1  # the prompt does not
    many = sample(
        torch.tensor([[1.0, 0.0, 2.0, 0.0]]),
        [step(generated=[2, 2, 2], prompt=[0], temperature=0.0, frequency_penalty=0.4)],
    )
    assert many.tokens == [0]


def test_all_of_the_vocabulary():
    row = logits(1)
    (report,) = sample(row.clone(), [step(temperature=0.0, logprobs=-1)]).logprobs
    assert sorted(token for token, _ in report.top) == list(range(row.shape[-1]))
    assert [value for _, value in report.top] == sorted((value for _, value in report.top), reverse=True)
    assert score(row, [3], -1)[0].top == report.top


def test_bias_and_logprobs():
    row = logits(seed=2)
    favourite = int(row.argmin())
    result = sample(row.clone(), [step(temperature=0.0, logit_bias={favourite: 100.0}, logprobs=3)])
    assert result.tokens == [favourite]
    report = result.logprobs[0]
    want = row[0].log_softmax(-1)
    assert report is not None
    assert report.chosen == pytest.approx(float(want[favourite]))  # of the raw logits, before the bias
    assert report.rank == VOCAB
    assert [t for t, _ in report.top] == want.topk(3).indices.tolist()
    assert sample(row.clone(), [step()]).logprobs is None


def test_the_noise_never_rules_a_token_out():
    # at this seed, position and token the uniform is within rounding of 1
    row = torch.zeros(1, 122730)
    row[0, 122729] = 50.0
    assert sample(row, [step(seed=0, position=390, min_p=0.5)]).tokens == [122729]


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature):
    row = logits(seed=4)
    assert sample(row.clone(), [step(temperature=temperature)]).tokens == [int(row.argmax())]


def test_equal_logits_are_broken_by_the_lowest_id():
    assert sample(torch.zeros(1, VOCAB), [step(temperature=0.0)]).tokens == [0]
