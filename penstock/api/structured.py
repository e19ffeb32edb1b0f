"""`response_format` of OpenAI's API as structured outputs, and errors that name what the client wrote."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.sampling import SamplingParams
from penstock.core.structured_outputs import FIELD, StructuredOutputs

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

FORMAT = "response_format"
TYPES = ("text", "json_object", "json_schema")
NAMES = {f"{FIELD}.json": f"{FORMAT}.json_schema.schema", f"{FIELD}.json_object": FORMAT, FIELD: FORMAT}


def wanted(
    response_format: Mapping[str, Any] | None, structured_outputs: dict[str, Any] | None
) -> StructuredOutputs | dict[str, Any] | None:
    """What form the output is to have. Raises InvalidRequest; UnsupportedField for a type that others have."""
    kind = None if response_format is None else _type(response_format)
    if response_format is None or kind == "text":
        return structured_outputs
    if structured_outputs is not None:
        raise InvalidRequest(f"{FIELD}: given, allowed only without {FORMAT} of type {kind}", FIELD)
    if kind == "json_object":
        if response_format.get("schema") is not None:  # which other servers take here
            raise UnsupportedField(
                f"{FORMAT}.schema is not supported with type json_object, use type json_schema", f"{FORMAT}.schema"
            )
        return StructuredOutputs(json_object=True)
    given = response_format.get("json_schema")
    if not isinstance(given, dict):
        raise _wrong(f"{FORMAT}.json_schema", given, "an object")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise _wrong(f"{FORMAT}.json_schema.schema", schema, "an object")
    try:
        return StructuredOutputs(json=schema)
    except InvalidRequest as error:
        raise renamed(error) from None


async def check_grammar(
    frontend: Frontend, params: SamplingParams, named: Callable[[InvalidRequest], InvalidRequest]
) -> None:
    """See `Frontend.check_grammar`; an error is raised as `named` calls its field."""
    try:
        await frontend.check_grammar(params)
    except InvalidRequest as error:
        raise named(error) from None


def renamed(error: InvalidRequest) -> InvalidRequest:
    """An error of structured outputs, of a request that has a `response_format` in their place."""
    field = error.field or ""
    old = next((name for name in NAMES if field == name or field.startswith(f"{name}.")), None)
    if old is None:
        return error
    new = NAMES[old] + field.removeprefix(old)
    return type(error)(str(error).replace(field, new, 1), new)


def _type(response_format: Mapping[str, Any]) -> str:
    kind = response_format.get("type")
    if kind not in TYPES:
        error = UnsupportedField if kind == "structural_tag" else InvalidRequest
        raise error(f"{FORMAT}.type: {_short(kind)}, allowed are {', '.join(TYPES)}", f"{FORMAT}.type")
    return kind


def _wrong(field: str, value: object, allowed: str) -> InvalidRequest:
    problem = "missing, it is required" if value is None else f"{_short(value)}, allowed is {allowed}"
    return InvalidRequest(f"{field}: {problem}", field)


def _short(value: object) -> str:
    return reprlib.repr(value)
