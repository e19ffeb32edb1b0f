"""POST /v1/messages, /v1/messages/count_tokens: Anthropic's API, over chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.chat import ChatBody, Turn, answer, prompt_of
from penstock.api.errors import error_row
from penstock.api.http import Route, UntilDisconnect, json_response, read_body
from penstock.api.media import joined
from penstock.api.message import Fields
from penstock.api.schema import SHORT, Body, Int32, Messages, Strings, sampling_params, service_level, whole_number
from penstock.api.sse import encode
from penstock.api.tools import wrong_value
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.plan import BLOCK_TOKENS
from penstock.service.generation import Usage
from penstock.service.media_parts import MediaBlock
from penstock.text.detokenizer import Delta

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

Block = dict[str, Any]
Count = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(whole_number)]

KINDS = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}  # ours -> Anthropic's
CODES = {  # ours -> its kinds, where that says more
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "request_too_large": "request_too_large",
}
RENAMED = {"stop": "stop_sequences", "response_format": "output_config.format"}  # fields of a chat -> of a message
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
EFFORTS: tuple[str | None, ...] = (None, "low", "medium", "high", "xhigh", "max")
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
ELSEWHERE = ("container", "mcp_servers")  # what Anthropic's servers run


class MessagesBody(Body):
    """POST /v1/messages"""

    max_tokens: Count
    messages: Messages
    system: Annotated[str | list[dict[str, Any]] | None, SkipValidation] = None  # `_text` says more
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # what is in the former now
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def chat(self, *, thinks: bool) -> ChatBody:
        """The chat that it is. Raises InvalidRequest or UnsupportedField, by the names of the fields that came.

        Args:
            thinks: whether the model does; else it makes no difference what is said of that.
        """
        for name in ELSEWHERE:
            if (self.model_extra or {}).get(name) not in (None, []):
                raise UnsupportedField(f"{name} is not supported: nothing but functions of the client is called", name)
        messages, places = _messages(self.system, self.messages)
        last = self.messages[-1].get("role")
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "continue_final_message": True if last == "assistant" else None,
            "response_format": _form((self.output_config or {}).get("format") or self.output_format),
            **_tools(self.tools, self.tool_choice),
            **_thinking(self.thinking, (self.output_config or {}).get("effort"), thinks),
        }
        return ChatBody.made(fields, self, partial(renamed, places))


class CountBody(MessagesBody):
    """POST /v1/messages/count_tokens"""

    max_tokens: Count = 1


def routes(models: Models) -> list[Route]:
    async def messages(request: Request) -> UntilDisconnect:
        asked = await read_body(request, MessagesBody)
        frontend = models.of(asked.model)
        body = asked.chat(thinks=frontend.dialect.reasoning is not None)
        level = service_level(body, request.headers)
        return UntilDisconnect(partial(answer, frontend, body, level, request.state.request_id, MessageShape))

    async def count_message_tokens(request: Request) -> Response:
        """How long the prompt of such a message is."""
        body = (await read_body(request, CountBody)).chat(thinks=False)
        frontend = models.of(body.model)
        frontend.check_known()
        sampling_params(body, frontend.default_sampling, frontend.vocab_size)  # which nothing is drawn with
        prompt = await prompt_of(frontend, body, None)
        return json_response({"input_tokens": len(prompt)})

    return [
        Route("POST", "/v1/messages", messages, MessagesBody, errors=error_body),
        Route("POST", "/v1/messages/count_tokens", count_message_tokens, CountBody, errors=error_body),
    ]


def error_body(message: str, kind: str, param: str | None, code: str) -> dict[str, object]:
    """In Anthropic's shape."""
    return {"type": "error", "error": {"type": CODES.get(code) or KINDS.get(kind, kind), "message": message}}


def renamed(places: list[int], error: InvalidRequest) -> InvalidRequest:
    """A chat's error by the names of a message's fields.

    Args:
        places: of each message of the chat, which message it is from; -1 is `system`.
    """
    old = error.field or ""
    new = RENAMED.get(old, old).replace(".function.parameters", ".input_schema").replace(".function", "")
    if old.startswith("messages["):
        number, _, rest = old.removeprefix("messages[").partition("]")
        place = places[int(number)]
        new = f"messages[{place}]{rest}" if place >= 0 else "system"
    return type(error)(str(error).replace(old, new, 1), new) if new != old else error


# --- a message's fields as a chat's


def _messages(system: str | list[Block] | None, given: list[Block]) -> tuple[list[Fields], list[int]]:
    """The chat's messages, and of each where it is from."""
    made: list[tuple[int, Fields]] = []
    if system:
        made.append((-1, {"role": "system", "content": _text(system, "system")}))
    for i, message in enumerate(given):
        role, content = message.get("role"), message.get("content")
        where = f"messages[{i}]"
        if role not in ("user", "assistant"):
            raise wrong_value(f"{where}.role", role, "'user' or 'assistant'")
        if isinstance(content, str):
            made.append((i, {"role": role, "content": content}))
        elif not isinstance(content, list):
            raise wrong_value(f"{where}.content", content, "a string, or a list of blocks")
        elif role == "user":
            made += [(i, each) for each in _of_user(content, f"{where}.content")]
        else:
            made.append((i, _of_assistant(content, f"{where}.content")))
    return [message for _, message in made], [place for place, _ in made]


def _of_user(blocks: list[Block], where: str) -> Iterator[Fields]:
    parts: list[Block] = []
    for j, block in enumerate(blocks):
        kind, at = _kind(block, f"{where}[{j}]"), f"{where}[{j}]"
        if kind == "text":
            parts.append({"type": "text", "text": _string(block, "text", at)})
        elif kind == "image":
            parts.append(_image(block, at, f"content[{j}]"))
        elif kind == "tool_result":
            if parts:
                yield {"role": "user", "content": joined(parts)}
                parts = []
            told = _told(block.get("content") or "", f"{at}.content", f"content[{j}].content")
            yield {"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": told}
        else:
            raise _unknown(at, kind, "'text', 'image' and 'tool_result'")
    if parts or not blocks:
        yield {"role": "user", "content": joined(parts)}


def _image(block: Block, where: str, place: str) -> MediaBlock:
    return MediaBlock(_source(block.get("source"), f"{where}.source"), f"{place}.source")


def _told(content: str | list[Block], where: str, place: str) -> str | list[Block]:
    """What a tool has answered, which may have images in it.

    Args:
        place: where it is in its message.
    """
    if not isinstance(content, list) or all(_kind(block, where) != "image" for block in content):
        return _text(content, where)
    parts: list[Block] = []
    for j, block in enumerate(content):
        if (kind := _kind(block, f"{where}[{j}]")) == "image":
            parts.append(_image(block, f"{where}[{j}]", f"{place}[{j}]"))
        elif kind == "text":
            parts.append({"type": "text", "text": _string(block, "text", f"{where}[{j}]")})
        else:
            raise _unknown(f"{where}[{j}]", kind, "'text' and 'image'")
    return parts


def _source(given: Any, where: str) -> str:
    """An image's, as a URL."""
    kind = _kind(given, where)
    if kind == "base64":
        if (of := _string(given, "media_type", where)) not in IMAGES:
            raise wrong_value(f"{where}.media_type", of, ", ".join(IMAGES))
        return f"data:{of};base64,{_string(given, 'data', where)}"
    if kind != "url":
        raise _unknown(where, kind, "'base64' and 'url'")
    return _string(given, "url", where)


def _of_assistant(blocks: list[Block], where: str) -> Fields:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(blocks):
        kind, at = _kind(block, f"{where}[{j}]"), f"{where}[{j}]"
        if kind == "text":
            texts.append(_string(block, "text", at))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise wrong_value(f"{at}.input", block.get("input"), "an object")
            function = {"name": _string(block, "name", at), "arguments": json.dumps(block["input"])}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unknown(at, kind, "'text', 'thinking' and 'tool_use'")
    message: Fields = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_value(where, content, "a string, or a list of blocks")
    texts = []
    for j, block in enumerate(content):
        if (kind := _kind(block, f"{where}[{j}]")) != "text":
            raise _unknown(f"{where}[{j}]", kind, "'text'")
        texts.append(_string(block, "text", f"{where}[{j}]"))
    return "\n".join(texts)


def _tools(tools: list[Block] | None, choice: Block | None) -> Fields:
    declared = []
    for i, tool in enumerate(tools or []):
        if (kind := tool.get("type")) not in (None, "custom"):
            raise UnsupportedField(f"tools[{i}].type: {SHORT.repr(kind)}, allowed is 'custom'", f"tools[{i}].type")
        if not isinstance(tool.get("input_schema"), dict):
            raise wrong_value(f"tools[{i}].input_schema", tool.get("input_schema"), "a JSON Schema, an object")
        function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
        declared.append({"type": "function", "function": function | {"parameters": tool["input_schema"]}})
    if choice is None:
        return {"tools": declared or None}
    kind = choice.get("type")
    chosen: dict[Any, object] = {"auto": "auto", "any": "required", "none": "none"}
    chosen["tool"] = {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in chosen:
        raise wrong_value("tool_choice.type", kind, "'auto', 'any', 'tool' or 'none'")
    serial = choice.get("disable_parallel_tool_use")
    if serial is not None and not isinstance(serial, bool):
        raise wrong_value("tool_choice.disable_parallel_tool_use", serial, "true or false")
    return {
        "tools": declared or None,
        "tool_choice": chosen[kind],
        "parallel_tool_calls": None if serial is None else not serial,
    }


def _thinking(said: Block | None, effort: Any, thinks: bool) -> Fields:
    """Without a word of it there is none, as with Anthropic."""
    kind = "disabled" if said is None else said.get("type")
    if kind not in THINKING:
        raise wrong_value("thinking.type", kind, ", ".join(THINKING))
    if effort not in EFFORTS:
        raise wrong_value("output_config.effort", effort, ", ".join(each for each in EFFORTS if each))
    budget = whole_number((said or {}).get("budget_tokens"))
    if budget is not None and (type(budget) is not int or budget < 1):
        raise wrong_value("thinking.budget_tokens", budget, "a whole number at least 1")
    if not thinks:
        return {}
    if kind == "disabled":
        return {"reasoning_effort": "none", "include_reasoning": False}
    wishes = {"enable_thinking": True, "thinking": True}
    return {"chat_template_kwargs": wishes, "thinking_token_budget": budget, "reasoning_effort": effort}


def _form(said: Any) -> Fields | None:
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("type") != "json_schema" or not isinstance(said.get("schema"), dict):
        raise wrong_value("output_config.format", said, "{'type': 'json_schema', 'schema': ...}")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": said["schema"]}}


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise wrong_value(where, block, "an object with a type")
    return kind


def _string(block: Block, name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise wrong_value(f"{where}.{name}", value, "a string")
    return value


def _unknown(where: str, kind: str, allowed: str) -> UnsupportedField:
    return UnsupportedField(
        f"{where}.type: {SHORT.repr(kind)} is not supported, allowed are {allowed}", f"{where}.type"
    )


# --- an answer


class MessageShape:
    """See `sse.Shape`. Its content is a list of blocks, which follow each other in a stream, too."""

    counts = False

    def __init__(self, frontend: Frontend, model: str, request_id: str, turn: Turn) -> None:
        self._head: Fields = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._reader = turn.readers[0] if turn.readers else None
        self._prompt_tokens = len(turn.prompt)
        self._index = -1  # of the newest block
        self._open = ""  # its kind; "" when it has ended
        self._blank = ""  # white space, which is not worth a block of its own
        self._end: Fields = {"stop_reason": None, "stop_sequence": None}

    def count(self, usage: Usage) -> None:
        raise AssertionError("it does not count")

    def opening(self) -> list[bytes]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message)]

    def content(self, delta: Delta) -> bytes:
        last = delta.finish_reason is not None
        fields = {"content": delta.text} if self._reader is None else self._reader.push(delta.text, last=last)
        events = [*self._deltas(fields)]
        if last:
            self._end = self._ended(delta)
            events += self._stop()
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        end = _event("message_delta", delta=self._end, usage=_usage(usage))
        return end + _event("message_stop")

    def failure(self, error: Exception, request_id: str) -> bytes:
        return b"event: error\ndata: " + encode(error_row(error, request_id, error_body)[1]) + b"\n\n"

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        (output,) = outputs
        message: Fields = {"content": output.text} if self._reader is None else self._reader.whole(output.text)
        content: list[Block] = []
        if thought := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if (text := message.get("content")) and text.strip():
            content.append({"type": "text", "text": text})
        for call in message.get("tool_calls", ()):
            content.append(_tool_use(call, _arguments(call["function"]["arguments"])))
        return self._head | {"content": content, **self._ended(output), "usage": _usage(usage)}

    def _ended(self, output: Delta) -> Fields:
        if output.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(output.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
        called = self._reader is not None and self._reader.calls
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _deltas(self, fields: Fields) -> Iterator[bytes]:
        if thought := fields.get("reasoning_content"):
            yield from self._in("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(type="thinking_delta", thinking=thought)
        if text := fields.get("content"):
            text, self._blank = self._blank + text, ""
            if self._open == "text" or text.strip():
                yield from self._in("text", {"type": "text", "text": ""})
                yield self._delta(type="text_delta", text=text)
            else:
                self._blank = text
        for call in fields.get("tool_calls", ()):
            if "id" in call:
                yield from self._stop()
                yield from self._in("tool_use", _tool_use(call, {}))
            if part := call["function"]["arguments"]:
                yield self._delta(type="input_json_delta", partial_json=part)

    def _in(self, kind: str, block: Block) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._stop()
        self._open, self._index = kind, self._index + 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _tool_use(call: Fields, given: object) -> Block:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _arguments(text: str) -> object:
    """An object; what a model did not finish, or wrote wrong, is shown as it stands."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {"unparsed": text}
    return found if isinstance(found, dict) else {"unparsed": text}


def _usage(usage: Usage) -> Fields:
    """What was found in the cache is counted beside `input_tokens`, and not in it; and so are the whole blocks that
    a cache may keep of the rest."""
    created = max(0, usage.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS - usage.cached_tokens)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **fields}) + b"\n\n"
