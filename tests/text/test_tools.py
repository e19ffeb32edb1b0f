"""Parsers of tool calls: what each makes of its family's text, and that it is the same however the text is cut."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.tools import tool_use
from penstock.service.checkpoint import DEMO
from penstock.text.grammar import Grammars, check
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools import PARSERS, detected
from penstock.text.tools.base import NUMBER, Arguments, Call, ToolParser
from penstock.text.tools.forced import NamedCall, RequiredCalls, calls_schema, closed

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = {"get_weather": WEATHER, "stop": {"type": "object", "properties": {}}}
OSLO = {"city": 'Oslo {"}\\ 🙂', "days": 3, "tags": ["a", "b]"], "note": None}
BERGEN = {"city": "Bergen"}


def obj(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def qwen(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


PLAIN = {"city": OSLO["city"], "days": "3", "tags": '["a", "b]"]', "note": "null"}
TWO = [("get_weather", OSLO), ("get_weather", BERGEN)]
O, B = json.dumps(OSLO, ensure_ascii=False), json.dumps(BERGEN)  # noqa: E741
LIST = f"[{obj('get_weather', OSLO)}, {obj('get_weather', BERGEN)}]"
PYTHON = f"get_weather(city={OSLO['city']!r}, days=3, tags=['a', \"b]\"], note=None)"
PYTHON_TWO = f'[{PYTHON}, get_weather(city="Bergen")]'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.get_weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

# parser -> outputs: the text, its content, its calls
SAMPLES: dict[str, list[tuple[str, str, list]]] = {
    "hermes": [
        (f"<tool_call>\n{obj('get_weather', OSLO)}\n</tool_call>", "", TWO[:1]),
        (f"Well.\n<tool_call>{obj('get_weather', OSLO)}</tool_call>\n<tool_call>\n{obj('get_weather', BERGEN)}"
         "\n</tool_call>\n", "Well.", TWO),
        (f'<tool_call>{{"arguments": {B}, "name": "get_weather"}}</tool_call> Done.', " Done.", TWO[1:]),
        ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", {})]),
        ('<tool_call>{"name": "stop", "arguments": "{}"}}</tool_call>', "", [("stop", {})]),
        ('<tool_call>{"name": "stop", "arguments": null</tool_call>', "", [("stop", {})]),
        ("a <tool_call> is no call", "a <tool_call> is no call", []),
        ('<tool_call>{"who": 1}</tool_call>', '<tool_call>{"who": 1}</tool_call>', []),
        ("a < b, and so on <tool_", "a < b, and so on <tool_", []),
    ],
    "llama3_json": [
        (obj("get_weather", OSLO, "parameters"), "", TWO[:1]),
        (f"<|python_tag|>{obj('get_weather', OSLO, 'parameters')}; {obj('get_weather', BERGEN)}", "", TWO),
        ('{"name": "Ann", "age": 3} is who', '{"name": "Ann", "age": 3} is who', []),
        ('{"a": {"name": 1}}', '{"a": {"name": 1}}', []),
        ("Hello {}", "Hello {}", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS] {LIST}", "", TWO),
        (f"[TOOL_CALLS]get_weather{O}[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{B}", "", TWO),
        (f"So: [TOOL_CALLS]get_weather[ARGS]{O}", "So:", TWO[:1]),
        ("Only [TOOL_CALLS] said", "Only [TOOL_CALLS] said", []),
    ],
    "deepseek_v3": [
        (f"Hm.<｜tool▁calls▁begin｜>{V3.replace('{}', O)}\n{V3.replace('{}', B)}<｜tool▁calls▁end｜>", "Hm.", TWO),
    ],
    "deepseek_v31": [
        (f"Hm.<｜tool▁calls▁begin｜>{V31.replace('{}', O)}{V31.replace('{}', B)}<｜tool▁calls▁end｜>", "Hm.", TWO),
    ],
    "kimi_k2": [
        (f"<|tool_calls_section_begin|>{KIMI.format(0, O)}{KIMI.format(1, B)}<|tool_calls_section_end|>", "", TWO),
    ],
    "qwen3_coder": [
        (f"Now\n\n{qwen('get_weather', **PLAIN)}\n{qwen('get_weather', city='Bergen')}", "Now", TWO),
        (qwen("stop"), "", [("stop", {})]),
        (qwen("other", a="1", b="two\nlines"), "", [("other", {"a": "1", "b": "two\nlines"})]),
        ("<function=stop></function>", "", [("stop", {})]),
        ("<tool_call> no", "<tool_call> no", []),
    ],
    "seed_oss": [
        (f"Now {qwen('get_weather', **PLAIN)}\n{qwen('stop')}".replace("tool_call", "seed:tool_call"), "Now",
         [*TWO[:1], ("stop", {})]),
    ],
    "minimax_m2": [
        ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bergen</parameter>\n</invoke>\n'
         '<invoke name="get_weather"><parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>', "",
         [TWO[1], ("get_weather", {"days": 3})]),
    ],
    "glm45": [
        (f"Now\n{glm('get_weather', **PLAIN)}\n{glm('get_weather', city='Bergen')}", "Now", TWO),
        ("<tool_call>stop</tool_call>", "", [("stop", {})]),
    ],
    "granite": [(f"<|tool_call|>{LIST}", "", TWO), ("<|tool_call|> none", "<|tool_call|> none", [])],
    "jamba": [
        (f"<tool_calls>{LIST}</tool_calls>", "", TWO),
        (f"<tool_calls>\n{obj('get_weather', OSLO)}\n{obj('get_weather', BERGEN)}\n</tool_calls>", "", TWO),
    ],
    "phi4_mini_json": [(f"functools{LIST}", "", TWO), ("Use functools.", "Use functools.", [])],
    "internlm": [
        (f"So<|action_start|><|plugin|>\n{obj('get_weather', OSLO, 'parameters')}<|action_end|>", "So", TWO[:1]),
    ],
    "pythonic": [
        (PYTHON_TWO, "", TWO),
        (f"<|python_start|>{PYTHON_TWO}<|python_end|>", "", TWO),
        ("[stop()]", "", [("stop", {})]),
        ("[stop(a=true, b={'x': (1, 2)}, c=-1.5, d=thing)]", "",
         [("stop", {"a": True, "b": {"x": [1, 2]}, "c": -1.5, "d": "thing"})]),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("[print(1)]", "[print(1)]", []),
    ],
    "olmo3": [(f'<function_calls>\n{PYTHON}\nget_weather(city="Bergen")\n</function_calls>', "", TWO)],
}  # fmt: skip
ALIASES = {"hunyuan_a13b", "llama4_json", "llama4_pythonic", "minimax", "qwen3_xml"}
CASES = [(name, *sample) for name, samples in SAMPLES.items() for sample in samples]
# pieces from which texts are made that look like calls and are none
PIECES = sorted({p for parser in PARSERS.values() for p in (*parser.markers, *parser.signs)})
PIECES += ['{"name": "stop"', ', "arguments": ', '{"a": [1, "}"]}', "}", "]", "[", "stop(", "city='x'", ")", ",", "\n"]
PIECES += ["functools", "<function=stop>", "<parameter=city>", "</parameter>", "</function>", "```", " so ", "<", "é"]


@dataclass
class Folded:
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events) -> None:
        for event in events:
            if isinstance(event, Call):
                self.calls.append([event.name, ""])
            elif isinstance(event, Arguments):
                self.calls[-1][1] += event.text
            else:
                self.content += event


def fold(parser: ToolParser, pieces: list[str]) -> Folded:
    folded = Folded()
    for piece in pieces:
        folded.add(parser.push(piece))
    folded.add(parser.finish())
    return folded


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_every_parser_has_samples() -> None:
    assert SAMPLES.keys() | ALIASES == PARSERS.keys()


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_what_they_make_of_it(name: str, text: str, content: str, calls: list) -> None:
    for pieces in ([text], list(text)):
        found = fold(PARSERS[name](TOOLS), pieces)
        assert found.content == content
        assert [(called, json.loads(arguments)) for called, arguments in found.calls] == calls


@given(data=st.data())
def test_it_does_not_matter_how_a_text_is_cut(data: st.DataObject) -> None:
    name, text, _, _ = data.draw(st.sampled_from(CASES))
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, len(text)))]  # ended by max_tokens
    places = data.draw(st.lists(st.integers(0, len(text))))
    assert fold(PARSERS[name](TOOLS), cut(text, places)) == fold(PARSERS[name](TOOLS), [text])


@given(data=st.data())
def test_nor_of_a_text_that_only_looks_like_calls(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SAMPLES)))
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=14)))
    places = data.draw(st.lists(st.integers(0, len(text))))
    whole = fold(PARSERS[name](TOOLS), [text])
    assert fold(PARSERS[name](TOOLS), cut(text, places)) == whole
    if not whole.calls:
        assert whole.content == text


@given(text=st.text(), name=st.sampled_from(sorted(SAMPLES)))
def test_a_text_without_calls_is_what_it_was(text: str, name: str) -> None:
    assert fold(PARSERS[name](TOOLS), [text]) == Folded(text)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_arguments_come_while_they_are_written(name: str) -> None:
    """The name as soon as it is there, and every argument as soon as it is whole."""
    text = next(sample[0] for sample in SAMPLES[name] if len(sample[2]) == 2 or name == "internlm")
    parser, folded = PARSERS[name](TOOLS), Folded()
    text = text[: text.index("3") + len("3\n</parameter>")]
    for char in text:
        folded.add(parser.push(char))
    assert folded.calls[-1][0] == "get_weather"
    assert '"days": 3' in folded.calls[-1][1]


def test_which_parser_a_template_is_for() -> None:
    for name, parser in PARSERS.items():
        if name not in ALIASES and parser.signs:
            assert detected("{{ tools }}" + " ".join(parser.signs), "") is parser, name
    assert detected("{{ messages }}", "qwen3") is PARSERS["hermes"]
    assert detected("{{ messages }}", "unheard of") is None


def test_ids_that_templates_insist_on() -> None:
    unique = "0123456789abcdef01234567"
    assert PARSERS["hermes"].call_id("f", 0, unique) == f"call_{unique}"
    assert PARSERS["kimi_k2"].call_id("f", 1, unique) == "functions.f:1"
    assert len(PARSERS["mistral"].call_id("f", 0, unique)) == 9


# --- calls in a frame

FRAMED = [name for name in sorted(SAMPLES) if PARSERS[name].frames(())]
TOKENIZER, GRAMMARS = Tokenizer(DEMO), Grammars(DEMO, 4096)
SPECIAL = range(3)  # tokens of the demo model


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FRAMED)
def test_strict_calls_have_their_form_wherever_the_model_begins_one(name: str, special: bool) -> None:
    """What the grammar lets the model write is what the parser reads. Markers that are special tokens are taken for
    those that the demo model has."""
    parser = PARSERS[name]
    tokens = dict(zip(parser.markers, SPECIAL, strict=False)) if special else {}
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    function = {"name": "get_weather", "strict": True, "parameters": schema}
    use = tool_use([{"type": "function", "function": function}], "auto", None)
    assert use is not None
    form = use.free_form(parser, tokens, None)
    assert form is not None
    check(form)
    matcher = GRAMMARS.matcher(form)

    def follows(text: str) -> bool:
        ids: list[int] = []
        for part in re.split("|".join(f"({re.escape(marker)})" for marker in tokens) or "(?!)", text):
            if part:
                ids += [tokens[part]] if part in tokens else TOKENIZER.encode(part, False)
        one = matcher.deep_copy()
        return one.try_consume_tokens(ids) == len(ids) and one.is_accepting()

    assert follows("It is a text of { [ and 1.")
    for frame in parser.frames(tokens):
        head, tail = frame.named("get_weather").replace(NUMBER, "0"), frame.tail
        calls = [f'{head}{{"city": "Oslo"}}{tail}'] * (1 if frame.between is None else 2)
        text = f"Well. {frame.begin}{frame.opening}{(frame.between or '').join(calls)}{frame.closing}"
        assert follows(text), text
        found = fold(parser({"get_weather": schema}), [text])
        assert [(called, json.loads(said)) for called, said in found.calls] == [
            ("get_weather", {"city": "Oslo"}) for _ in calls
        ]
        assert found.content == "Well."
        assert not follows(text.replace("Oslo", "Rome"))
        assert not follows(text.replace("get_weather", "get_time"))
        assert not follows(f"Well. {frame.begin} and so on")


# --- calls that are forced


@given(places=st.lists(st.integers(0, 200)))
def test_forced_calls_are_read(places: list[int]) -> None:
    text = f"[{obj('get_weather', OSLO, 'parameters')},\n  {obj('stop', {}, 'parameters')}]"
    found = fold(RequiredCalls(TOOLS), cut(text, places))
    calls = [(name, json.loads(arguments)) for name, arguments in found.calls]
    assert calls == [("get_weather", OSLO), ("stop", {})]
    assert not found.content
    assert fold(NamedCall(TOOLS, "get_weather"), cut(O, places)) == Folded("", [["get_weather", O]])
    for text in ("<", "<think>\nwell, {}"):  # a limit, or the end of the reasoning, came before the call
        assert fold(NamedCall(TOOLS, "get_weather"), cut(text, places)) == Folded(text, [])


def test_schemas_are_closed_where_that_takes_nothing_away() -> None:
    inner = {"type": "object", "properties": {"y": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"x": inner, "all": {"type": "object"}}, "$defs": {"d": inner}}
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {"x": shut, "all": {"type": "object"}},
        "$defs": {"d": shut},
        "additionalProperties": False,
    }
    for open_one in (
        {"allOf": [inner, {"type": "object", "properties": {"x": {}}}]},
        {"properties": {"x": {}}, "anyOf": [inner]},
        {"properties": {"x": {}}, "additionalProperties": {"type": "integer"}},
    ):
        assert closed(open_one) == open_one


def test_references_still_lead_where_they_did() -> None:
    schema = {"properties": {"default": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"const": {"$ref": "#/x"}}}}
    moved = calls_schema([("f", schema), ("g", {"$ref": "#"})], several=False)
    first, second = (each["properties"]["parameters"] for each in moved["items"]["anyOf"])
    assert first["properties"]["default"] == {"$ref": "#/items/anyOf/0/properties/parameters/$defs/a"}
    assert first["$defs"]["a"] == {"const": {"$ref": "#/x"}}
    assert second == {"$ref": "#/items/anyOf/1/properties/parameters"}
    assert moved["maxItems"] == 1
