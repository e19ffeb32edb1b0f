"""Arguments that models write as plain text, or as values of Python, as JSON of the type that a schema wants."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from penstock.text.tools.base import Parameters


def of_schema(parameters: Parameters, name: str, text: str) -> str:
    """An argument's JSON, of its plain text. What cannot be read as its type is a string."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return spelled(text)
    types = _types(schema)
    if text.strip() == "null" and "null" in types:
        return "null"
    return spelled(text) if "string" in types else of_literal(text)


def of_literal(text: str) -> str:
    """JSON, or a value as Python writes it, as JSON; what is neither is a string."""
    text = text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            return spelled(read(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return spelled(text)


def spelled(value: Any) -> str:
    """As JSON. Raises ValueError or TypeError for what is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair stands alone in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _types(schema: Mapping[str, Any]) -> set[str]:
    """That it names; none where it says nothing."""
    said = schema.get("type")
    types = {said} if isinstance(said, str) else {each for each in said or () if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            types |= _types(each) if isinstance(each, Mapping) else set()
    values = schema.get("enum")
    if not types and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        types = {"string"}
    return types
