"""OpenAI's `tools` and `tool_choice`: what may be called, what has to be, and the form of the output that follows."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.structured_outputs import FIELD, StructuredOutputs
from penstock.text.tools.base import NUMBER, Parameters, ToolParser
from penstock.text.tools.forced import NOTHING, NamedCall, RequiredCalls, calls_schema, closed, content_or_call

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
CHOICES = ("none", "auto", "required")
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60

Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Function:
    """That may be called.

    Attributes:
        place: in `tools`.
        parameters: the schema of its arguments, which are an object.
        strict: whether arguments have to follow it where calls are the model's own choice.
    """

    place: int
    name: str
    parameters: Parameters
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools.

    Attributes:
        declared: all of them as they came, for the chat template; with the choice "none" there are none.
        allowed: that may be called.
        choice: whether they are.
        named: the one that has to be called, where the choice is "required" and there is just that one.
        several: whether more than one call is wanted.
    """

    declared: list[Tool]
    allowed: list[Function]
    choice: Literal["auto", "required"]
    named: str | None = None
    several: bool = True

    def parser(self, free: type[ToolParser] | None) -> ToolParser | None:
        """What reads one output.

        Args:
            free: for calls in a model's own form, where the request does not force them.
        """
        tools = {function.name: function.parameters for function in reversed(self.allowed)}
        if self.named is not None:
            return NamedCall(tools, self.named)
        if self.choice == "required":
            return RequiredCalls(tools)
        return None if free is None else free(tools)

    @property
    def form(self) -> StructuredOutputs | None:
        """Of the output, if the request forces calls. Raises InvalidRequest naming the field."""
        if self.choice != "required":
            return None
        each = [(function.name, function.parameters) for function in self.allowed]
        schema = calls_schema(each, several=self.several) if self.named is None else closed(each[0][1])
        try:
            return StructuredOutputs(json=schema)
        except InvalidRequest as error:
            raise self.renamed(error) from None

    def free_form(
        self, parser: type[ToolParser], tokens: Mapping[str, int], content: dict[str, Any] | None
    ) -> StructuredOutputs | None:
        """Of an output whose calls are the model's own choice; None is any. Raises InvalidRequest.

        Args:
            parser: of the model's own form of calls. Arguments of strict tools are valid where that has frames.
            tokens: of its markers that are special tokens.
            content: schema of an output that is no call; None is any text.
        """
        tag: dict[str, Any] = {"structures": [], "triggers": [], "around": {}, "special": dict(tokens)}
        tag["patterns"] = {NUMBER: "[0-9]{1,4}"}
        for frame in parser.frames(tokens):
            tag["triggers"].append(frame.begin)
            tag["around"][frame.begin] = [frame.opening, frame.between, frame.closing]
            for function in self.allowed:
                schema = closed(function.parameters) if function.strict else {"type": "object"}
                begin = frame.begin + frame.named(function.name)
                tag["structures"].append({"begin": begin, "schema": schema, "end": frame.tail})
        if content is not None:
            each = [(function.name, function.parameters) for function in self.allowed]
            tag["content"] = content_or_call(content, each) if parser.bare else content
            if not tag["structures"]:
                tag["openings"] = parser.openings(function.name for function in self.allowed)
        elif not tag["structures"] or not any(function.strict for function in self.allowed):
            return None
        try:
            return StructuredOutputs(structural_tag=tag)
        except InvalidRequest as error:
            raise self.renamed(error) from None

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """An error of the form by the names of the fields that came."""
        old = error.field or ""
        for i, function in enumerate(self.allowed):
            part = f"{FIELD}.json" if self.named else f"{FIELD}.json.items.anyOf.{i}.properties.parameters"
            if old == part or old.startswith(f"{part}."):
                new = f"tools[{function.place}].function.parameters{old.removeprefix(part)}"
                return type(error)(str(error).replace(old, new, 1), new)
        if old != FIELD and not old.startswith(f"{FIELD}."):
            return error
        return type(error)(str(error).replace(old, "tools", 1), "tools")


def tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse | None:
    """None where nothing is to be called. Raises InvalidRequest, or UnsupportedField for a kind of tool."""
    declared = _declared(tools)
    allowed = [_function(tool, i) for i, tool in enumerate(declared)]
    several = parallel is not False
    if choice is None or choice in ("none", "auto"):
        if choice == "none" or not declared:
            return None
        return ToolUse(declared, allowed, "auto", None, several)
    if not declared:
        raise InvalidRequest(f"tool_choice: {SHORT.repr(choice)}, allowed only with tools", "tool_choice")
    if choice == "required":
        return ToolUse(declared, allowed, "required", None, several)
    if isinstance(choice, dict):
        if choice.get("type") == "function":
            wanted = _wanted(choice, "tool_choice", allowed)
            return ToolUse(declared, [wanted], "required", wanted.name, several)
        if choice.get("type") == "allowed_tools":
            return _among(declared, allowed, choice, several)
    raise InvalidRequest(
        f"tool_choice: {SHORT.repr(choice)}, allowed are {', '.join(CHOICES)}, or an object of type 'function' or "
        "'allowed_tools'",
        "tool_choice",
    )


def _among(declared: list[Tool], allowed: list[Function], choice: dict[str, Any], several: bool) -> ToolUse:
    """OpenAI's `allowed_tools`: the model sees all tools, and may call some."""
    field = "tool_choice.allowed_tools"
    said = choice.get("allowed_tools")
    if not isinstance(said, dict):
        raise wrong_value(field, said, "an object with mode and tools")
    mode, names = said.get("mode"), said.get("tools")
    if mode not in ("auto", "required"):
        raise wrong_value(f"{field}.mode", mode, "'auto' or 'required'")
    if not isinstance(names, list) or not names:
        raise wrong_value(f"{field}.tools", names, "a list of at least one tool")
    some = [_wanted(each, f"{field}.tools[{i}]", allowed) for i, each in enumerate(names)]
    return ToolUse(declared, some, mode, None, several)


def _wanted(said: Any, field: str, allowed: list[Function]) -> Function:
    """Of the declared tools the one that is named like {"type": "function", "function": {"name": ...}}."""
    function = said.get("function") if isinstance(said, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for one in allowed:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in allowed[:20])
    raise wrong_value(f"{field}.function.name", name, f"the name of one of tools: {names}")


def _declared(tools: Any) -> list[Tool]:
    if tools is None:
        return []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(tools)} tools, at most {MAX_TOOLS} are allowed", "tools")
    return list(tools)


def _function(tool: Tool, place: int) -> Function:
    field = f"tools[{place}]"
    kind = tool.get("type")
    if kind != "function":
        error = UnsupportedField if isinstance(kind, str) else InvalidRequest
        raise error(f"{field}.type: {SHORT.repr(kind)}, allowed is 'function'", f"{field}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong_value(f"{field}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise wrong_value(f"{field}.function.name", name, f"a string of 1 to {MAX_NAME_CHARS} characters")
    for key, types, allowed in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON Schema, an object"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, types):
            raise wrong_value(f"{field}.function.{key}", value, allowed)
    parameters = function.get("parameters") or NOTHING
    if not any(key in parameters for key in ("type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const")):
        parameters = {"type": "object", **parameters}
    return Function(place, name, parameters, function.get("strict") is True)


def wrong_value(field: str, value: object, allowed: str) -> InvalidRequest:
    """What is said of a field that is missing, or has a value that is not allowed."""
    problem = "missing, it is required" if value is None else f"{SHORT.repr(value)}, allowed is {allowed}"
    return InvalidRequest(f"{field}: {problem}", field)
