"""Which tokens may be drawn: by bad words, least lengths and grammars, however an output came to where it is."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.core.thinking import Thinking
from penstock.engine.masks import Masks
from penstock.engine.sampling import each_row
from penstock.nn.loader import load_model
from penstock.service.checkpoint import DEMO
from penstock.text.grammar import Grammars
from penstock.text.tokenizer import Tokenizer
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.proposers import guessing

VOCAB, EOS = 4096, 2
CPU = torch.device("cpu")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": SCHEMA, "minItems": 1000}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def grammars():
    return Grammars(DEMO, VOCAB)


@pytest.fixture(scope="module")
def demo():
    return load_model(DEMO, CPU)


def step(name="r", generated=(), tokens=(0,), sample=1, bad_words=(), stop_ids=(EOS,), **params) -> SequenceStep:
    return SequenceStep(
        name, 0, list(tokens), (0,), sample, SamplingParams(**params), 0, list(generated),
        stop_ids=frozenset(stop_ids), bad_words=bad_words,
    )  # fmt: skip


def allowed(masks: Masks, *steps: SequenceStep) -> tuple[list[set[int]], dict[int, str]]:
    """What may come after each row, and which rows are stuck."""
    rows = [row for one in steps for row in each_row(one, [])]
    found = masks.end(masks.begin(StepPlan(steps), rows), CPU)
    if found is None:
        return [set(range(masks._vocab_size))] * len(rows), {}
    bits = np.unpackbits(found.masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, : masks._vocab_size]
    by_row = {row: set(np.flatnonzero(own).tolist()) for row, own in zip(found.rows.tolist(), bits, strict=True)}
    everything = set(range(masks._vocab_size))
    return [by_row.get(row, everything) for row in range(len(rows))], found.stuck


# --- without a grammar

TOKENS = st.integers(0, 3)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple)


def completed(output, words):
    """Last tokens that would make the output end with one of the words, by the definition."""
    return {word[-1] for word in words if tuple([*output, word[-1]][-len(word) :]) == word}


@given(st.lists(TOKENS, max_size=8), WORDS, st.sets(TOKENS), st.integers(0, 6), st.none() | st.sets(TOKENS, min_size=1))
def test_what_would_end_too_early_or_complete_a_bad_word_is_out(output, words, stops, least, only):
    masks = Masks(40)
    asked = step(
        generated=output, bad_words=words, stop_ids=stops, min_tokens=least, allowed_token_ids=only, max_tokens=9
    )
    (found,), stuck = allowed(masks, asked)
    banned = completed(output, words) | (stops if len(output) < least else set())
    wanted = (set(range(40)) if only is None else only) - banned
    assert found == wanted if wanted else stuck


def test_a_draft_is_looked_at_as_if_those_before_it_were_right():
    masks = Masks(40)
    (first, second, third), _ = allowed(
        masks, step(generated=[7], tokens=[7, 3, 4], sample=3, bad_words=((3, 4), (7, 1)))
    )
    assert [40 - len(found) for found in (first, second, third)] == [1, 1, 0]
    assert (1 not in first, 4 not in second) == (True, True)


# --- with one


def spell(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_stop_tokens_are_allowed_exactly_where_the_grammar_accepts(tokenizer, grammars):
    masks = Masks(VOCAB, grammars)
    found, stuck = allowed(
        masks,
        *(step(text, spell(tokenizer, text), structured_outputs={"regex": "ab*c?"}) for text in ("", "a", "ab", "abc")),
    )
    assert not stuck
    assert [EOS in one for one in found] == [False, True, True, True]
    assert found[3] == {EOS}
    assert {tokenizer.decode([token]) for token in found[0]} >= {"a", "ab"}


def test_where_nothing_but_the_end_is_left_it_comes_before_it_is_due(tokenizer, grammars):
    for late in ({"ignore_eos": True}, {"min_tokens": 9, "max_tokens": 20}):
        goes_on, over = (
            step(text, spell(tokenizer, text), structured_outputs={"regex": "ab?"}, **late) for text in ("a", "ab")
        )
        found, _ = allowed(Masks(VOCAB, grammars), goes_on, over)
        assert EOS not in found[0]
        assert found[0]
        assert found[1] == {EOS}


def test_a_grammar_that_is_stuck_says_so_and_harms_no_other(tokenizer, grammars):
    masks = Masks(VOCAB, grammars)
    bad = ((spell(tokenizer, "a")[0],),)
    found, stuck = allowed(
        masks,
        step("never", structured_outputs={"json": {"$ref": "#"}}),
        step("fine", structured_outputs={"choice": ["yes"]}),
        step("excluded", structured_outputs={"regex": "a"}, bad_words=bad),
        step("elsewhere", spell(tokenizer, "zebra"), structured_outputs={"choice": ["yes"]}),
        step("free"),
    )
    assert stuck.keys() == {0, 2, 3}
    assert all(why.startswith("structured_outputs") for why in stuck.values()), "it is what its client asked for"
    assert {tokenizer.decode([token]) for token in found[1]} <= {"y", "ye", "yes"}
    assert len(found[4]) == VOCAB
    assert "no tokenizer" in allowed(Masks(VOCAB), step(structured_outputs={"regex": "a"}))[1][0]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 30), min_size=3, max_size=9), st.booleans())
def test_what_is_allowed_depends_on_the_output_alone(grammars, seed, lengths, loosely):
    """However it jumps about, it is as if the output had been read at once."""
    rng = random.Random(seed)
    asked = {"json": ENDLESS, "disable_any_whitespace": not loosely}

    def walk(masks, name, start, count):
        output = list(start)
        for _ in range(count):
            (found,), _ = allowed(masks, step(name, output, structured_outputs=asked))
            output.append(rng.choice(sorted(found)))
        return output

    one = Masks(VOCAB, grammars)
    outputs = [walk(Masks(VOCAB, grammars), "r", [], max(lengths))]
    outputs.append(walk(Masks(VOCAB, grammars), "r", outputs[0][: lengths[0]], max(lengths)))
    for i, length in enumerate(lengths):
        output = outputs[i % 2][:length]
        here = allowed(one, step("r", output, structured_outputs=asked))[0]
        assert here == allowed(Masks(VOCAB, grammars), step("r", output, structured_outputs=asked))[0]


def test_drafts_that_a_grammar_forbids_are_wrong(tokenizer, grammars):
    masks, asked = Masks(VOCAB, grammars), {"regex": "[0-9]{2}x*"}
    before = spell(tokenizer, "1")
    two, cross, other = (spell(tokenizer, text)[0] for text in ("2", "x", "z"))
    rows = [before[0], two, cross, other, two]
    found, stuck = allowed(masks, step("r", before, tokens=rows, sample=5, structured_outputs=asked))
    assert not stuck
    for place, text in enumerate(("1", "12", "12x")):
        alone, _ = allowed(Masks(VOCAB, grammars), step("r", spell(tokenizer, text), structured_outputs=asked))
        assert found[place] == alone[0]
    assert other not in found[2], "so it is not what is drawn there, and nothing after it counts"
    (again,), _ = allowed(masks, step("r", [*before, two], structured_outputs=asked))
    assert again == found[1], "the drafts have left nothing"


def test_a_grammar_waits_for_the_end_of_thinking(tokenizer, grammars):
    masks = Masks(VOCAB, grammars)
    (a,), (b,) = spell(tokenizer, "a"), spell(tokenizer, "b")
    asked = {"structured_outputs": {"regex": "ab"}, "thinking": Thinking(start=(8,), end=(9, 7))}
    everything = set(range(VOCAB))
    found, stuck = allowed(
        masks,
        *(
            step(f"r{i}", output, **asked)
            for i, output in enumerate(([], [8], [8, 9], [8, 9, 7], [8, b, 9, 7, a], [a], [8, 9, 7, a, b]))
        ),
    )
    assert not stuck
    (first,), _ = allowed(masks, step("alone", structured_outputs=asked["structured_outputs"]))
    assert found[0] == first | {8}
    assert found[1] == found[2] == everything - {EOS}, "the answer is still to come"
    assert found[3] == first
    assert found[4] == found[5] == {b}
    assert found[6] == {EOS}
    (one, two, three, four), stuck = allowed(masks, step("d", [8], tokens=[8, 9, 7, a], sample=4, **asked))
    assert not stuck
    assert (one, two, three, four) == (everything - {EOS}, everything - {EOS}, first, {b})
    (again,), _ = allowed(masks, step("d", [8, 9, 5], **asked))
    assert again == everything - {EOS}, "the drafts have left nothing"


def test_thinking_ends_when_its_budget_is_spent():
    masks, thinking = Masks(40), Thinking(start=(8,), end=(9, 7), budget=2)
    everything = set(range(40))
    outputs = {(): everything, (8,): everything, (8, 1): everything, (8, 1, 3): {9}, (8, 1, 3, 9): {7}}
    outputs |= {(8, 1, 3, 9, 7): everything, (8, 9, 7): everything, (1, 2, 3, 4): everything}
    found, stuck = allowed(masks, *(step(str(output), output, thinking=thinking) for output in outputs))
    assert found == list(outputs.values())
    assert not stuck


# --- in an engine


def prompt(tokenizer, text="A person as JSON: "):
    return spell(tokenizer, text)


def asked(tokenizer, name, schema=SCHEMA, text="A person as JSON: ", **params):
    params = {"temperature": 0.9, "max_tokens": 60, "stop_ids": [EOS]} | params
    return make_request(name, prompt(tokenizer, text), structured_outputs={"json": schema}, **params)


def crowd(tokenizer):
    """Guided in several ways, and not at all."""
    words = tuple((token,) for token in spell(tokenizer, '"') + spell(tokenizer, " "))
    yield asked(tokenizer, "object", seed=3)
    yield asked(tokenizer, "greedy", ENDLESS, temperature=0.0, max_tokens=70, text="x " * 70)
    yield asked(tokenizer, "penalised", ENDLESS, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=50)
    yield replace(asked(tokenizer, "words", ENDLESS, seed=6, logprobs=1, max_tokens=40), bad_words=words[1:])
    yield asked(tokenizer, "late", seed=7, min_tokens=16)
    yield make_request("free", prompt(tokenizer, "import os"), temperature=1.0, seed=8, max_tokens=50)
    close = tuple(spell(tokenizer, "</think>"))
    yield asked(tokenizer, "thinks", seed=9, text="A person: ", thinking=Thinking(end=close, budget=12))
    thinking = Thinking(start=tuple(spell(tokenizer, "import")), end=close, budget=3)
    yield make_request("ponders", prompt(tokenizer, "and so\n"), seed=10, max_tokens=30, thinking=thinking)


LIMITS = [
    {"ahead": False},
    {"budget": 16, "sequences": 8},
    {"budget": 16, "sequences": 8, "ahead": False},
    {"blocks": 6, "model_len": 320, "sequences": 6, "budget": 48},
    {"blocks": 6, "model_len": 320, "sequences": 6, "budget": 48, "ahead": False},
]


def test_company_chunks_preemption_and_looking_ahead_change_no_token(demo, tokenizer, grammars):
    alone = {}
    for request in crowd(tokenizer):
        alone |= Collector(make_engine(demo, grammars=grammars)).run(request)
    preempted = 0
    for limits in LIMITS:
        collector = Collector(make_engine(demo, grammars=grammars, **{"model_len": 512} | limits))
        for request in crowd(tokenizer):
            collector.engine.add(replace(request, priority=1))
        for _ in range(12):
            collector.step()
        collector.run(make_request("urgent", [7] * 250, max_tokens=3))
        assert {name: collector.tokens[name] for name in alone} == alone, limits
        assert collector.finish["object"] == "stop"
        preempted += collector.engine.scheduler.counters.preemptions
        assert collector.engine.executor.mask_costs.steps > 0
    assert preempted > 0
    known = {tuple(request.prompt): [*request.prompt, *alone[request.id]] for request in crowd(tokenizer)}

    def follows(tokens, count):
        """What the one that began like this will have; of those that begin alike, any's."""
        whole = next(whole for begun, whole in known.items() if tuple(tokens[: len(begun)]) == begun)
        return whole[len(tokens) : len(tokens) + count]

    for wrong, most in ((0.0, 4), (0.4, 3)):
        drafted = Collector(make_engine(demo, grammars=grammars, speculation=guessing(follows, wrong, most)))
        assert drafted.run(*crowd(tokenizer)) == alone
        counters = drafted.engine.scheduler.speculation.counters
        assert 0 < counters.accepted_tokens < counters.draft_tokens
    text = tokenizer.decode(alone["object"][:-1])
    assert text.startswith('{"name"')


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_it_goes_on_elsewhere_as_if_it_had_never_been_interrupted(demo, tokenizer, grammars, cut):
    for request in crowd(tokenizer):
        whole = Collector(make_engine(demo, grammars=grammars)).run(request)[request.id]
        if len(whole) > cut:
            rest = Collector(make_engine(demo, grammars=grammars)).run(replace(request, generated=tuple(whole[:cut])))
            assert whole[:cut] + rest[request.id] == whole


def test_a_step_that_failed_is_computed_again_with_the_same_result(demo, tokenizer, grammars):
    expected = Collector(make_engine(demo, grammars=grammars)).run(asked(tokenizer, "r", ENDLESS))
    collector = Collector(make_engine(demo, grammars=grammars))
    run, failed = collector.engine.executor.worker.run, []

    def fail_once(plan):
        result = run(plan)
        if not failed and plan.sequences[0].start > 20:
            failed.append(plan)
            raise MemoryError
        return result

    collector.engine.executor.worker.run = fail_once
    with pytest.raises(MemoryError):
        collector.run(asked(tokenizer, "r", ENDLESS))
    assert collector.run() == expected


def test_few_logits_give_the_tokens_of_all(demo, tokenizer, grammars, monkeypatch):
    few = load_model(DEMO, CPU)
    few.bound_logits(0)
    if few.bounded_logits is None:
        pytest.skip("logits cannot be bounded here")
    requests = [
        asked(tokenizer, "greedy", ENDLESS, temperature=0.0, min_tokens=9),
        asked(tokenizer, "ends", temperature=0.0),
        asked(tokenizer, "drawn", ENDLESS, seed=4, top_k=20, top_p=0.9),
        asked(tokenizer, "any", {}, seed=5, top_k=50, min_p=0.01, min_tokens=9),
        make_request("free", prompt(tokenizer, "import os"), temperature=0.0, max_tokens=50),
    ]
    chosen, choose = [], few.choose

    def counted(hidden, draws, masked=None):
        tokens = choose(hidden, draws, masked)
        chosen.append(tokens is not None and masked is not None)
        return tokens

    # there are too many of them for that to pay where tiles multiply
    monkeypatch.setattr(import_module("penstock.nn.ops.choose"), "MOST_ROWS_BESIDE_TILES", 32)
    monkeypatch.setattr(few, "choose", counted)
    expected = Collector(make_engine(demo, grammars=grammars)).run(*requests)
    assert Collector(make_engine(few, grammars=grammars)).run(*requests) == expected
    assert sum(chosen) > 50


def test_who_is_stuck_ends_with_an_error_and_leaves_nothing(demo, tokenizer, grammars):
    engine = make_engine(demo, grammars=grammars)
    engine.add(asked(tokenizer, "stuck", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}))
    engine.add(asked(tokenizer, "fine", seed=3))
    ends = {}
    while engine.has_work:
        for output in engine.step()[0]:
            if output.finish:
                ends[output.request_id] = output.finish, output.error
    assert ends["fine"] == ("stop", "")
    assert ends["stuck"][0] in ("error", "length")
    Collector(engine).run(make_request("next", [1], max_tokens=2))
    assert engine.executor.worker.counts()["grammars"] == 0
    assert engine.scheduler.pool.used == 0
