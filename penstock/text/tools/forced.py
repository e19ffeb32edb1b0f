"""Calls that a request forces: what form its output has then, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text.tools.base import Parameters, ToolParser, Tools
from penstock.text.tools.json_tools import JsonTools

NOTHING: Parameters = {"type": "object", "properties": {}, "additionalProperties": False}
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # keywords of schemas by name
DATA = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas
# beside these, `properties` does not say all that an object may have
COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "dependentSchemas"}
COMBINED |= {"unevaluatedProperties", "additionalProperties"}


class RequiredCalls(JsonTools):
    """All of the output is a list of calls, each with "name" and "parameters"."""


class NamedCall(ToolParser):
    """All of the output is the arguments of one call, an object; what does not begin one is content.

    Args:
        name: of its function.
    """

    def __init__(self, tools: Tools, name: str) -> None:
        super().__init__(tools)
        self._name = name

    def outside(self) -> bool:
        if not self.reader.skip_blank():
            return False
        if not self.reader.text.startswith("{"):
            return self.go(self.say_rest)
        self.call(self._name)
        return self.go(self._within)

    def _within(self) -> bool:
        self.argue(self.reader.take(len(self.reader.text)))
        return False


def calls_schema(tools: Sequence[tuple[str, Parameters]], *, several: bool) -> dict[str, Any]:
    """Of `RequiredCalls`.

    Args:
        tools: name and parameters of each.
        several: whether more than one call is allowed.
    """
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": []}, "minItems": 1}
    if not several:
        schema["maxItems"] = 1
    calls = [_call(tool, f"/items/anyOf/{i}") for i, tool in enumerate(tools)]
    schema["items"]["anyOf"] += calls
    return schema


def content_or_call(content: Parameters, tools: Sequence[tuple[str, Parameters]]) -> dict[str, Any]:
    """Of an output that has this schema, or is one call as in `RequiredCalls`."""
    calls = [_call(tool, f"/anyOf/{i}") for i, tool in enumerate(tools, start=1)]
    return {"anyOf": [_moved(content, "/anyOf/0"), *calls]}


def _call(tool: tuple[str, Parameters], place: str) -> dict[str, Any]:
    """Of a call.

    Args:
        place: JSON pointer to it.
    """
    parameters = _moved(closed(tool[1]), f"{place}/properties/parameters")
    properties = {"name": {"const": tool[0]}, "parameters": parameters}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def closed(parameters: Parameters) -> dict[str, Any]:
    """The same without properties that it does not name, which no tool expects, wherever it names some and does not
    say whether there may be others. Schemas that are put together with others stay open."""
    if _combines(parameters):
        return dict(parameters)
    found: dict[str, Any] = _closed(parameters)
    return found


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            found[key] = {name: _closed(each) for name, each in value.items()}
        else:
            found[key] = _closed(value) if key in ("items", "prefixItems", "anyOf", "oneOf") else value
    if isinstance(schema.get("properties"), Mapping) and not any(key in schema for key in COMBINED):
        found["additionalProperties"] = False
    return found


def _combines(schema: Any) -> bool:
    """Whether a schema within it holds together with another one for the same value."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    for name in ("allOf", "not", "if", "dependentSchemas"):
        held = schema.get(name)
        if isinstance(held, Mapping) or (isinstance(held, list) and len(held) > 1):
            return True
    if any(name in schema for name in ("$ref", "anyOf", "oneOf")) and "properties" in schema:
        return True
    return any(_combines(value) for key, value in schema.items() if key not in DATA)


def _moved(schema: Any, place: str) -> Any:
    """A schema's references as they are where it is part of another, at this JSON pointer."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = f"#{place}{value[1:]}"
        elif key in NAMED and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in DATA else _moved(value, place)
    return moved
