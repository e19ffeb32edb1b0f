"""JSON Schemas of what /v1/messages and /v1/responses have beside a chat's fields; see `body_schema`."""

from __future__ import annotations

from typing import Any

from penstock.api.messages import IMAGES
from penstock.api.schema import ROLES
from penstock.api.tools import CHOICES, MAX_NAME_CHARS, MAX_TOOLS
from penstock.core.sampling import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from penstock.service.media_parts import DETAILS

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
STRING: Schema = {"type": "string"}
URL: Schema = {"type": "string", "format": "uri", "description": "data:, or http(s): at a host that is allowed"}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")


def messages_fields(sees: bool) -> Schema:
    """Of Anthropic's API.

    Args:
        sees: whether the model takes images.
    """
    text = _object(type={"const": "text"}, text=STRING)
    encoded = _object(
        type={"const": "base64"}, media_type={"enum": [*IMAGES]}, data={**STRING, "contentEncoding": "base64"}
    )
    sources = {"anyOf": [encoded, _object(type={"const": "url"}, url=URL)]}
    seen = [_object(type={"const": "image"}, source=sources)] if sees else []
    told_back = {"anyOf": [STRING, _list({"anyOf": [text, *seen]})]}
    result = _object(_optional={"content": told_back}, type={"const": "tool_result"}, tool_use_id=STRING)
    thought = _object(type={"const": "thinking"}, thinking=STRING)
    call = _object(type={"const": "tool_use"}, id=STRING, name=STRING, input={"type": "object"})
    asked = _object(role={"const": "user"}, content={"anyOf": [STRING, _list({"anyOf": [text, result, *seen]})]})
    told = _object(role={"const": "assistant"}, content={"anyOf": [STRING, _list({"anyOf": [text, thought, call]})]})
    optional = {"type": {"enum": [None, "custom"]}, "description": {"type": ["string", "null"]}}
    tool = _object(_optional=optional, name=NAME, input_schema={"type": "object"})
    choices = [_object(_optional=_SERIAL, type={"enum": ["auto", "any", "none"]})]
    choices.append(_object(_optional=_SERIAL, type={"const": "tool"}, name=NAME))
    budget = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1}
    thinking = _object(
        _optional={"budget_tokens": budget}, type={"enum": ["enabled", "adaptive", "between_tools", "disabled"]}
    )
    form = _object(type={"const": "json_schema"}, schema={"type": "object"})
    effort = {"enum": [None, "low", "medium", "high", "xhigh", "max"]}
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
    return {
        "messages": _list({"anyOf": [asked, told]}, least=1),
        "system": {"anyOf": [STRING, _list(text), NULL]},
        "tools": {"anyOf": [_list(tool) | {"maxItems": MAX_TOOLS}, NULL]},
        "tool_choice": {"anyOf": [*choices, NULL]},
        "thinking": {"anyOf": [thinking, NULL]},
        "stop_sequences": {"anyOf": [_list(stop) | {"maxItems": MAX_STOP_STRINGS}, NULL]},
        "output_format": {"anyOf": [form, NULL]},
        "output_config": {"anyOf": [_object(_optional={"format": {"anyOf": [form, NULL]}, "effort": effort}), NULL]},
        "container": NULL,
        "mcp_servers": {"anyOf": [{"type": "array", "maxItems": 0}, NULL]},
    }


def response_fields(sees: bool) -> Schema:
    """Of OpenAI's API.

    Args:
        sees: whether the model takes images.
    """
    part = _object(type={"enum": ["input_text", "output_text", "text"]}, text=STRING)
    image = _object(_optional={"detail": {"enum": [*DETAILS]}}, type={"const": "input_image"}, image_url=URL)
    content = {"anyOf": [STRING, _list({"anyOf": [part, image]} if sees else part)]}
    message = _object(_optional={"type": {"const": "message"}}, role={"enum": [*ROLES]}, content=content)
    thought = _object(type={"const": "reasoning"}, content=_list(_object(text=STRING)))
    arguments = {"type": "string", "contentMediaType": "application/json"}
    call = _object(type={"const": "function_call"}, call_id=STRING, name=STRING, arguments=arguments)
    result = _object(type={"const": "function_call_output"}, call_id=STRING, output=content)
    items = {"anyOf": [message, thought, call, result]}
    optional = {
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    }
    tool = _object(_optional=optional, type={"const": "function"}, name=NAME)
    one = _object(type={"const": "function"}, name=NAME)
    some = _object(type={"const": "allowed_tools"}, mode={"enum": ["auto", "required"]}, tools=_list(one, least=1))
    formats = [_object(type={"enum": ["text", "json_object"]})]
    formats.append(_object(type={"const": "json_schema"}, schema={"type": "object"}))
    return {
        "input": {"anyOf": [STRING, _list(items, least=1)]},
        "tools": {"anyOf": [_list(tool) | {"maxItems": MAX_TOOLS}, NULL]},
        "tool_choice": {"anyOf": [{"enum": [None, *CHOICES]}, one, some]},
        "text": {"anyOf": [_object(_optional={"format": {"anyOf": [NULL, *formats]}}), NULL]},
        "reasoning": {"anyOf": [_object(_optional={"effort": {"enum": [*EFFORTS]}}), NULL]},
        "previous_response_id": {"type": ["string", "null"]},
        "background": {"enum": [None, False]},
        "truncation": {"enum": [None, "disabled"]},
    }


_SERIAL: Schema = {"disable_parallel_tool_use": {"type": ["boolean", "null"]}}


def _object(_optional: Schema | None = None, **needed: Schema) -> Schema:
    return {"type": "object", "properties": needed | (_optional or {}), "required": [*needed]}


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}
