"""A hundred schemas on the demo model: every output that ends by itself is what was asked for."""

from __future__ import annotations

import json

import jsonschema
import pytest

from penstock import LLM, SamplingParams
from penstock.core.errors import InvalidRequest
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
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: given, allowed only without use_beam"):
        SamplingParams(structured_outputs={"json_object": True}, use_beam_search=True, n=2)
