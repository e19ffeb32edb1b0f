"""JSON Schemas of the bodies: pydantic's, with what else the server checks, so that what they allow is served.

What no schema can say stays with the server: that prompt and output fit the model's context together, that
`min_tokens` is at most `max_tokens`, that some token is left to draw, that the tokens of `logit_bias` are in the
vocabulary, what the chat template makes of the messages, which tools there are to choose from, and which schemas,
expressions and grammars can be compiled.
Offline work without targets (`service_tier`, `slo`), and structured outputs beside a `response_format`, are left out,
too, as conditions more than generators can take.
"""

from __future__ import annotations

from typing import Any

from penstock.api.block_schema import URL, messages_fields, response_fields
from penstock.api.chat import ChatBody
from penstock.api.chat_batch import HARMLESS, ChatBatchBody
from penstock.api.completions import CompletionBody
from penstock.api.embeddings import MAX_INPUTS, EmbeddingBody, RerankBody, ScoreBody
from penstock.api.messages import CountBody, MessagesBody
from penstock.api.responses import ResponsesBody
from penstock.api.schema import (
    FOREIGN,
    MAX_BIAS_DIGITS,
    MAX_PROMPTS,
    NOT_YET,
    REMOVED_PREFIXES,
    ROLES,
    STREAM_OPTIONS,
    TIERS,
    Body,
    GenerationBody,
    ServedBody,
)
from penstock.api.tokenize import DetokenizeBody
from penstock.api.tools import CHOICES, MAX_NAME_CHARS, MAX_TOOLS
from penstock.core.sampling import (
    ALL_LOGPROBS,
    BEAMS_ONLY,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROB_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MOST_TOKENS,
    NOT_WITH_BEAMS,
    SEED_BITS,
)
from penstock.core.structured_outputs import MAX_BYTES
from penstock.core.thinking import MAX_BUDGET, MAX_TOKENS
from penstock.service.intake import MAX_SALT_BYTES
from penstock.service.media_parts import DETAILS

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
TRUE: Schema = {"const": True}
NOT_TRUE: Schema = {"enum": [None, False]}
TEXT: Schema = {"type": "string", "minLength": 1}
NAMED: Schema = {"minimum": ALL_LOGPROBS, "maximum": MAX_LOGPROBS}
RANGES: dict[str, Schema] = {  # besides the types
    "temperature": {"minimum": 0},
    "top_k": {"minimum": -1},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "n": {"minimum": 1, "maximum": MAX_N},
    "max_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0, "maximum": MOST_TOKENS},
    "seed": {"minimum": -(2**SEED_BITS), "maximum": 2**SEED_BITS - 1},
    "prompt_logprobs": NAMED,
    "length_penalty": {"minimum": -MAX_LENGTH_PENALTY, "maximum": MAX_LENGTH_PENALTY},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_BYTES},
    "service_tier": {"enum": [*TIERS]},
    "truncation_side": {"enum": [None, "left", "right"]},
    "early_stopping": {"enum": [None, True, False, "never"]},
}


def body_schema(
    model: type[Body], vocab_size: int, max_model_len: int, embedding_size: int, *, template: str, sees: bool = False
) -> Schema:
    """The schema of a body.

    Args:
        vocab_size, max_model_len, embedding_size: of the model; 0 when not known yet.
        template: where the schemas that it refers to will stand.
        sees: whether the model takes images.
    """
    schema = model.model_json_schema(ref_template=template)
    fields = schema["properties"]
    token = {"type": "integer", "minimum": 0} | ({"maximum": vocab_size - 1} if vocab_size else {})
    tokens: Schema = {"type": "array", "items": token}
    if issubclass(model, MessagesBody | ResponsesBody):
        return _of_turn(model, schema, max_model_len, sees)
    if "messages" in fields:
        messages = _messages(sees)
        fields["messages"] = {"anyOf": [messages, NULL]} if {"prompt", "input"} & {*fields} else messages
    if "tools" in fields:
        fields["tools"] = _tools()
    if "tool_choice" in fields:
        fields["tool_choice"] = _choice()
    if issubclass(model, DetokenizeBody):
        fields["tokens"] = tokens
    if issubclass(model, CompletionBody):
        fields["prompt"] = _prompts(tokens, MAX_PROMPTS)
        fields["thinking"] = {"anyOf": [_thinking(token), NULL]}
        fields |= {name: {"anyOf": [_urls(sees), NULL]} for name in ("urls", "images")}
    if issubclass(model, ServedBody):
        _served(fields, max_model_len)
    if issubclass(model, EmbeddingBody):
        fields["input"] = {"anyOf": [_prompts(tokens, MAX_INPUTS), NULL]}
        fields["padding"] = {"enum": [None, "do_not_pad", "max_length"]}
        fields["encoding_format"] = {"enum": [None, "float", "base64"]}
        size = {"type": "integer", "minimum": 1} | ({"maximum": embedding_size} if embedding_size else {})
        fields["dimensions"] = {"anyOf": [size, NULL]}
    if issubclass(model, RerankBody):
        fields["query"]["minLength"] = 1
        fields["documents"] |= {"items": TEXT, "minItems": 1, "maxItems": MAX_PROMPTS}
        fields["top_n"] = {"anyOf": [{"type": "integer", "minimum": 0}, NULL]}
    if issubclass(model, ScoreBody):
        fields["text_1"] = TEXT
        fields["text_2"] = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_PROMPTS}]}
    if issubclass(model, GenerationBody):
        _generation(model, fields, tokens, max_model_len)
        schema["allOf"] = _conditions(model)
    elif "messages" in fields:
        given = "input" if "input" in fields else "prompt"
        schema["allOf"] = [_exactly_one(given, "messages"), _one_turn()]
    if issubclass(model, ChatBatchBody):
        fields["messages"] = {"type": "array", "items": _messages(sees), "minItems": 1, "maxItems": MAX_PROMPTS}
        fields |= {name: {"enum": [None, *values]} for name, values in HARMLESS.items()}
    return _without_unserved(model, schema)


def _of_turn(model: type[Body], schema: Schema, max_model_len: int, sees: bool) -> Schema:
    """Of a body that stands for a chat's."""
    fields, limit = schema["properties"], "max_tokens"
    if issubclass(model, MessagesBody):
        fields |= messages_fields(sees)
    else:
        limit = "max_output_tokens"
        fields |= response_fields(sees)
        fields["structured_outputs"] = {"anyOf": [NULL, *_structures()]}
        fields["logit_bias"] = {"anyOf": [_bias(), NULL]}
        stop = _stop()
        fields["stop"] = {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOP_STRINGS}, NULL]}
        fields["top_logprobs"] = {"type": ["integer", "null"], "minimum": ALL_LOGPROBS, "maximum": MAX_LOGPROBS}
        fields["slo"] = NULL
    for name in fields.keys() & RANGES.keys() - {"max_tokens"}:
        fields[name] |= RANGES[name]
    if max_model_len and not issubclass(model, CountBody):
        fields[limit]["maximum"] = max_model_len - 1
    return _without_unserved(model, schema)


def _without_unserved(model: type[Body], schema: Schema) -> Schema:
    fields = schema["properties"]
    for name, harmless in NOT_YET.items():
        if name not in model.model_fields:
            fields[name] = {"enum": [None, *harmless]}
    fields |= dict.fromkeys(FOREIGN, NULL)
    schema["patternProperties"] = {f"^{prefix}": NULL for prefix in REMOVED_PREFIXES}
    return schema


def _stop() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}


def _bias() -> Schema:
    names = {"pattern": f"^[0-9]{{1,{MAX_BIAS_DIGITS}}}$"}
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    return {"type": "object", "propertyNames": names, "additionalProperties": bias}


def _prompts(tokens: Schema, most: int) -> Schema:
    one = [TEXT, tokens | {"minItems": 1}]
    return {"anyOf": [*one, *({"type": "array", "items": each, "minItems": 1, "maxItems": most} for each in one)]}


def _served(fields: Schema, max_model_len: int) -> None:
    for name, extra in RANGES.items():
        if name in fields:
            fields[name] |= extra
    some = {"type": "integer", "minimum": 1} | ({"maximum": max_model_len} if max_model_len else {})
    fields["truncate_prompt_tokens"] = {"anyOf": [some, {"const": -1}, NULL]}


def _generation(model: type[Body], fields: Schema, tokens: Schema, max_model_len: int) -> None:
    if max_model_len:
        fields["max_tokens"]["maximum"] = max_model_len - 1
    if issubclass(model, CompletionBody):
        fields["max_tokens"]["minimum"] = 0
    stop = _stop()
    word = {"type": "string", "pattern": r"\S", "maxLength": MAX_BAD_WORD_CHARS}
    fields["stop"] = {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOP_STRINGS}, NULL]}
    fields["bad_words"] = {"anyOf": [{"type": "array", "items": word, "maxItems": MAX_BAD_WORDS}, NULL]}
    fields["stop_token_ids"] = {"anyOf": [tokens, NULL]}
    fields["allowed_token_ids"] = {"anyOf": [tokens | {"minItems": 1}, NULL]}
    fields["response_format"] = {"anyOf": [NULL, *_formats()]}
    fields["structured_outputs"] = {"anyOf": [NULL, *_structures()]}
    fields["logit_bias"] = {"anyOf": [_bias(), NULL]}
    fields["logprob_token_ids"] = {"anyOf": [tokens | {"minItems": 1, "maxItems": MAX_LOGPROB_TOKENS}, NULL]}
    if issubclass(model, ChatBody):
        given = {"prompt_token_ids": {"anyOf": [tokens | {"minItems": 1}, NULL]}}
        transfer = {"type": "object", "properties": given, "additionalProperties": NULL}
        fields["kv_transfer_params"] = {"anyOf": [transfer, NULL]}
    options = {name: {"type": ["boolean", "null"]} for name in STREAM_OPTIONS}
    fields["stream_options"] = {"anyOf": [{"type": "object", "properties": options}, NULL]}


def _formats() -> list[Schema]:
    said = {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]}
    schema = {"type": {"const": "json_schema"}, "json_schema": said}
    return [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {"type": "object", "properties": {"type": {"const": "json_object"}, "schema": NULL}, "required": ["type"]},
        {"type": "object", "properties": schema, "required": [*schema]},
    ]


def _structures() -> list[Schema]:
    text: Schema = {"type": "string", "maxLength": MAX_BYTES}
    space: Schema = {"disable_any_whitespace": {"type": ["boolean", "null"]}}
    choices = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
    kinds: dict[str, Schema] = {
        "json": {"json": {"anyOf": [{"type": "object"}, text]}} | space,
        "json_object": {"json_object": TRUE} | space,
        "regex": {"regex": text},
        "choice": {"choice": choices},
        "grammar": {"grammar": text},
        "structural_tag": {"structural_tag": {"anyOf": [_tag(), text]}},
    }
    return [
        {"type": "object", "properties": fields, "required": [kind], "additionalProperties": False}
        for kind, fields in kinds.items()
    ]


def _thinking(token: Schema) -> Schema:
    marker = {"type": "array", "items": token, "maxItems": MAX_TOKENS}
    budget = {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_BUDGET}
    fields = {"start": {"anyOf": [marker, NULL]}, "end": marker | {"minItems": 1}, "budget": budget}
    return {"type": "object", "properties": fields, "required": ["end"], "additionalProperties": False}


def _tag() -> Schema:
    parts = {"begin": {"type": "string"}, "schema": {"type": "object"}, "end": {"type": "string"}}
    structure = {"type": "object", "properties": parts, "required": [*parts]}
    fields = {
        "structures": {"type": "array", "items": structure, "minItems": 1},
        "triggers": {"type": "array", "items": TEXT, "minItems": 1},
    }
    return {"type": "object", "properties": fields, "required": [*fields]}


def _tools() -> Schema:
    function = {
        "name": TEXT | {"maxLength": MAX_NAME_CHARS},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    }
    fields = {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": function, "required": ["name"]},
    }
    tool = {"type": "object", "properties": fields, "required": [*fields]}
    return {"anyOf": [{"type": "array", "items": tool, "maxItems": MAX_TOOLS}, NULL]}


def _choice() -> Schema:
    """Of a tool. That there are tools, and the one that is named among them, stays with the server."""
    named = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
    one = {"type": {"const": "function"}, "function": named}
    function = {"type": "object", "properties": one, "required": [*one]}
    each = {"type": "object", "properties": {"function": named}, "required": ["function"]}
    among = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": each, "minItems": 1}}
    some = {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {"type": "object", "properties": among, "required": [*among]},
    }
    return {
        "anyOf": [{"enum": [None, *CHOICES]}, function, {"type": "object", "properties": some, "required": [*some]}]
    }


def _urls(sees: bool) -> Schema:
    urls: Schema = {"type": "array", "items": URL}
    return urls if sees else urls | {"maxItems": 0}


def _messages(sees: bool) -> Schema:
    part: Schema = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    if sees:
        part = {"anyOf": [part, *map(_media, ("image_url", "video_url"))]}
    content = [{"type": "string"}, {"type": "array", "items": part}]
    asked = {
        "type": "object",
        "properties": {"role": TEXT | {"examples": [*ROLES]}, "content": {"anyOf": content}},
        "required": ["role", "content"],
    }
    spelled = {"type": "string", "contentMediaType": "application/json"}
    arguments = {"anyOf": [{"type": "object"}, spelled, NULL]}
    call = {
        "type": "object",
        "properties": {"function": {"type": "object", "properties": {"arguments": arguments}}},
        "required": ["function"],
    }
    answered = {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": {"anyOf": [*content, NULL]},
            "tool_calls": {"anyOf": [{"type": "array", "items": call}, NULL]},
        },
        "required": ["role"],
    }
    return {"type": "array", "items": {"anyOf": [asked, answered]}, "minItems": 1}


def _media(kind: str) -> Schema:
    """A part of a message with an image or a video."""
    detail = {"enum": [*DETAILS]}
    url = {"type": "object", "properties": {"url": URL, "detail": detail}, "required": ["url"]}
    return {"type": "object", "properties": {"type": {"const": kind}, kind: url}, "required": ["type", kind]}


def _conditions(model: type[Body]) -> list[Schema]:
    """What fields say of one another; four at most, since generators of requests multiply them out."""
    empty = {"anyOf": [NULL, {"type": "object", "maxProperties": 0}]}
    with_beams = {name: {"enum": [None, *_json(unused)]} for name, unused in NOT_WITH_BEAMS.items()}
    without = {name: {"enum": [None, *_json(unused)]} for name, unused in BEAMS_ONLY.items()}
    if issubclass(model, ChatBody):
        with_beams["top_logprobs"] = {"anyOf": [NULL, {"type": "integer", "minimum": 0}]}
    found = [
        _either({"stream": NOT_TRUE, "stream_options": empty}, {"stream": TRUE}, prompt_logprobs=NULL),
        _either({"use_beam_search": NOT_TRUE} | without, {"use_beam_search": TRUE}, stream=NOT_TRUE, **with_beams),
    ]
    if issubclass(model, ChatBody):
        found += [_one_turn(), _either({"top_logprobs": NULL, "logprob_token_ids": NULL}, {"logprobs": TRUE})]
    if issubclass(model, CompletionBody):
        some = {"anyOf": [NULL, {"type": "integer", "minimum": 1}]}
        nothing = {"min_tokens": {"enum": [None, 0]}, "logprob_token_ids": NULL}
        found.append(_either({"max_tokens": some}, {"echo": TRUE}, **nothing))
        rest = {"prompt_logprobs": NULL, "use_beam_search": NOT_TRUE}
        found.append({"anyOf": [{"properties": each} for each in ({"echo": NOT_TRUE}, {"logprobs": NULL}, rest)]})
    return found


def _json(value: object) -> list[Any]:
    """As it stands in JSON, if it can."""
    return [] if value is None else [list(value) if isinstance(value, tuple) else value]


def _one_turn() -> Schema:
    return _either({"continue_final_message": NOT_TRUE}, {}, add_generation_prompt=NOT_TRUE)


def _exactly_one(*names: str) -> Schema:
    def only(name: str) -> Schema:
        rest = {other: NULL for other in names if other != name}
        return {"required": [name], "properties": {name: {"type": ["string", "array"]}} | rest}

    return {"anyOf": [only(name) for name in names]}


def _either(absent: Schema, needed: Schema, **then: Schema) -> Schema:
    """`absent` holds of what is there, or else `needed` is there, and `then` holds of what is."""
    other: Schema = {"properties": needed | then} | ({"required": [*needed]} if needed else {})
    return {"anyOf": [{"properties": absent}, other]}
