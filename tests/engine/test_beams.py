"""Beam search on real, tiny models: what transformers finds, and the same whoever else is there."""

import random
from dataclasses import replace

import pytest
import torch

from penstock.core.request import FinishReason
from penstock.engine import runner
from penstock.engine.sampling import likeliest
from penstock.nn.loader import load_model
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import make_engine, make_request

CLOSE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> (ours, transformers')"""
    transformers = pytest.importorskip("transformers")
    made = {}

    def get(name):
        if name not in made:
            folder = write_checkpoint(tmp_path_factory.mktemp(name), name)
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            made[name] = load_model(folder, torch.device("cpu")), theirs
        return made[name]

    return get


def prompt(length, seed=1):
    rng = random.Random(seed)
    return [rng.randrange(1, 320) for _ in range(length)]


def asked(name, tokens, width, max_tokens, **more):
    return make_request(name, tokens, max_tokens=max_tokens, n=width, use_beam_search=True, **more)


def finish(engine, *requests):
    """Run to the end, all accounts checked after every step: request id -> its results, or its tokens."""
    found = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step()[0]:
            if output.hypotheses is not None:
                assert output.finish is output.hypotheses[0].finish
                found[output.request_id] = output.hypotheses
            elif output.tokens:
                found.setdefault(output.request_id, []).extend(output.tokens)
        engine.check()
    assert engine.scheduler.pool.used == 0
    return found


def agree(ours, theirs):
    assert [h.tokens for h in ours] == [h.tokens for h in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=CLOSE)
        assert mine.finish is other.finish


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral-window", "qwen2-window"])
@pytest.mark.parametrize(("length", "width", "max_tokens"), [(20, 4, 12), (64, 3, 70), (130, 8, 9), (200, 1, 5)])
def test_without_a_stop_token_it_finds_what_transformers_finds(models, name, length, width, max_tokens):
    ours, theirs = models(name)
    tokens = prompt(length)
    found = finish(make_engine(ours), asked("r", tokens, width, max_tokens, length_penalty=0.0))["r"]
    out = theirs.generate(
        torch.tensor([tokens]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert [h.tokens for h in found] == out.sequences[:, length:].tolist()
    assert {h.finish for h in found} == {FinishReason.LENGTH}
    if width > 1:
        sums = [h.cumulative_logprob for h in found]
        assert sums == pytest.approx(out.sequences_scores.tolist(), abs=CLOSE)


def by_hand(theirs, tokens, width, max_tokens, stops, penalty, may=lambda path, token: True):
    """As vLLM searches, over transformers' own log-probabilities: [(tokens, sum)], the best first.

    Args:
        may: whether a token may follow.
    """
    live, ended = [([], 0.0)], []
    for _ in range(max_tokens):
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens + path for path, _ in live])).logits[:, -1].float()
        logprobs = logits.log_softmax(-1)
        for row, (path, _) in zip(logprobs, live, strict=True):
            row[[token for token in range(len(row)) if not may(path, token)]] = -torch.inf
        top = logprobs.topk(2 * width)
        grown = [
            ([*path, token], cumulative + logprob)
            for (path, cumulative), ids, values in zip(live, top.indices.tolist(), top.values.tolist(), strict=True)
            for token, logprob in zip(ids, values, strict=True)
            if logprob > -torch.inf
        ]
        ended += [one for one in grown if one[0][-1] in stops]
        live = sorted((one for one in grown if one[0][-1] not in stops), key=lambda one: -one[1])[:width]

    def score(one):
        return one[1] / (len(tokens) + len(one[0]) - (one[0][-1] in stops)) ** penalty

    return sorted(ended + live, key=score, reverse=True)[:width]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 4.0, -1.0])
def test_with_stop_tokens_it_finds_what_is_found_by_hand(models, penalty):
    ours, theirs = models("qwen3")
    tokens, stops = prompt(50), set(range(0, 320, 9))
    more = {"stop_ids": stops, "length_penalty": penalty, "early_stopping": "never"}
    found = finish(make_engine(ours), asked("r", tokens, 4, 12, **more))["r"]
    expected = by_hand(theirs, tokens, 4, 12, stops, penalty)
    assert [h.tokens for h in found] == [path for path, _ in expected]
    assert [h.cumulative_logprob for h in found] == pytest.approx([total for _, total in expected], abs=CLOSE)
    for h in found:
        assert h.stop_token == (h.tokens[-1] if h.tokens[-1] in stops else None)
        assert h.finish is (FinishReason.LENGTH if h.stop_token is None else FinishReason.STOP)
    assert any(h.finish is FinishReason.STOP for h in found), "no stop token was met"


def with_bad_words(request, *words):
    return replace(request, bad_words=words)


STOPS = set(range(0, 320, 9))
MASKS = {
    "allowed": ({"allowed_token_ids": tuple(range(0, 320, 3))}, (), lambda path, token: token % 3 == 0),
    "fewer than are looked at": ({"allowed_token_ids": (5, 9, 77)}, (), lambda path, token: token in (5, 9, 77)),
    "least": ({"min_tokens": 5}, (), lambda path, token: len(path) >= 5 or token not in STOPS),
    "words": ({}, ((7,), (8, 10)), lambda path, token: token != 7 and [*path[-1:], token] != [8, 10]),
    "thinking": (
        {"thinking": {"end": [7], "budget": 3}},
        (),
        lambda path, token: token == 7 if len(path) == 3 and 7 not in path else True,
    ),
    "all": (
        {"allowed_token_ids": tuple(range(64)), "min_tokens": 3},
        ((7,), (10, 12)),
        lambda path, token: (
            token < 64 and (len(path) >= 3 or token not in STOPS) and token != 7 and [*path[-1:], token] != [10, 12]
        ),
    ),
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("mode", [{}, {"address_mode": "table", "budget": 16}])
def test_only_what_may_follow_is_searched(models, masks, mode):
    ours, theirs = models("qwen3")
    tokens, (params, words, may) = prompt(50), MASKS[masks]
    more = params | {"stop_ids": STOPS, "length_penalty": 1.0, "early_stopping": "never"}
    request = with_bad_words(asked("r", tokens, 4, 12, **more), *words)
    beside = [make_request("sampled", prompt(30, 2), temperature=1.0, max_tokens=9, allowed_token_ids=(3, 4, 5))]
    beside += [asked("free", prompt(40, 3), 3, 8), make_request("plain", prompt(20, 4), max_tokens=9)]
    found = finish(make_engine(ours, **mode), *beside, request)
    expected = by_hand(theirs, tokens, 4, 12, STOPS, 1.0, may)
    assert [h.tokens for h in found["r"]] == [path for path, _ in expected]
    assert [h.cumulative_logprob for h in found["r"]] == pytest.approx([total for _, total in expected], abs=CLOSE)
    assert {*found["sampled"]} <= {3, 4, 5}
    for one in beside:
        alone = finish(make_engine(ours), one)[one.id]
        if one.id == "free":
            agree(found["free"], alone)
        else:
            assert found[one.id] == alone


def test_beams_after_which_nothing_may_come_are_left_and_a_search_without_others_ends_with_an_error(models):
    ours, _ = models("qwen3")
    only = {"allowed_token_ids": (5, 9), "length_penalty": 0.0}
    # behind a 5 there is nothing
    some = with_bad_words(asked("some", prompt(30), 4, 6, **only), (5, 5), (5, 9))
    assert [h.tokens for h in finish(make_engine(ours), some)["some"]] == [[9] * 6, [9] * 5 + [5]]
    none = with_bad_words(asked("none", prompt(30), 4, 6, **only), (5,), (9, 5), (9, 9))
    engine = make_engine(ours)
    engine.add(none)
    ends = {}
    while engine.has_work:
        ends |= {o.request_id: o.finish for o in engine.step()[0] if o.finish is not None}
        engine.check()
    assert ends == {"none": FinishReason.ERROR}
    assert engine.scheduler.pool.used == 0


def test_logprobs_are_those_of_the_chosen_tokens(models):
    ours, theirs = models("qwen3")
    tokens = prompt(40)
    for hypothesis in finish(make_engine(ours), asked("r", tokens, 3, 8, logprobs=10))["r"]:
        with torch.inference_mode():
            logprobs = theirs(torch.tensor([tokens + hypothesis.tokens])).logits[0].log_softmax(-1)[len(tokens) - 1 :]
        for token, report, row in zip(hypothesis.tokens, hypothesis.logprobs, logprobs, strict=False):
            assert report.chosen == pytest.approx(float(row[token]), abs=CLOSE)
            assert report.rank == 1 + int((row > row[token] + 1e-6).sum())
            assert [t for t, _ in report.top] == row.topk(10).indices.tolist()
        assert sum(r.chosen for r in hypothesis.logprobs) == pytest.approx(hypothesis.cumulative_logprob, abs=CLOSE)


@pytest.mark.parametrize(
    "mode", [{"address_mode": "table"}, {"order": "token"}, {"address_mode": "table", "order": "token"}]
)
def test_wherever_blocks_lie_it_finds_the_same(models, mode):
    ours, _ = models("qwen3")
    request = asked("r", prompt(100), 4, 40)
    agree(finish(make_engine(ours, **mode), request)["r"], finish(make_engine(ours), request)["r"])


def test_beside_others_and_with_little_room_it_finds_the_same(models):
    ours, _ = models("qwen3")
    request = asked("r", prompt(100), 4, 40)
    others = [
        make_request("sampled", prompt(90, 2), temperature=1.0, seed=3, max_tokens=60),
        asked("other", prompt(70, 3), 3, 50),
        make_request("same", prompt(100), max_tokens=30),
    ]
    alone = {one.id: finish(make_engine(ours), one)[one.id] for one in [request, *others]}
    for engine in (
        make_engine(ours),
        make_engine(ours, budget=16),
        make_engine(ours, prefix_cache=False, budget=16),
        make_engine(ours, blocks=9, model_len=576),
        make_engine(ours, blocks=9, model_len=576, address_mode="table", budget=20),
    ):
        together = finish(engine, *others, request)
        assert together["sampled"] == alone["sampled"]
        assert together["same"] == alone["same"]
        agree(together["r"], alone["r"])
        agree(together["other"], alone["other"])
    assert engine.scheduler.counters.preemptions, "there was room for all"


def test_a_cached_prompt_changes_nothing(models):
    ours, _ = models("qwen3")
    engine = make_engine(ours)
    first = finish(engine, asked("a", prompt(200), 4, 10))["a"]
    hits = engine.scheduler.counters.prefix_hits
    agree(finish(engine, asked("b", prompt(200), 4, 10))["b"], first)
    assert engine.scheduler.counters.prefix_hits - hits == 196


def test_a_row_that_is_no_number_ends_the_search_and_nothing_else(models, monkeypatch):
    ours, _ = models("qwen3")
    engine = make_engine(ours)
    engine.add(asked("r", prompt(30), 3, 10))
    engine.add(make_request("fine", prompt(30, 2), max_tokens=6))
    engine.step()
    real = runner._not_finite
    # of a search's logits [3, vocab] the middle row is broken; nothing else has three rows
    monkeypatch.setattr(runner, "_not_finite", lambda rows: [1] if rows.shape == (3, 320) else real(rows))
    ends = {}
    while engine.has_work:
        ends |= {o.request_id: o.finish for o in engine.step()[0] if o.finish is not None}
        engine.check()
    assert ends == {"r": FinishReason.ERROR, "fine": FinishReason.LENGTH}
    assert engine.scheduler.pool.used == 0


def test_the_likeliest_are_in_order_and_of_equals_the_first():
    rows = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0], [0.0, 5.0, 5.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    found = likeliest(rows, 3)
    assert [[token for token, _ in row] for row in found] == [[1, 3, 2], [1, 2, 3], [0, 1, 2]]
    for row, logits in zip(found, rows, strict=True):
        assert [value for _, value in row] == pytest.approx([float(logits.log_softmax(-1)[t]) for t, _ in row])
    assert len(likeliest(rows, 99)[0]) == 5
