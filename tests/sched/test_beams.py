"""Beam search: which continuations live and end, against a search that is written down plainly; and its scheduling."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.core.plan import BLOCK_TOKENS, StepResult
from penstock.core.request import FinishReason, Request
from penstock.core.sampling import SamplingParams
from penstock.sched.local.beams import BeamSearch
from tests.sched.test_scheduler import Engine, likeliest, make, request, run, searched

PROMPT = [7, 7, 7]


def asked(max_tokens, stop_ids=(), **params) -> Request:
    params = SamplingParams(use_beam_search=True, **params)
    return Request(id="r", prompt=PROMPT, params=params, seed=0, stop_ids=frozenset(stop_ids), max_tokens=max_tokens)


def model(vocab, seed):
    """Log-probabilities after a path, all of them different."""

    def after(path):
        rng = random.Random(f"{seed} {path}")
        return [(token, -rng.random() * 5) for token in range(vocab)]

    return after


def falling(pairs):
    return sorted(pairs, key=lambda pair: -pair[1])


def search(request, after, count=None):
    """(tokens, sum, why) of each result."""
    found, paths = BeamSearch(request, request.max_tokens), [()]
    while not found.over:
        found.advance([falling(after(path))[: count or found.looked_at] for path in paths])
        paths = [tuple(beam.token for beam in live.path()) for live in found.live]
        assert len(paths) == len(set(paths)), "a beam lives twice"
        assert all(len(beam.rows) == found.length - 1 for beam in found.live)
    return [(tuple(h.tokens), h.cumulative_logprob, h.finish) for h in found.results()]


def plainly(request, after):
    """The same as one would write it down: everything that ends is kept, and sorted in the end."""
    width, params = request.params.n, request.params

    def score(tokens, cumulative):
        return cumulative / (len(PROMPT) + len(tokens) - (tokens[-1] in request.stop_ids)) ** params.length_penalty

    live, ended = [((), 0.0)], []
    for length in range(1, request.max_tokens + 1):
        grown = [
            ((*tokens, token), cumulative + logprob)
            for tokens, cumulative in live
            for token, logprob in falling(after(tokens))[: 2 * width]
        ]
        ended += [pair for pair in grown if pair[0][-1] in request.stop_ids]
        ended.sort(key=lambda pair: -score(*pair))
        live = falling([pair for pair in grown if pair[0][-1] not in request.stop_ids])[:width]
        if length == request.max_tokens:
            ended += live
            break
        full = len(ended) >= width
        if not live or (full and params.early_stopping is True):
            break
        if full and params.early_stopping is False:
            reachable = live[0][1] / (len(PROMPT) + length) ** params.length_penalty
            if reachable <= score(*ended[width - 1]):
                break
    best = sorted(ended, key=lambda pair: -score(*pair))[:width]
    stops = request.stop_ids
    return [(*pair, FinishReason.STOP if pair[0][-1] in stops else FinishReason.LENGTH) for pair in best]


@settings(max_examples=300)
@given(
    vocab=st.integers(4, 12),
    seed=st.integers(0, 2**32),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 9),
    stops=st.integers(0, 3),
    penalty=st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0]),
    early=st.sampled_from([True, False, "never"]),
)
def test_it_finds_what_a_plain_search_finds(vocab, seed, width, max_tokens, stops, penalty, early):
    request = asked(max_tokens, range(stops), n=width, length_penalty=penalty, early_stopping=early)
    after = model(vocab, seed)
    found = search(request, after)
    assert found == plainly(request, after)
    assert len(found) == width
    assert found == search(request, after, vocab), "what is known beyond that is not looked at"


@given(vocab=st.integers(2, 5), seed=st.integers(0, 2**32), max_tokens=st.integers(1, 4), stops=st.integers(0, 1))
def test_wide_enough_it_finds_the_best_there_is(vocab, seed, max_tokens, stops):
    """Against every text that there is."""
    request = asked(max_tokens, range(stops), n=128, length_penalty=0.0, early_stopping="never")
    after = model(vocab, seed)

    def texts(path, cumulative):
        if path and (path[-1] < stops or len(path) == max_tokens):
            yield path, cumulative
        else:
            for token, logprob in after(path):
                yield from texts((*path, token), cumulative + logprob)

    everything = falling(list(texts((), 0.0)))
    found = search(request, after)
    if len(everything) <= 128:
        assert [pair[:2] for pair in found] == everything


def test_of_equals_the_first_goes_first():
    request = asked(2, n=2)
    found = search(request, lambda path: [(0, -1.0), (1, -1.0), (2, -1.0)])
    assert [tokens for tokens, *_ in found] == [(0, 0), (0, 1)]


def test_a_token_is_reported_with_its_rank_and_those_beside_it():
    request = asked(1, n=2, logprobs=3)
    found = BeamSearch(request, 1)
    found.advance([[(5, -0.5), (9, -1.0), (2, -1.0), (3, -4.0)]])
    second = found.results()[1]
    assert second.tokens == [9]
    (report,) = second.logprobs
    assert (report.chosen, report.rank) == (-1.0, 2)
    assert report.top == [(5, -0.5), (9, -1.0), (2, -1.0)]


# --- scheduled


def beams(name, prompt, max_tokens=20, width=3, **more):
    return request(name, prompt, max_tokens, params=SamplingParams(use_beam_search=True, n=width), **more)


def results(engine: Engine, *requests: Request):
    for one in requests:
        engine.scheduler.add(one)
    run(engine)
    assert engine.scheduler.pool.used == 0
    return [engine.hypotheses.get(one.id) for one in requests]


def test_all_beams_share_the_prompts_blocks_and_a_region_that_grows():
    engine = make(num_blocks=16, budget=200)
    engine.scheduler.add(beams("r", [1] * 130, 60, width=4))
    engine.step()
    assert engine.scheduler.pool.used == 3  # the prompt's; not a place is kept for beams before they live
    for step in range(1, 60):
        plan = engine.step()
        if not plan.sequences or not engine.scheduler.has_work:
            break
        (part,) = plan.sequences
        assert len(part.tokens) == 4
        assert plan.work.decodes == 4
        assert plan.work.kv_tokens == 130 + 4 * step
        assert engine.scheduler.pool.used == 3 + -(-4 * step // BLOCK_TOKENS)
    assert step > 16, "it ended too early to show anything"


def test_its_prompt_is_found_in_the_cache_and_can_be_found():
    engine = make(budget=300)
    results(engine, request("plain", [5] * 130, 1))
    engine.scheduler.add(beams("r", [5] * 130 + [6] * 70))
    assert engine.step().sequences[0].start == 2 * BLOCK_TOKENS
    run(engine)
    assert engine.scheduler.pool.cached == 3, "the prompt's whole blocks, and nothing of the beams"
    engine.scheduler.add(request("again", [5] * 130 + [6] * 70, 1))
    assert engine.step().sequences[0].start == 196


def test_a_search_takes_as_many_places_as_it_is_wide():
    engine = make(sequences=4, budget=300)
    engine.scheduler.add(beams("wide", [1] * 10, width=3))
    engine.scheduler.add(request("one", [2] * 10, 30))
    engine.scheduler.add(request("two", [3] * 10, 30))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    engine.scheduler.add(beams("next", [4] * 10, width=4))
    run(engine)
    assert engine.hypotheses["next"] == searched(beams("next", [4] * 10, width=4))


@pytest.mark.parametrize(
    ("width", "max_tokens", "field"), [(5, 3, "n"), (4, 300, "max_tokens"), (4, 226, "max_tokens")]
)
def test_what_could_never_run_is_refused(width, max_tokens, field):
    engine = make(num_blocks=16, sequences=4)
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as refused:
        engine.scheduler.add(beams("r", [1] * 100, max_tokens, width))
    assert refused.value.field == field
    engine.scheduler.add(beams("r", [1] * 100, 225, 4))  # (16 - 2) * 64 / 4 places, and the last token needs none


def test_a_search_that_was_preempted_comes_to_the_same():
    engine = make(num_blocks=6, budget=300, sequences=8)
    asked = [beams("a", [1] * 60, 50, width=4), beams("b", [2] * 60, 50, width=4)]
    assert results(engine, *asked) == [searched(one) for one in asked]
    assert engine.scheduler.counters.preemptions >= 1


def test_a_search_that_was_preempted_waits_for_as_much_room_as_it_had():
    engine = make(num_blocks=6, budget=300, sequences=8)
    for name, token in (("a", 1), ("b", 2)):
        engine.scheduler.add(beams(name, [token] * 60, 60, width=4))
    while not engine.scheduler.counters.preemptions:
        engine.step()
    waiting = engine.scheduler.sequence("b")
    assert waiting is not None
    assert waiting.missing(64) > 1, "its prompt would fit into one block"
    while engine.scheduler.sequence("a") is not None:
        assert not waiting.blocks
        engine.step()
    run(engine)
    assert engine.scheduler.counters.preemptions == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_to_cancel_frees_everything(steps):
    engine = make()
    engine.scheduler.add(beams("r", [1] * 150, 60))
    for _ in range(steps):
        engine.step()
    assert engine.scheduler.cancel("r")
    engine.scheduler.check()
    assert engine.scheduler.pool.used == 0


def test_beside_others_with_a_small_budget_it_comes_to_the_same():
    alone = searched(beams("r", [1] * 100, 30))
    assert alone == searched(beams("r", [1] * 100, 30))
    for budget in (4, 7, 64):
        engine = make(num_blocks=30, budget=budget, sequences=4 if budget == 4 else 7)
        others = [request("x", [1] * 90, 40), request("y", [3] * 5, 40), beams("z", [1] * 100, 30, width=2)]
        (first, *_) = results(engine, beams("r", [1] * 100, 30), *others)
        assert first == alone


def test_the_first_output_says_that_the_prompt_is_prefilled():
    engine = make(budget=64)
    engine.scheduler.add(beams("r", [1] * 100, 5))
    told = []
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        found = {
            s.request_id: [likeliest([1], s.candidates) for _ in (s.tokens if s.branches else [0])]
            for s in plan.sequences
            if s.candidates
        }
        told.append(engine.scheduler.update(plan, StepResult([], [], candidates=found)))
    assert [len(outputs) for outputs in told] == [0, 1, 0, 0, 0, 1]
    assert (told[1][0].tokens, told[1][0].finish, told[1][0].hypotheses) == ([], None, None)
    assert (told[-1][0].tokens, told[-1][0].finish) == ([], FinishReason.LENGTH)
