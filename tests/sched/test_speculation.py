"""Drafts: what is proposed, how many a step computes, and that they never change a token."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS, StepWork
from penstock.core.sampling import SamplingParams
from penstock.sched.local.sequence import Sequence
from penstock.sched.local.speculation import PROPOSERS, Speculation, make_speculation
from penstock.sched.local.speculation.mtp import HeadDrafts
from penstock.sched.local.speculation.ngram import PLACES, PromptLookup
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from tests.helpers.proposers import Guesses, guessing, heads
from tests.sched.test_scheduler import STOP, expected, make, next_token, request, run

TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])


def following(tokens: list[int], most: int) -> list[int]:
    return expected(tokens, most)


# --- whichever proposer


@pytest.mark.parametrize("name", PROPOSERS)
@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    runs=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), max_size=8),
    prediction=st.lists(st.integers(0, 4), max_size=20),
)
def test_proposals_are_tokens_and_stay_the_same_until_something_lands(name, prompt, runs, prediction):
    proposer = PROPOSERS[name]({})(Sequence(request("a", prompt, 100, prediction=prediction), 0, 0.0))
    for landed in ([], *runs):
        if landed:
            proposer.land(landed)
        assert 0 <= proposer.agreed < proposer.levels
        proposal = proposer.propose(8)
        assert len(proposal) <= 8
        assert all(type(token) is int and token >= 0 for token in proposal)
        assert proposer.propose(3) == proposal[:3]
        assert proposer.propose(8) == proposal


@pytest.mark.parametrize("name", PROPOSERS)
def test_tokens_are_the_same_with_drafts(name):
    config = {"method": name, "num_speculative_tokens": 5, "adaptive": False}
    engine = make(budget=200, speculation=make_speculation(json.dumps(config)))
    prompts = {f"r{i}": ([i, i + 1, i + 2] * 40)[: 30 * (i + 1)] for i in range(4)}
    for i, (id_, prompt) in enumerate(prompts.items()):
        engine.scheduler.add(request(id_, prompt, 60, prediction=expected(prompt, 20) if i else ()))
    run(engine)
    assert engine.out == {id_: expected(prompt, 60) for id_, prompt in prompts.items()}
    assert engine.scheduler.speculation.counters.drafts


# --- prompt lookup


def longest_match(tokens: list[int], least: int, most: int) -> tuple[int, int]:
    """(tokens before the place that agree with the latest ones, the place): the most, of equals the latest."""
    best = (0, 0)
    for place in range(len(tokens) - 1, 0, -1):
        agreed = 0
        while agreed < min(most, place) and tokens[place - 1 - agreed] == tokens[-1 - agreed]:
            agreed += 1
        if agreed >= least and agreed > best[0]:
            best = (agreed, place)
    return best


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=PLACES),  # so few that every place is compared
    bounds=st.tuples(st.integers(1, 3), st.integers(0, 4)),
)
def test_the_longest_match_is_copied_from_and_of_equal_ones_the_latest(tokens, bounds):
    least, most = bounds[0], bounds[0] + bounds[1]
    proposer = PromptLookup(tokens, least=least, most=most)
    agreed, place = longest_match(tokens, least, most)
    assert proposer.agreed == agreed
    proposed = proposer.propose(6)
    assert bool(proposed) == (agreed > 0)
    if agreed:
        copied = list(tokens)
        for i in range(6):  # it may copy what it has just proposed
            copied.append(copied[place + i])
        assert proposed == copied[len(tokens) :]
    assert proposer.propose(3) == proposed[:3]


@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 9), max_size=20),
    text=st.lists(st.integers(0, 4), max_size=20),
)
def test_whatever_lands_by_ones_or_in_runs_is_known_the_same(tokens, cuts, text):
    """But for the place, which goes on where it stands as long as what lands is what stands there."""
    one, many = PromptLookup(tokens[:1], text), PromptLookup(tokens[:1], text)
    rest, done = tokens[1:], 0
    for cut in cuts:
        run_ = rest[done : done + cut]
        many.land(run_)
        for token in run_:
            one.land([token])
        done += len(run_)
        for proposer in (one, many):
            assert (proposer.agreed > 0) == bool(proposer.propose(8))
    assert one._tokens == many._tokens
    assert one._earlier == many._earlier


def test_a_run_that_makes_the_chains_grow_goes_on_being_followed():
    text = list(range(1000))
    proposer = PromptLookup([1, 2, 3], text)
    proposer.land(text[:700])
    proposer.land([5000])
    assert proposer.propose(4) == []
    proposer.land(text[300:302])
    assert proposer.propose(4) == text[302:306]


def test_a_prediction_is_copied_from_its_beginning_and_found_again_after_an_edit():
    text = list(range(100, 160))
    proposer = PromptLookup([1, 2, 3], text)
    assert proposer.propose(5) == text[:5]
    proposer.land(text[:10])
    assert proposer.propose(5) == text[10:15]
    proposer.land([7])  # in the place of text[10]
    proposer.land(text[11:13])
    assert proposer.propose(5) == text[13:18]
    proposer.land(text[13:])
    assert -1 not in proposer.propose(5), "what follows it is not part of it"


def test_a_recovered_request_goes_on_where_it_stands_in_its_prediction():
    text = list(range(100, 140))
    asked = request("a", [1, 2], 60, generated=text[:7], prediction=text)
    proposer = PROPOSERS["ngram"]({})(Sequence(asked, 0, 0.0))
    assert proposer.propose(3) == text[7:10]


# --- a head of the model


def test_a_head_is_asked_for_what_may_still_be_right_and_told_what_follows_a_chunk():
    prompt = next(p for i in range(100) if STOP not in expected(p := [i, *range(100)], 9))
    engine = make(budget=40, speculation=heads(4))
    engine.scheduler.add(request("a", prompt, 9))
    steps = [engine.step().sequences[0] for _ in range(3)]
    assert [step.following for step in steps] == [prompt[40], prompt[80], 0]
    assert [step.proposes for step in steps] == [0, 0, 4]
    while engine.has_work:
        step = engine.step().sequences[0]
        known = step.start + len(step.tokens) - step.sample + 1 - len(prompt)
        assert step.proposes == max(0, min(4, 9 - known - 2))
    assert engine.out["a"] == expected(prompt, 9)
    assert engine.scheduler.speculation.counters.accepted_tokens


def test_as_many_are_wanted_of_a_head_as_may_pay():
    speculation = Speculation(lambda s: HeadDrafts(), 4, head="mtp")
    running = Sequence(request("a", [1] * 100, 1000), 0, 0.0)
    assert speculation.wanted(running) == 4

    def land(right: bool) -> None:
        running.tokens.append(0)
        running.computed = len(running.tokens) - 1
        speculation.land(running, [0], [0 if right else 1] * speculation.wanted(running))
        speculation.choose({running: 1}, lambda s: 4, 100, TIMES)

    for _ in range(60):
        land(True)
    assert speculation.wanted(running) == 4
    for _ in range(60):
        land(False)
    assert speculation.wanted(running) == 1, "by which it is known once they are right again"
    assert not speculation.choose({running: 1}, lambda s: 4, 100, TIMES)


# --- whose settings these are


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ("ngram", "auto, off, or a JSON object"),
        ("[]", "auto, off, or a JSON object"),
        ('{"method": "eagle"}', '"method": "ngram" or "mtp"'),
        ('{"method": "mtp", "num_speculative_tokens": 1, "prompt_lookup_max": 2}', 'no "prompt_lookup_max"'),
        ('{"method": "ngram"}', '"num_speculative_tokens": 1 to 64'),
        ('{"method": "ngram", "num_speculative_tokens": true}', '"num_speculative_tokens": 1 to 64'),
        ('{"method": "ngram", "num_speculative_tokens": 65}', '"num_speculative_tokens": 1 to 64'),
        ('{"method": "ngram", "num_speculative_tokens": 4, "adaptive": 1}', '"adaptive": true or false'),
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 0}', '"prompt_lookup_max": 1 to 64'),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 4}',
            '"prompt_lookup_min": 1 to 4',
        ),
        ('{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}', 'no "model"'),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(asked, allowed):
    with pytest.raises(ConfigError) as refused:
        make_speculation(asked)
    assert str(refused.value).startswith("speculative-config: ")
    assert allowed in str(refused.value)


def test_vllms_settings_are_taken():
    assert make_speculation("off") is None
    found = make_speculation(json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}))
    assert found is not None
    assert found.most == 4
    found = make_speculation('{"method": "deepseek_mtp", "num_speculative_tokens": 2}')
    assert found is not None
    assert found.head == "mtp"


# --- steps with drafts


def test_a_run_lands_by_what_was_right_and_its_blocks_are_there():
    engine = make(budget=200, speculation=guessing(following, 0.0, most=5))
    prompt = next(p for i in range(100) if STOP not in expected(p := [i] * (BLOCK_TOKENS - 2), 30))
    engine.scheduler.add(request("a", prompt, 30))
    engine.step()
    lengths = []
    while engine.has_work:
        plan = engine.step()
        engine.scheduler.check()
        lengths.append(plan.sequences[0].sample)
    assert engine.out["a"] == expected(prompt, 30)
    assert lengths == [6, 6, 6, 6, 5], "a draft is no more than what may still come"
    counters = engine.scheduler.speculation.counters
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (5, 24, 24)


def test_a_stop_inside_a_run_ends_it_there():
    prompt = next(p for i in range(1000) if 4 < len(out := expected(p := [i], 60)) < 60 and out[-1] == STOP)

    def past_the_stop(tokens, most):
        right = expected(tokens, most)
        return (right + [3] * most)[:most]

    engine = make(speculation=guessing(past_the_stop, 0.0, most=20))
    engine.scheduler.add(request("a", prompt, 60))
    run(engine)
    assert engine.out["a"] == expected(prompt, 60)
    assert engine.scheduler.pool.used == 0


def test_drafts_never_take_a_block_from_anybody():
    """Where all blocks are in use or cached, there are as many drafts as fit into what the sequence has."""
    engine = make(num_blocks=2, budget=200, speculation=guessing(following, 0.0, most=30))
    prompt = next(p for i in range(100) if STOP not in expected(p := [i] * 40, 88))
    engine.scheduler.add(request("a", prompt, 88))
    run(engine)
    assert engine.out["a"] == expected(prompt, 88)
    assert engine.scheduler.counters.preemptions == 0


def test_also_where_not_every_token_may_come_and_never_beside_prompts():
    engine = make(budget=40, sequences=4, speculation=guessing(following, 0.0))
    held = request("held", [1] * 10, 9, params=SamplingParams(min_tokens=4))
    engine.scheduler.add(held)
    steps = [engine.step().sequences[0] for _ in range(3)]
    assert max(step.sample for step in steps) > 1
    out = engine.out["held"]
    assert [step.generated for step in steps if step.generated is not None][:2] == [[], out[:1]], "rows are told apart"
    engine.scheduler.add(request("b", [2] * 100, 30))
    while engine.has_work:
        plan = engine.step()
        if any(len(s.tokens) > s.sample for s in plan.sequences):
            assert all(s.sample <= 1 for s in plan.sequences)


# --- how many


def chosen(times, sequences: int, right: float, most: int = 8, tpot_ms=None, context: int = 1000, steps: int = 300):
    """Drafts of the last steps of sequences that all copy, when so many of their guesses are right."""
    rng = Random(1)

    def after(tokens, count):
        return [0] * count

    speculation = Speculation(lambda s: Guesses(s.tokens, after, 0.0, rng), most)
    running = [Sequence(request(f"s{i}", [1] * context, 10_000, tpot_ms=tpot_ms), i, 0.0) for i in range(sequences)]
    for s in running:
        s.computed = len(s.tokens) - 1
    found = []
    for _ in range(steps):
        grants = dict.fromkeys(running, 1)
        drafts = speculation.choose(grants, lambda s: most, 4096, times) if speculation.considers(grants) else {}
        for s in running:
            own = drafts.get(s, [])
            run_ = [0]
            for _ in own:
                if rng.random() >= right:
                    run_[-1] = 1
                    break
                run_.append(0)
            if not own:
                run_ = [0 if rng.random() < right else 1]
            s.tokens += run_
            s.computed = len(s.tokens) - 1
            speculation.land(s, run_)
        found.append(sum(map(len, drafts.values())))
    return found[-50:]


def test_there_are_as_many_as_pay():
    few = chosen(TIMES, 1, right=0.99)
    assert sum(few) / len(few) > 7, "weights are read once, however many rows there are"
    assert sum(chosen(TIMES, 1, right=0.0)) == 0
    crowd = chosen(TIMES, 256, right=0.6, context=100)
    slow = StepTime(DEVICES["l4"], GEOMETRIES["llama-3.1-8b"])
    assert sum(chosen(slow, 512, right=0.3, context=100, steps=60)) <= sum(crowd), (
        "a step that computes already is full"
    )
    without = chosen(None, 2, right=0.9)
    assert sum(without) > 0
    assert sum(chosen(None, 2, right=0.3)) == 0


def test_a_step_with_drafts_keeps_the_targets_of_its_sequences():
    """A target that a plain step just keeps leaves no room for drafts."""
    alone = TIMES.step_ms((), 64, 64 * 1001)
    assert sum(chosen(TIMES, 64, right=0.95, tpot_ms=alone)) == 0
    assert sum(chosen(TIMES, 64, right=0.95, tpot_ms=10 * alone)) > 0


def test_steps_that_take_longer_with_drafts_than_predicted_have_none():
    speculation = guessing(following, 0.0)
    speculation._adaptive = True
    running = Sequence(request("a", [1] * 100, 1000), 0, 0.0)
    running.tokens.append(next_token(running.tokens))
    running.computed = 100
    speculation.land(running, running.tokens[-1:])

    def drafts() -> int:
        found = speculation.choose({running: 1}, lambda s: 8, 100, TIMES)
        return sum(map(len, found.values()))

    assert drafts() > 0
    plain, drafted = StepWork([], 1, 101, 1), StepWork([(5, 100)], 0, 0, 5)
    for _ in range(60):
        speculation.ran(plain, 0, TIMES.step_ms(*plain), TIMES)
        speculation.ran(drafted, 1, 3.9 * TIMES.step_ms(*drafted), TIMES)
    assert drafts() == 0
    for _ in range(600):
        speculation.ran(plain, 0, TIMES.step_ms(*plain), TIMES)
    assert drafts() > 0, "what was once slow is tried again"
