"""A hundred schemas on the demo model: every output that ends by itself is what was asked for."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from penstock import LLM, SamplingParams
from penstock.core.errors import InvalidRequest
from penstock.llm import BeamSearchParams
from tests.helpers.schemas import schemas

ALL = dict(schemas())


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", max_num_seqs=64, max_model_len=1024, kv_cache_memory=1 << 26)


def test_every_answer_that_ends_is_valid(llm):
    assert len(ALL) == 100
    for schema in ALL.values():
        jsonschema.validators.validator_for(schema).check_schema(schema)
    asked = [
        SamplingParams(
            temperature=heat,
            seed=i,
            max_tokens=200,
            structured_outputs={"json": schema, "disable_any_whitespace": heat == 0},
        )
        for heat in (0.0, 1.0)
        for i, schema in enumerate(ALL.values())
    ]
    outputs = llm.generate([f"{name} as JSON: " for name in ALL] * 2, asked)
    ended = [(name, o.outputs[0]) for name, o in zip([*ALL] * 2, outputs, strict=True)]
    invalid = []
    for name, output in ended:
        if output.finish_reason == "stop":
            try:
                jsonschema.validate(json.loads(output.text), ALL[name])
            except (ValueError, jsonschema.ValidationError) as error:
                invalid.append((name, output.text, str(error).splitlines()[0]))
    assert invalid == []
    assert {output.finish_reason for _, output in ended} <= {"stop", "length"}
    whole = {name for name, output in ended if output.finish_reason == "stop"}
    assert len(whole) >= 90, ALL.keys() - whole


def test_outputs_of_one_prompt_have_matchers_of_their_own(llm):
    params = SamplingParams(n=8, temperature=1.5, seed=1, max_tokens=40, structured_outputs={"regex": "[ab]{3,9}!"})
    (found,) = llm.generate("letters: ", params)
    assert {output.finish_reason for output in found.outputs} == {"stop"}
    texts = [output.text for output in found.outputs]
    assert len(set(texts)) > 1
    assert all(3 < len(text) < 11 and set(text[:-1]) <= {"a", "b"} and text[-1] == "!" for text in texts)
    again = llm.generate(
        "letters: ", SamplingParams(temperature=1.5, seed=4, max_tokens=40, structured_outputs={"regex": "[ab]{3,9}!"})
    )
    assert again[0].text == texts[3]


def test_what_cannot_be_compiled_is_refused_before_anything_runs(llm):
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.json\.items: uniqueItems: not supported"):
        llm.generate("x", SamplingParams(structured_outputs={"json": {"items": {"uniqueItems": True}}}))


def test_a_beam_search_finds_the_likeliest_of_what_is_valid(llm):
    """Whole catalogues of items, as generative recommendation has them: what is found is in it, and the best of it."""
    items = [f"{name}.{way}" for name in ("os", "sys", "socket", "json") for way in ("open", "path", "close", "load")]
    asked = {
        "max_tokens": 30,
        "structured_outputs": {"choice": items},
        "length_penalty": 0.0,
        "early_stopping": "never",
        "logprobs": 0,
    }
    (wide,) = llm.beam_search("The function ", BeamSearchParams(beam_width=60, **asked))
    texts = [one.text.removeprefix("The function ") for one in wide.sequences]
    assert {*texts} == {*items}, "some are spelt in several ways"
    assert {one.finish_reason for one in wide.sequences} == {"stop"}
    sums = [one.cum_logprob for one in wide.sequences]
    assert sums == sorted(sums, reverse=True)
    length = len(llm.tokenizer.encode("The function "))
    for one in wide.sequences[::9]:
        scored = llm.generate({"prompt_token_ids": one.tokens}, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        given = [report.chosen for report in one.logprobs]
        expected = [report.chosen for report in scored.prompt_logprobs[length:]]
        assert given[: len(expected)] == pytest.approx(expected, abs=0.1), "those among all tokens, allowed or not"
        assert sum(given) == pytest.approx(one.cum_logprob, abs=1e-3)
    (narrow,) = llm.beam_search("The function ", BeamSearchParams(beam_width=6, **asked))
    assert {one.text for one in narrow.sequences} <= {one.text for one in wide.sequences}
    together = llm.beam_search(
        ["The function ", "class Thread", "The function "], BeamSearchParams(beam_width=6, **asked)
    )
    for again in (together[0], together[2]):
        assert [(one.tokens, one.cum_logprob) for one in again.sequences] == [
            (one.tokens, one.cum_logprob) for one in narrow.sequences
        ]


def test_there_are_no_more_results_than_may_follow(llm):
    params = SamplingParams(n=8, use_beam_search=True, max_tokens=9, structured_outputs={"regex": "x|y"})
    (found,) = llm.generate("letters: ", params)
    assert {output.text for output in found.outputs} == {"x", "y"}
    assert 2 <= len(found.outputs) < 8
    assert {output.finish_reason for output in found.outputs} == {"stop"}


def test_beams_follow_grammars_with_a_history(llm):
    """Each beam has a state of its own, whatever the others came to."""
    pattern = {"regex": "(ab|ba){2,6}!"}
    (found,) = llm.generate(
        "letters: ", SamplingParams(n=40, use_beam_search=True, max_tokens=14, structured_outputs=pattern)
    )
    assert len(found.outputs) == 40
    for output in found.outputs:
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern["regex"], output.text), output.text
