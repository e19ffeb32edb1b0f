"""Structured outputs as grammars: what can be compiled, at which cost, and where what is refused is wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.structured_outputs import MAX_BYTES, StructuredOutputs
from penstock.service.checkpoint import DEMO
from penstock.text.grammar import Grammars, check
from penstock.text.tokenizer import Tokenizer

DEEP = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}},
        **{f"p{i}": {"type": "string"} for i in range(300)},
    },
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


CALL = {"begin": "<call>f", "schema": {"type": "object"}, "end": "</call>"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"structural_tag": {"triggers": []}}, "structural_tag: {'triggers': []}, allowed is an object with structures"),
    ({"structural_tag": {"structures": [CALL], "triggers": [""]}}, "structural_tag.triggers: [''], allowed is a list"),
    ({"structural_tag": {"structures": [CALL], "triggers": ["<x>"]}}, "structural_tag.structures.0.begin: '<call>f'"),
    ({"structural_tag": {"structures": [CALL | {"end": 1}], "triggers": ["<"]}}, "structural_tag.structures.0.end: 1"),
    ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structural_tag.structures: [], allowed is a list of"),
    ({"structural_tag": {"structures": [CALL | {"schema": {"multipleOf": 1e-300}}], "triggers": ["<"]}}, "json.multi"),
    (
        {"structural_tag": {"structures": [CALL | {"schema": {"uniqueItems": True}}], "triggers": ["<"]}},
        "structural_tag: uniqueItems: not supported",
    ),
    ({"json": DEEP}, "json.properties.a.items.anyOf.1: uniqueItems: not supported"),
    ({"json": {"properties": {"x": {"type": "strin"}}}}, "json.properties.x: type: 'strin', allowed are string,"),
    ({"json": {"$defs": {"y": {"items": {"not": {}}}}, "$ref": "#/$defs/y"}}, "json.$defs.y.items: not: not supported"),
    ({"json": {"$ref": "#/$defs/nope"}}, "json: $ref: '#/$defs/nope', allowed is what there is in the schema"),
    ({"json": {"$ref": "https://example.com/x.json"}}, "json: $ref: 'https://example.com/x.json', allowed is what"),
    ({"json": {"type": "string", "pattern": "(["}}, "json: '([', which is no regular expression"),
    ({"json": {"type": "integer", "multipleOf": 1000003}}, "json.multipleOf: 1000003, supported is"),
    ({"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, "json.allOf.1.multipleOf: 9967, supported is"),
    ({"json": {"x": {"multipleOf": 10**6 + 3}, "$ref": "#/x"}}, "json.x.multipleOf: 1000003"),
    ({"json": {"multipleOf": 1e-300}}, "json.multipleOf: 1e-300"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}}, "json: oneOf: supported only of"),
    ({"json": {"enum": []}}, "json: "),
    ({"json": '{"a":'}, "json: not JSON"),
    ({"json": False, "regex": "a"}, "json: False, allowed"),
    ({"json": [1]}, "json: [1], allowed is a JSON Schema"),
    ({"json": "[" * 9000}, "json: nested too deeply"),
    ({"json": {"enum": ["x" * 70_000]}}, f"json: 70013 bytes, at most {MAX_BYTES} are allowed"),
    ({"json": {"const": "\ud800"}}, "json: not valid Unicode"),
    ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}}, "json: too large, at most"),
    ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "json: uniqueItems: not"),
    ({"json": nested(101)}, "json: nested too deeply, at most 100 objects and lists"),
    ({"json": {"items": {"oneOf": [{"minimum": 1}, {"type": "number"}]}}}, "json.items: oneOf: supported only of"),
    ({"json": {"properties": {"a": {"pattern": "((a"}}}}, "json.properties.a: '((a', which is no regular expression"),
    ({"json": {"minLength": -1}}, "json: minLength: -1, allowed is a whole number of at least 0"),
    ({"json": {"minimum": 2, "maximum": 1, "type": "integer"}}, "json: nothing satisfies it: minimum (2) is greater"),
    ({"json": {}, "whitespace_pattern": "(["}, "whitespace_pattern: '([', which is no regular expression"),
    ({"regex": "(["}, "regex: '([', which is no regular expression that is supported: unclosed character class"),
    ({"regex": "(" * 300}, f"regex: '{'(' * 57}...', which is no regular expression that is supported: unclosed"),
    ({"regex": r"(a)\1"}, "regex: "),
    ({"regex": 3}, "regex: 3, allowed is a string"),
    ({"choice": []}, "choice: [], allowed is a list of at least one string"),
    ({"choice": ["a", ""]}, "choice: '' is in it, allowed are strings of at least one character"),
    ({"choice": "ab"}, "choice: 'ab', allowed is a list of strings"),
    ({"grammar": "start: b"}, 'grammar: at line 1, column 8: no rule is called "b"'),
    ({"grammar": 'root ::= "a" | b'}, "grammar: neither Lark's syntax nor GBNF (Rule 'b' not found)"),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "grammar: "),
    ({"grammar": 'start: %json {"type":"integer","multipleOf":1000003}'}, "grammar: multipleOf"),
    ({}, ": none of them, exactly one of json, json_object, regex, choice, grammar, structural_tag"),
    ({"json": {}, "regex": "a"}, ": json and regex, exactly one of"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern: given, allowed only with json"),
    ({"json_object": True, "whitespace_pattern": "(["}, "whitespace_pattern: '(['"),
    (
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        "whitespace_pattern: given, allowed only",
    ),
    ({"json": {}, "space": 1}, "'space': no such field"),
    ({"json": {}, "structural_tag": {}}, ": json and structural_tag, exactly one of"),
    ({"json": {}, "disable_any_whitespace": 2}, "disable_any_whitespace: 2, allowed is true or false"),
]


@pytest.mark.parametrize(("asked", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_refused_at_its_place(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(StructuredOutputs.of(asked))
    assert str(caught.value).startswith(f"structured_outputs{'' if says.startswith(':') else '.'}{says}")
    assert str(caught.value).startswith(str(caught.value.field)) or isinstance(caught.value, UnsupportedField)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


COSTLY: list[dict[str, Any]] = [
    {"json": {"enum": [f"value-{i}" for i in range(4000)]}},
    {"json": {"properties": {f"p{i}": {"type": "integer"} for i in range(900)}}},
    {"json": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000}},
    {"json": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}},
    {"json": {"type": "string", "pattern": "^" + "(a|b|ab)*" * 200 + "$"}},
    {"json": {"type": "string", "pattern": ".*" + "a.{200}" * 3}},
    {"json": {"type": "integer", "multipleOf": 19997}},
    {
        "json": {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}},
            "$ref": "#/$defs/d0",
        }
    },
    {"regex": "((a{0,100}){0,100}){0,100}"},
    {"regex": "|".join(str(i * 7919) for i in range(7000))},
    {"grammar": 'start: (("a"{1000}){1000}){1000}'},
    {"grammar": "start: " + " ".join('"a"?' for _ in range(3000))},
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(DEMO, 4096)


@pytest.mark.parametrize("asked", COSTLY, ids=lambda value: str(value)[:40])
def test_what_is_meant_to_be_costly_costs_little(grammars: Grammars, asked: dict[str, Any]) -> None:
    wanted = StructuredOutputs.of(asked)
    began = time.process_time()
    check(wanted)
    matcher = grammars.matcher(wanted)
    for _ in range(20):
        mask = matcher.compute_bitmask()
        word = next(i for i, byte in enumerate(mask) if byte)
        token = 8 * word + (mask[word] & -mask[word]).bit_length() - 1
        if matcher.is_stopped() or not matcher.consume_token(token):
            break
    assert time.process_time() - began < 3, "a limit does not hold: each of them takes less than a tenth of that"


TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"regex": r"\d{3}-\d{4}"}, ["555-1234"], ["555-123", "a"]),
    ({"choice": ['say "x"', "née\n", "😀"]}, ['say "x"', "née\n", "😀"], ["née", "x"]),
    ({"grammar": 'root ::= "x" [0-9]+ "y"'}, ["x12y"], ["xy", "x1"]),
    ({"grammar": 'start: "x" n "y"\nn: /[0-9]+/'}, ["x12y"], ["xy", "x1"]),
    ({"json_object": True}, ['{"a": [1, {"b": null}]}', "{}"], ["[1]", "3"]),
    ({"json": True}, ["[1]", "3", '"x"'], ["x"]),
    ({"json": {"type": "string", "format": "no-such-format"}}, ['"x"'], ["3"]),
    ({"json": {"type": "string", "format": "date"}}, ['"2026-01-31"'], ['"tomorrow"']),
    ({"json": {"properties": {"format": {"const": 1}}, "required": ["format"]}}, ['{"format": 1}'], ['{"format": 2}']),
    ({"json": {"const": {"format": "x"}}}, ['{"format": "x"}'], ['{"format": "y"}']),
    (
        {"json": {"type": "array", "items": {"type": "integer"}}},
        ["[1, 2]", "[\n    1,\n    2\n]", "[1,2]"],
        ["[1,  2]"],
    ),
    ({"json": {"enum": [[1, 2]]}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]"]),
    ({"json": {"enum": [[1, 2]]}, "whitespace_pattern": " {0,2}"}, ["[1,  2]"], ["[1,\n2]"]),
]


@pytest.mark.parametrize(("asked", "fine", "wrong"), TEXTS, ids=lambda value: str(value)[:40])
def test_texts_that_match_and_others(
    grammars: Grammars, asked: dict[str, Any], fine: list[str], wrong: list[str]
) -> None:
    tokenizer = Tokenizer(DEMO)
    wanted = StructuredOutputs.of(asked)
    check(wanted)

    def matches(text: str) -> bool:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        matcher = grammars.matcher(wanted)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [text for text in fine if not matches(text)] == []
    assert [text for text in wrong if matches(text)] == []


def test_a_schema_is_known_by_what_it_says() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, two = StructuredOutputs(json=schema), StructuredOutputs(json=json.dumps(schema, indent=4))
    assert one == two
    assert hash(one) == hash(two)
    assert one != StructuredOutputs(json={"type": "object", "properties": {"a": {}, "b": {}}}), "the order counts"


def test_matchers_are_apart(grammars: Grammars) -> None:
    wanted = StructuredOutputs(choice=("ab", "b"))
    tokenizer = Tokenizer(DEMO)
    first, second = grammars.matcher(wanted), grammars.matcher(wanted)
    assert first.try_consume_tokens(tokenizer.encode("b")) == 1
    assert first.is_accepting()
    assert not second.is_accepting()
    assert not grammars.matcher(wanted).is_accepting()
    with pytest.raises(InvalidRequest, match="nothing may come next"):
        grammars.matcher(StructuredOutputs(json={"$ref": "#"}))


@pytest.mark.parametrize("vocab_size", [4096, 4100, 5000])
def test_rows_of_the_model_that_no_token_stands_for_are_never_allowed(vocab_size: int) -> None:
    """Models have more rows than their tokenizers have tokens, for even shapes."""
    grammars = Grammars(DEMO, vocab_size)
    matcher = grammars.matcher(StructuredOutputs.of({"regex": "[a-z]*"}))
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert 32 * grammars.words > vocab_size
    assert mask >> 4096 == 1 << grammars.end - 4096, "only the end is beyond the tokenizer's"
    assert grammars.end >= vocab_size


@pytest.mark.parametrize("key", ["minimum", "const", "maxItems"])
def test_a_whole_number_that_no_float_is_is_the_users_mistake(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(StructuredOutputs.of({"json": {"type": "number", key: 10**400}}))
    assert refused.value.field is not None
    assert refused.value.field.startswith("structured_outputs.json")


FREE = {"structures": [CALL, CALL | {"begin": "<call>g"}], "triggers": ["<call>"]}
FORMED = FREE | {"content": {"type": "integer"}}
OPEN = {"structures": [], "triggers": [], "content": {"type": "integer"}, "openings": ["<call>", "<|im_start|>"]}


@pytest.mark.parametrize(
    ("tag", "text", "follows", "ends"),
    [
        (FREE, "any text < call", True, True),
        (FREE, 'So <call>f{"a": 1}</call> and <call>g{}</call>', True, True),
        (FREE, "<call>f{}</call", True, False),
        (FREE, "<call>h", False, False),
        (FREE, "<call>f[", False, False),
        (FORMED, "12", True, True),
        (FORMED, "any", False, False),
        (FORMED, '\n<call>f{"a": 1}</call>\n<call>g{}</call>', True, True),
        (FORMED, "<call>f{}</call>12", False, True),
        (OPEN, "12", True, True),
        (OPEN, "<call> anything", True, True),
        (OPEN, "<|im_start|>", False, False),
        (OPEN | {"special": {"<|im_start|>": 1}}, "<|im_start|> anything <|im_start|>", True, True),
    ],
)
def test_structures_in_text(tag: Any, text: str, follows: bool, ends: bool) -> None:
    wanted = StructuredOutputs(structural_tag=tag)
    check(wanted)
    matcher = Grammars(DEMO, 4096).matcher(wanted)
    tokens = Tokenizer(DEMO).encode(text, False)
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) == follows
    assert matcher.is_accepting() == ends
