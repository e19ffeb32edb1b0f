"""Fields that say which tokens may be sampled and what is told of the prompt, on a real, tiny model."""

import copy
import random
from dataclasses import replace

import pytest
import torch

from penstock.engine import runner
from tests.helpers.engines import Collector, make_engine, make_request

CLOSE = 2e-5  # logits are float32, and a chunk of one token is computed by other kernels than a long one


@pytest.fixture(scope="module")
def plain(checkpoint):
    """Log-probabilities [tokens, vocab] by one plain forward pass."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def forward(tokens):
        with torch.inference_mode():
            return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return forward


def prompt(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(1, 320) for _ in range(length)]


def generate(model, request, **engine):
    return Collector(make_engine(model, **engine)).run(request)[request.id]


def resumed(model, request, cut):
    """The output when the request is interrupted after `cut` tokens and goes on in another engine."""
    whole = generate(model, request)
    rest = Collector(make_engine(model)).run(replace(request, generated=tuple(whole[:cut])))["r"]
    return whole[:cut] + rest


# --- which tokens may be sampled


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_the_output_before_min_tokens(model, temperature):
    def asked(**more):
        return make_request("r", prompt(20), temperature=temperature, seed=5, **more)

    free = generate(model, asked())
    stops = set(free)  # without min_tokens the first token would end it
    assert len(generate(model, asked(stop_ids=stops))) == 1
    collector = Collector(make_engine(model))
    tokens = collector.run(asked(stop_ids=stops, min_tokens=9))["r"]
    assert len(tokens) >= 9
    assert stops.isdisjoint(tokens[:9])
    assert len(tokens) == 24 or tokens[-1] in stops
    for cut in (1, 8):
        assert resumed(model, asked(stop_ids=stops, min_tokens=9), cut) == tokens


def test_a_stop_token_is_as_likely_as_ever_once_min_tokens_are_there(model):
    free = generate(model, make_request("r", prompt(20)))
    stop = next(token for i, token in enumerate(free) if i >= 5 and token not in free[:i])
    place = free.index(stop)
    for min_tokens in (0, place):
        assert generate(model, make_request("r", prompt(20), stop_ids=[stop], min_tokens=min_tokens))[-1] == stop
    later = generate(model, make_request("r", prompt(20), stop_ids=[stop], min_tokens=place + 1))
    assert later[:place] == free[:place]
    assert later[place] != stop


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_never_completed(model, temperature):
    def asked(*words):
        request = make_request("r", prompt(20), temperature=temperature, seed=5, max_tokens=40)
        return replace(request, bad_words=words)

    free = generate(model, asked())
    words = [(free[0],), tuple(free[3:5]), tuple(free[6:9])]
    for word in words:
        tokens = generate(model, asked(word))
        pieces = [tuple(tokens[i : i + len(word)]) for i in range(len(tokens))]
        assert word not in pieces
        place = next(i for i in range(len(free)) if tuple(free[i : i + len(word)]) == word)
        assert tokens[: place + len(word) - 1] == free[: place + len(word) - 1]  # only the last token is another
    together = generate(model, asked(*words))
    assert not any(tuple(together[i : i + len(w)]) == w for w in words for i in range(len(together)))
    for cut in (1, 4, 7):
        assert resumed(model, asked(*words), cut) == together


def test_a_bad_word_that_began_in_the_prompt_may_be_completed(model):
    first = generate(model, make_request("r", prompt(20)))[0]
    request = replace(make_request("r", prompt(20)), bad_words=((prompt(20)[-1], first),))
    assert generate(model, request)[0] == first


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}])
def test_only_allowed_tokens_are_sampled(model, params):
    allowed = [3, 17, 200, 319]
    request = make_request("r", prompt(20), seed=2, allowed_token_ids=allowed, logprobs=2, **params)
    collector = Collector(make_engine(model))
    tokens = collector.run(request)["r"]
    assert set(tokens) <= set(allowed)
    assert any(report.rank > 4 for report in collector.logprobs["r"]), "reports are of the raw logits"
    beside = [make_request(f"o{i}", prompt(30, i), seed=i, temperature=1.0) for i in range(5)]
    assert Collector(make_engine(model, budget=32)).run(*beside, request)["r"] == tokens


def test_the_likeliest_allowed_token_is_the_greedy_one(model, plain):
    allowed = [3, 17, 200, 319]
    tokens = generate(model, make_request("r", prompt(20), allowed_token_ids=allowed, max_tokens=6))
    values = plain(prompt(20) + tokens)[19:-1]
    assert tokens == [allowed[int(row[allowed].argmax())] for row in values]


# --- log-probabilities of the prompt


def scored(engine, *requests):
    """Request id -> its `prompt_logprobs`, and that they came once, with the first token."""
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work:
        for output in engine.step()[0]:
            wanted = output.start == 0 and not output.request_id.startswith("other")
            assert (output.prompt_logprobs is not None) == wanted
            if output.prompt_logprobs is not None:
                found[output.request_id] = output.prompt_logprobs
        engine.check()
    return found


def same(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.chosen == pytest.approx(theirs.chosen, abs=CLOSE)
        assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=CLOSE)


def asked(name="r", length=200, top=3, **more):
    return make_request(name, prompt(length), prompt_logprobs=top, max_tokens=4, **more)


@pytest.mark.parametrize("rows", [7, 256])
def test_prompt_logprobs_are_those_of_a_plain_forward_pass(model, plain, monkeypatch, rows):
    monkeypatch.setattr(runner, "SCORED_ROWS", rows)
    found = scored(make_engine(model), asked())["r"]
    values = plain(prompt(200))
    assert len(found) == 199
    for i, report in enumerate(found):
        token = prompt(200)[i + 1]
        assert report.chosen == pytest.approx(float(values[i, token]), abs=CLOSE)
        assert report.rank == int((values[i] > values[i, token]).sum()) + 1
        assert [t for t, _ in report.top] == values[i].topk(3).indices.tolist()
        assert [p for _, p in report.top] == pytest.approx(values[i].topk(3).values.tolist(), abs=CLOSE)


@pytest.mark.parametrize("budget", [1, 7, 64, 129])
def test_chunks_change_nothing_about_prompt_logprobs(model, budget):
    whole = scored(make_engine(model), asked())["r"]
    sequences = min(budget, 16)
    same(scored(make_engine(model, budget=budget, sequences=sequences), asked())["r"], whole)


def test_company_changes_nothing_to_the_bit(model):
    alone = scored(make_engine(model), asked())["r"]
    others = [make_request(f"other-{i}", prompt(20 + i, i), temperature=1.0) for i in range(6)]
    assert scored(make_engine(model, budget=600), *others, asked())["r"] == alone


def test_cached_prefixes_are_computed_again_and_remain_shared(model):
    engine = make_engine(model)
    fresh = scored(engine, asked("first"))["first"]
    collector = Collector(engine)
    same(scored(engine, asked("again"))["again"], fresh)
    collector.run(make_request("other", prompt(200), max_tokens=4))
    assert collector.cached["other"] == 196
    collector.run(asked("third"))
    assert collector.cached["third"] == 0
    assert collector.tokens["third"] == collector.tokens["other"]


def test_preemption_changes_nothing_about_prompt_logprobs(model):
    expected = {n: scored(make_engine(model), asked(n, n_len))[n] for n, n_len in (("a", 200), ("b", 150))}
    engine = make_engine(model, blocks=6, model_len=384, budget=48, sequences=4, prefix_cache=False)
    engine.add(replace(asked("a"), max_tokens=40, priority=1))
    engine.add(replace(asked("b", 150), max_tokens=40, priority=1))
    found, steps = {}, 0
    while engine.has_work:
        steps += 1
        if steps == 3:  # in the middle of a prompt
            engine.add(make_request("urgent", prompt(250, 9), max_tokens=3))
        for output in engine.step()[0]:
            if output.prompt_logprobs is not None:
                assert output.request_id not in found
                found[output.request_id] = output.prompt_logprobs
        engine.check()
    assert engine.scheduler.counters.preemptions > 0
    for name in "ab":
        same(found[name], expected[name])


def test_who_goes_on_elsewhere_is_told_of_its_prompt_once(model):
    engine = make_engine(model)
    engine.add(replace(asked(), generated=(5,)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()[0]
    assert all(output.prompt_logprobs is None for output in outputs)


def test_a_prompt_of_one_token_has_nothing_to_report(model):
    assert scored(make_engine(model), asked(length=1)) == {"r": []}


def test_a_prompt_whose_scores_are_no_numbers_ends_with_an_error(model):
    spoiled = copy.deepcopy(model)
    with torch.no_grad():
        weight = spoiled.lm_head.dense().clone()
        weight[7] = float("inf")
        spoiled.lm_head.load("weight", weight)
    engine = make_engine(spoiled, budget=64)
    engine.add(asked())
    (output,) = engine.step()[0]  # before anything is sampled
    assert (output.finish, output.prompt_logprobs) == ("error", None)
    assert engine.step()[0] == []  # what was in flight
    assert not engine.has_work


# --- whose prefixes are shared


def test_prefixes_are_shared_within_one_salt_only(model):
    collector = Collector(make_engine(model))
    for name, salt in (("a", "x"), ("b", "y"), ("c", ""), ("d", "x"), ("e", "")):
        collector.run(replace(make_request(name, prompt(150), max_tokens=4), cache_salt=salt))
    assert collector.cached == {"a": 0, "b": 0, "c": 0, "d": 148, "e": 148}
    assert len({tuple(tokens) for tokens in collector.tokens.values()}) == 1
