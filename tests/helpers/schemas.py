"""A hundred JSON Schemas of many kinds: records, lists, references, unions, trees, maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "maxLength": 8}
KINDS: dict[str, Schema] = {
    "text": TEXT,
    "least": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "mail": {"type": "string", "format": "email", "maxLength": 20},
    "id": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "note": {"type": "string", "format": "password", "maxLength": 5},
    "whole": {"type": "integer", "minimum": -5, "maximum": 1000},
    "above": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "step": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "yes": {"type": "boolean"},
    "nothing": {"type": "null"},
    "choice": {"enum": ["low", "high", 3, None, True]},
    "fixed": {"const": {"v": [1, 2]}},
    "either": {"type": ["integer", "null"], "maximum": 99, "minimum": 0},
    "list": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
    "pair": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}],
        "minItems": 2,
        "items": False,
    },
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"type": "boolean"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": 5}]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 4}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "named": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def record(names: list[str], optional: int = 0, extra: Schema | bool = False) -> Schema:
    """An object with such properties, of which the last `optional` may be missing."""
    return {
        "type": "object",
        "properties": {f"{name.replace(' ', '_')}_{i}": KINDS[name] for i, name in enumerate(names)},
        "required": [f"{name.replace(' ', '_')}_{i}" for i, name in enumerate(names[: len(names) - optional])],
        "additionalProperties": extra,
    }


def schemas() -> Iterator[tuple[str, Schema]]:
    """A hundred, by name."""
    names = [name for name in KINDS if name != "named"]
    for name in names:
        yield name, KINDS[name]  # 25
    for i, name in enumerate(names):  # 25: three of a kind, some of them optional
        yield (
            f"record of {name}",
            record([name, names[(i * 7 + 3) % len(names)], names[(i * 5 + 1) % len(names)]], i % 3),
        )
    for name in names:  # 25
        yield f"list of {name}", {"type": "array", "items": KINDS[name], "minItems": 1, "maxItems": 2}
    for i, name in enumerate(names[:15]):  # 15
        inner = record([name, "yes"])
        shared = {"$defs": {"shared": inner}, "type": "object", "additionalProperties": False}
        parts = {"first": {"$ref": "#/$defs/shared"}, "rest": {"type": "array", "items": {"$ref": "#/$defs/shared"}}}
        parts["rest"]["maxItems"] = i % 3
        yield f"reference to {name}", shared | {"properties": parts, "required": ["first", "rest"]}
    yield "tree", TREE
    yield (
        "event",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": value},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind, value in (("number", KINDS["whole"]), ("flag", KINDS["yes"]), ("word", TEXT))
            ]
        },
    )
    yield "map", KINDS["named"]
    yield "record with more", record(["yes"], extra=KINDS["above"])
    yield (
        "patterns",
        {
            "type": "object",
            "patternProperties": {"^n_[a-z]{1,3}$": KINDS["above"]},
            "additionalProperties": False,
        },
    )
    yield (
        "draft 7",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"p": KINDS["point"]},
            "type": "array",
            "items": {"$ref": "#/definitions/p"},
            "maxItems": 2,
        },
    )
    yield "titles", {"title": "T", "description": "d", "examples": [1], "default": 1, **KINDS["above"]}
    yield "matrix", {"type": "array", "items": KINDS["numbers"], "minItems": 2, "maxItems": 2}
    yield (
        "any",
        {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False},
    )
    yield (
        "deep",
        {"type": "array", "items": [], "minItems": 1, "maxItems": 1}
        | {"items": {"type": "array", "items": {"type": "array", "items": KINDS["yes"], "maxItems": 1}, "maxItems": 1}},
    )
