from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.chat import ChatBody
from penstock.api.completions import CompletionBody
from penstock.api.http import tenant_name
from penstock.api.schema import NOT_YET, field_table, parse, prompts_of, sampling_params
from penstock.api.tokenize import DetokenizeBody, TokenizeBody
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.sampling import SamplingParams
from penstock.core.structured_outputs import StructuredOutputs
from penstock.kv.keys import root_key, salted

MESSAGES = [{"role": "user", "content": "hi"}]
VOCAB = 100
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def chat(**fields: Any) -> tuple[ChatBody, list[str]]:
    return parse(json.dumps({"messages": MESSAGES} | fields).encode(), ChatBody)


def params(defaults: Any = None, **fields: Any) -> SamplingParams:
    return sampling_params(chat(**fields)[0], defaults or {}, VOCAB)


def completion_params(defaults: Any, **fields: Any) -> SamplingParams:
    body, _ = parse(json.dumps({"prompt": "a"} | fields).encode(), CompletionBody)
    return sampling_params(body, defaults, VOCAB)


def completion_from(tenant: str, **fields: Any) -> CompletionBody:
    body, _ = parse(json.dumps({"prompt": "a"} | fields).encode(), CompletionBody)
    body.came_from(tenant)
    return body


def test_an_empty_body_means_the_defaults() -> None:
    assert params() == SamplingParams(max_tokens=None)
    assert completion_params({}) == SamplingParams(max_tokens=16)


def test_every_sampling_field_arrives() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "stop": ["a", "b"], "stop_token_ids": [5], "ignore_eos": True, "max_tokens": 7,
        "seed": -4, "n": 2, "skip_special_tokens": False, "include_stop_str_in_output": True, "min_tokens": 2,
        "bad_words": ["x"], "allowed_token_ids": [1, 2], "prompt_logprobs": 3, "truncate_prompt_tokens": 9,
        "truncation_side": "right",
    }  # fmt: skip
    expected = SamplingParams(**given, logit_bias={7: -100, 8: 2.5}, logprobs=2)
    assert params(**given, logit_bias={"7": -100, "8": 2.5}, logprobs=True, top_logprobs=2) == expected
    assert completion_params({}, **given, logit_bias={"7": -100, "8": 2.5}, logprobs=2) == expected


def test_the_body_goes_before_the_models_defaults_and_these_before_ours() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    found = params(defaults, temperature=0, top_k=None)
    assert (found.temperature, found.top_k, found.max_tokens, found.top_p) == (0, 20, 99, 1.0)
    assert completion_params(defaults).max_tokens == 99


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert params(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert params(max_completion_tokens=3).max_tokens == 3


def test_one_stop_string_needs_no_list() -> None:
    assert params(stop="x").stop == ("x",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("min_p", 2), ("top_k", -2), ("top_k", 1.5),
        ("top_k", 2**31), ("n", 0), ("n", 10**30), ("n", "2"), ("seed", 2**63), ("seed", 1.5), ("max_tokens", 0),
        ("max_tokens", 2**31), ("max_completion_tokens", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("repetition_penalty", 0), ("stop", [1]), ("stop", {}), ("stop", ["a"] * 17), ("stop", ""),
        ("stop_token_ids", [VOCAB]), ("stop_token_ids", [-1]), ("stop_token_ids", 3), ("stop_token_ids", ["1"]),
        ("logit_bias", {"x": 1}), ("logit_bias", {"100": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "a"}), ("logit_bias", {"1": None}), ("logit_bias", {"1_0": 1}), ("logit_bias", [1]),
        ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", -2), ("top_logprobs", 1),
        ("stream", "yes"), ("stream_options", True),
        ("stream_options", {"include_usage": True}), ("min_tokens", -1), ("min_tokens", 1.5), ("min_tokens", 2**31),
        ("bad_words", "x"), ("bad_words", [1]), ("bad_words", [""]), ("bad_words", ["\t"]), ("bad_words", ["x"] * 257),
        ("allowed_token_ids", []), ("allowed_token_ids", [VOCAB]), ("allowed_token_ids", [-1]),
        ("allowed_token_ids", {"1": 1}), ("allowed_token_ids", [1.5]), ("prompt_logprobs", 21), ("prompt_logprobs", -2),
        ("prompt_logprobs", True), ("prompt_logprobs", 10**30), ("prompt_logprobs", math.nan),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", "1"),
        ("truncation_side", "middle"), ("truncation_side", 1), ("truncation_side", []),
        ("cache_salt", ""), ("cache_salt", 1), ("cache_salt", "x" * 1025), ("return_token_ids", "yes"),
        ("continue_final_message", 1), ("add_generation_prompt", "no"),
        ("use_beam_search", 1), ("length_penalty", 2), ("length_penalty", "x"), ("length_penalty", math.nan),
        ("early_stopping", True), ("early_stopping", "never"), ("early_stopping", 0), ("early_stopping", "x"),
        ("early_stopping", [1]),
        ("priority", 2**31), ("priority", "high"), ("metadata", "a"), ("user", 1), ("messages", []), ("messages", "hi"),
        ("messages", [1]), ("messages", [{"role": "user"}]),
        ("messages", [{"role": "", "content": "a"}]), ("messages", [{"content": "a"}]),
        ("messages", [{"role": ["user"], "content": "a"}]), ("chat_template_kwargs", [1]), ("model", 3),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(**{field: value})
    assert caught.value.field is not None
    assert caught.value.field.replace(".", "[").split("[")[0] == field
    assert str(caught.value).startswith(field)
    assert len(str(caught.value)) < 300


def test_the_sentence_says_value_and_allowed() -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature: 'hot', allowed is a number$"):
        chat(temperature="hot")
    with pytest.raises(InvalidRequest, match=r"^stop\[1\]: 7, allowed is a string$"):
        chat(stop=["a", 7])
    with pytest.raises(InvalidRequest, match=r"^priority: 3000000000, allowed is at most 2147483647$"):
        chat(priority=3_000_000_000)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"3", b'{"messages": "\xff"}', b"[" * 10_000, b'{"user": "\\ud800"}']
)
def test_what_is_no_json_object(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body"):
        parse(data, ChatBody)


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_unserved_fields_pass_when_they_change_nothing_and_are_named_when_they_would(name: str) -> None:
    outer, _, inner = name.partition(".")

    def fields(value: object) -> dict[str, Any]:
        return {outer: {inner: value} if inner else value}

    def asked(value: object) -> list[str]:
        if name not in ChatBody.model_fields:
            return chat(**fields(value))[1]
        return parse(json.dumps({"prompt": "a"} | fields(value)).encode(), CompletionBody)[1]

    for value in (None, *NOT_YET[name]):
        assert asked(value) == []
    with pytest.raises(UnsupportedField, match=f"^{name} is not supported yet$") as caught:
        asked({"something": "else"})
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "beam_width", "regex", "max_new_tokens"])
def test_removed_fields_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedField, match=name):
        chat(**{name: "x"})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_formats_are_structured_outputs() -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    as_schema = SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA), max_tokens=None)
    assert params(response_format=asked) == params(structured_outputs={"json": SCHEMA}) == as_schema
    assert params(response_format={"type": "json_object"}) == params(structured_outputs={"json_object": True})
    assert params(response_format={"type": "text"}) == params()
    beside = params(response_format={"type": "text"}, structured_outputs={"choice": ["a", "b"], "regex": None})
    assert beside.structured_outputs == StructuredOutputs(choice=("a", "b"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml', allowed are text"),
        ({"response_format": {}}, "response_format.type: None, allowed are"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type: 'structural_tag', allowed"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema: missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
            "response_format.json_schema.schema: 70013 bytes, at most",
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema is not supported"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs: given, allowed only without response_format",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs: regex and choice, exactly one"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice: ''"),
        ({"structured_outputs": 3}, "structured_outputs: 3, allowed is an object"),
    ],
)
def test_a_form_that_is_wrong_is_named_as_it_was_written(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(**fields)
    assert str(caught.value).startswith(says)
    assert says.startswith(str(caught.value.field))


def test_whole_numbers_may_be_written_with_a_point() -> None:
    given: dict[str, Any] = {"max_tokens": 7.0, "seed": -4.0, "n": 2.0, "stop_token_ids": [5.0, 6]}
    assert params(**given) == params(**{name: json.loads(json.dumps(v).replace(".0", "")) for name, v in given.items()})
    assert prompts_of([[1.0, 2], [3]], VOCAB) == [[1, 2], [3]]
    for field, value in (("seed", 1e300), ("seed", math.inf), ("max_tokens", 1e300), ("stop_token_ids", [1e300])):
        with pytest.raises(InvalidRequest, match=field):
            params(**{field: value})
    with pytest.raises(InvalidRequest, match="temperature"):
        params(max_tokens=1.0, temperature=math.nan)


def test_what_is_to_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body, ignored = chat(tools=tools, tool_choice="none", parallel_tool_calls=True)
    assert (body.tool_use, ignored) == (None, [])
    for choice in (None, "auto", "required"):
        assert chat(tools=tools, tool_choice=choice)[0].tool_use.choice == (choice or "auto")
    assert chat(tools=[], tool_choice="auto")[0].tool_use is None


def test_unknown_fields_are_ignored_and_reported() -> None:
    options = {"include_obfuscation": False, "include_usage": True, "continuous_usage_stats": None}
    body, ignored = chat(zebra=1, prompt_cache_key="a", user="u", stream=True, stream_options=options)
    assert ignored == ["zebra", "stream_options.include_obfuscation"]
    assert body.user == "u"


def test_a_field_is_served_or_not_but_listed() -> None:
    table = field_table(CompletionBody)
    assert table["suffix"] == "not yet"
    assert table["echo"] == "served"
    assert field_table(ChatBody)["echo"] == "served"
    assert table["stream_options.continuous_usage_stats"] == "served"
    assert table["store"] == "ignored"
    assert "zebra" not in table


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens: 3, allowed is at most max_tokens, which is 2"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs: 0, allowed only without stream: true"),
        ({"stream": True, "stream_options": {"include_usage": 2}}, "stream_options.include_usage: 2, allowed is true"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": "x"}},
            "stream_options.continuous_usage_stats: 'x', allowed is true or false",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options: given, allowed only with stream: true"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message: true, allowed only without add_generation_prompt: true",
        ),
        (
            {"allowed_token_ids": [5, VOCAB]},
            "allowed_token_ids: 100 is out of vocabulary, allowed are token ids from 0 to 99",
        ),
    ],
)
def test_what_contradicts_itself_or_the_model_is_explained(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(**fields)
    assert str(caught.value).startswith(named)


def test_a_prompt_opens_a_turn_unless_it_goes_on_with_one() -> None:
    def opens(**fields: bool | None) -> bool:
        return chat(**fields)[0].opens_turn

    assert opens()
    assert opens(continue_final_message=False)
    assert not opens(continue_final_message=True)
    assert not opens(continue_final_message=True, add_generation_prompt=False)
    assert not opens(add_generation_prompt=False)


def test_an_echo_with_logprobs_wants_those_of_the_prompt() -> None:
    assert completion_params({}, echo=True, logprobs=2).prompt_logprobs == 2
    assert completion_params({}, logprobs=2).prompt_logprobs is None
    assert completion_params({}, echo=True, prompt_logprobs=1).prompt_logprobs == 1
    assert completion_params({}, echo=True, max_tokens=0).max_tokens == 1


def test_tokenize_takes_one_of_prompt_and_messages() -> None:
    parse(b'{"prompt": ""}', TokenizeBody)
    for data in (b"{}", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}'):
        with pytest.raises(InvalidRequest, match="exactly one"):
            parse(data, TokenizeBody)


@given(field=st.sampled_from(sorted(set(ChatBody.model_fields) | set(NOT_YET))), value=JSON)
def test_no_value_of_any_field_is_our_own_fault(field: str, value: Any) -> None:
    with suppress(InvalidRequest):
        assert isinstance(params(**{field: value}), SamplingParams)


@given(JSON)
def test_any_prompt_is_prompts_or_the_users_mistake(prompt: object) -> None:
    try:
        found = prompts_of(prompt, VOCAB)
    except InvalidRequest:
        found = []
    for entry in found:
        assert entry
        assert isinstance(entry, str) or all(type(t) is int and 0 <= t < VOCAB for t in entry)


@given(
    st.lists(st.text(min_size=1), min_size=1) | st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1), min_size=1)
)
def test_good_prompts_stay_as_they_are(prompts: list[Any]) -> None:
    assert prompts_of(prompts, VOCAB) == prompts
    assert prompts_of(prompts[0], VOCAB) == prompts[:1]


@given(JSON)
def test_any_tokens_are_token_ids_or_the_users_mistake(tokens: object) -> None:
    data = json.dumps({"tokens": tokens}).encode()
    try:
        body, _ = parse(data, DetokenizeBody)
    except InvalidRequest:
        assert not (isinstance(tokens, list) and all(type(t) is int and abs(t) < 2**31 for t in tokens))
    else:
        assert body.tokens == tokens


# --- beam search


def test_a_beam_search_is_what_the_engine_is_told() -> None:
    found = params(use_beam_search=True, n=4, length_penalty=0, early_stopping="never", temperature=0.7, top_p=0.5)
    assert (found.use_beam_search, found.n, found.length_penalty, found.early_stopping) == (True, 4, 0.0, "never")
    assert params(use_beam_search=False, length_penalty=1.0, early_stopping=False) == params()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True), ("presence_penalty", 1), ("frequency_penalty", 0.5), ("repetition_penalty", 1.1),
        ("logit_bias", {"1": 1}), ("stop", "x"), ("prompt_logprobs", 0),
        ("length_penalty", 17), ("length_penalty", -17), ("length_penalty", math.inf),
        ("early_stopping", 1), ("early_stopping", "always"), ("n", 129), ("logprobs", -1),
    ],
)  # fmt: skip
def test_what_contradicts_a_beam_search_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^(use_beam_search|{field}): ") as caught:
        params(**{"use_beam_search": True, field: value})
    assert caught.value.field == ("use_beam_search" if field == "stream" else field)


def test_what_a_model_would_have_tokens_sampled_by_does_not_contradict_it() -> None:
    found = params({"repetition_penalty": 1.05, "top_p": 0.8}, use_beam_search=True, n=2)
    assert found.repetition_penalty == 1.0


def test_what_masks_tokens_does_not_contradict_it_either() -> None:
    masks = {"min_tokens": 2, "bad_words": ["x"], "allowed_token_ids": [1], "structured_outputs": {"regex": "a"}}
    found = params(use_beam_search=True, n=2, **masks)
    assert (found.min_tokens, found.bad_words, found.allowed_token_ids) == (2, ("x",), (1,))
    found = params(use_beam_search=True, n=2, response_format={"type": "json_object"})
    assert found.structured_outputs is not None


def test_an_echo_with_logprobs_contradicts_it() -> None:
    with pytest.raises(InvalidRequest, match=r"^echo: true with logprobs, ") as caught:
        completion_params({}, use_beam_search=True, echo=True, logprobs=1)
    assert caught.value.field == "echo"


API_KEYS = st.sampled_from(["a", "b", "ab", "ключ"]) | st.text(st.characters(codec="utf-8"), min_size=1)
SALTS = st.text(st.characters(codec="utf-8"), max_size=8)  # "" is none
FORGED = st.builds(lambda key, salt: tenant_name(key) + salt, API_KEYS, SALTS)  # as if it were another's


@given(pairs=st.lists(st.tuples(API_KEYS, SALTS | FORGED), unique=True, min_size=2, max_size=8))
def test_every_pair_of_key_and_salt_has_a_root_and_a_conversation_of_its_own(pairs: list[tuple[str, str]]) -> None:
    root = root_key("model")
    bodies = [
        completion_from(tenant_name(key), **({"cache_salt": given, "prompt_cache_key": given} if given else {}))
        for key, given in pairs
    ]
    assert len({salted(root, body.prefix_salt) for body in bodies}) == len(pairs)
    assert root not in {salted(root, body.prefix_salt) for body in bodies}
    conversations = [body.conversation for body in bodies if body.prompt_cache_key]
    assert len(set(conversations)) == len(conversations) == sum(bool(given) for _, given in pairs)


def test_without_tenants_salt_and_conversation_are_the_bodys() -> None:
    body = completion_from("", cache_salt="s", prompt_cache_key="c")
    assert (body.prefix_salt, body.conversation) == ("s", "c")
    body = completion_from("")
    assert (body.prefix_salt, body.conversation) == ("", "")
