"""POST /v1/responses: OpenAI's later API, over chats. Answers are kept for a while, so that later requests go on from
them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.chat import Asked, answer
from penstock.api.errors import error_row
from penstock.api.http import Route, UntilDisconnect, json_response, read_body
from penstock.api.logprobs import chat_logprobs
from penstock.api.message import Fields
from penstock.api.response_store import ResponseStore
from penstock.api.schema import SHORT, Body, ChatBody, Int32, Messages, Strings, service_level, whole_number
from penstock.api.sse import encode
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.service.generation import Usage
from penstock.text.detokenizer import Delta

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

Item = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"  # what `include` calls them
TEXTS = ("input_text", "output_text", "text")  # kinds of a message's parts
RENAMED = {  # fields of a chat -> of a response
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
SAME += ("repetition_penalty", "ignore_eos", "min_tokens", "logit_bias", "skip_special_tokens", "structured_outputs")
SAME += ("priority", "slo", "service_tier", "cache_salt", "prompt_cache_key", "user", "metadata")
SAME += ("chat_template_kwargs", "parallel_tool_calls", "stream")


class ResponsesBody(Body):
    """POST /v1/responses"""

    input: str | Messages
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(whole_number)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Annotated[int, BeforeValidator(whole_number)] | None = None
    stop: Strings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    logit_bias: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int32 | None = None
    slo: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Int32 | None = None
    include: list[str] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        if self.background:
            raise UnsupportedField("background: true is not supported: /v1/batches is for what may wait", "background")
        if self.truncation == "auto":
            raise UnsupportedField("truncation: 'auto' is not supported, allowed is 'disabled'", "truncation")

    def chat(self, before: list[Fields]) -> ChatBody:
        """The chat that it is. Raises InvalidRequest or UnsupportedField, by the names of the fields that came.

        Args:
            before: the conversation up to here.
        """
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        new, places = _messages(self.input)
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *before, *new],
            "max_tokens": self.max_output_tokens,
            "response_format": _format(self.text),
            "tools": _tools(self.tools),
            "tool_choice": _choice(self.tool_choice),
            "reasoning_effort": _effort(self.reasoning),
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            **{name: getattr(self, name) for name in SAME},
        }
        try:
            return ChatBody.made(fields, self)
        except InvalidRequest as error:
            raise _renamed(error, len(system) + len(before), places) from None


def routes(frontend: Frontend, store: ResponseStore) -> list[Route]:
    async def responses(request: Request) -> UntilDisconnect:
        body = await read_body(request, ResponsesBody)
        tenant = request.state.tenant
        before: list[Fields] = []
        if body.previous_response_id is not None:
            kept = store.get(tenant, body.previous_response_id)
            if kept is None:
                raise _gone(body.previous_response_id, "previous_response_id")
            before = kept.messages
        chat = body.chat(before)
        level = service_level(chat, request.headers)
        shape = partial(ResponseShape, body, before, store if body.store is not False else None, tenant)
        return UntilDisconnect(partial(answer, frontend, chat, level, request.state.request_id, shape))

    async def get_response(request: Request) -> Response:
        """An answer that is still kept."""
        name = request.path_params["response"]
        if (kept := store.get(request.state.tenant, name)) is None:
            raise _gone(name)
        return Response(kept.response, media_type="application/json")

    async def delete_response(request: Request) -> Response:
        """Keep it no longer."""
        name = request.path_params["response"]
        if not store.delete(request.state.tenant, name):
            raise _gone(name)
        return json_response({"id": name, "object": "response.deleted", "deleted": True})

    refusals = {404: "no such response is kept"}
    return [
        Route("POST", "/v1/responses", responses, ResponsesBody, refusals=refusals),
        Route("GET", "/v1/responses/{response}", get_response, refusals=refusals),
        Route("DELETE", "/v1/responses/{response}", delete_response, refusals=refusals),
    ]


def _gone(name: str, field: str = "") -> HTTPException:
    where = f"{field}: " if field else ""
    return HTTPException(
        404, f"{where}{SHORT.repr(name)} is not kept: it never was, with store: false, or it was long ago"
    )


def _renamed(error: InvalidRequest, first: int, places: list[int]) -> InvalidRequest:
    """A chat's error by the names of a response's fields.

    Args:
        first: message of the chat that is from `input`.
        places: of each of these, which item it is from.
    """
    old = error.field or ""
    new = RENAMED.get(old, old).replace(".function", "")
    if old.startswith("messages["):
        number, _, rest = old.removeprefix("messages[").partition("]")
        at = int(number) - first
        new = f"input[{places[at]}]{rest}" if 0 <= at < len(places) else "input"
    return type(error)(str(error).replace(old, new, 1), new) if new != old else error


# --- a response's fields as a chat's


def _messages(given: str | list[Item]) -> tuple[list[Fields], list[int]]:
    """The chat's messages, and of each which item it begins with."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], [0]
    made: list[Fields] = []
    places: list[int] = []
    thought = ""
    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "reasoning":
            thought += "".join(_string(part, "text", where) for part in item.get("content") or ())
            continue
        if kind == "message":
            message = {"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")}
        elif kind == "function_call":
            function = {name: _string(item, name, where) for name in ("name", "arguments")}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            if made and made[-1]["role"] == "assistant" and not thought:
                made[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"{where}.output")
            message = {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content}
        else:
            allowed = "'message', 'reasoning', 'function_call' and 'function_call_output'"
            raise UnsupportedField(f"{where}.type: {SHORT.repr(kind)} is not supported, allowed are {allowed}", where)
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        made.append(message)
        places.append(i)
    return made, places


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, content, "a string, or a list of parts")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(_string(part, "refusal", f"{where}[{j}]"))
        elif kind in TEXTS:
            texts.append(_string(part, "text", f"{where}[{j}]"))
        else:
            raise UnsupportedField(
                f"{where}[{j}].type: {SHORT.repr(kind)} is not supported, allowed are {', '.join(TEXTS)}", where
            )
    return "\n".join(texts)


def _tools(given: list[Item] | None) -> list[Item] | None:
    """Chats have what a function is one level deeper."""
    made = []
    for i, tool in enumerate(given or []):
        if (kind := tool.get("type")) != "function":
            raise UnsupportedField(f"tools[{i}].type: {SHORT.repr(kind)}, allowed is 'function'", f"tools[{i}].type")
        function = {key: value for key, value in tool.items() if key != "type" and value is not None}
        made.append({"type": "function", "function": function})
    return made or None


def _choice(given: str | Item | None) -> str | Item | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    if given.get("type") == "allowed_tools":
        some = given.get("tools")
        named = [_choice(each) for each in some] if isinstance(some, list) else some
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": named}}
    return given


def _format(text: Item | None) -> Item | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "json_schema":
        return {"type": kind, "json_schema": {key: value for key, value in given.items() if key != "type"}}
    if kind not in ("text", "json_object"):
        raise _wrong("text.format", given, "an object of type 'text', 'json_object' or 'json_schema'")
    return {"type": kind}


def _effort(reasoning: Item | None) -> Any:
    return (reasoning or {}).get("effort")


def _string(part: Any, name: str, where: str) -> str:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", value, "a string")
    return value


def _wrong(field: str, value: object, allowed: str) -> InvalidRequest:
    problem = "missing, it is required" if value is None else f"{SHORT.repr(value)}, allowed is {allowed}"
    return InvalidRequest(f"{field}: {problem}", field)


# --- an answer


class ResponseShape:
    """See `sse.Shape`. Its output is a list of items: reasoning, a message, calls; in a stream one after another.

    Args:
        before: the conversation before `body.input`.
        store: where the answer is kept; None where it is not.
    """

    shows_tokens = False
    counts = False

    def __init__(
        self, body: ResponsesBody, before: list[Fields], store: ResponseStore | None, tenant: str, asked: Asked
    ) -> None:
        self._body, self._before, self._store, self._tenant = body, before, store, tenant
        self._id, self._model = f"resp_{asked.request_id}", asked.model
        self._created = int(time.time())
        self._reader = asked.readers[0] if asked.readers else None
        self._tokenizer = asked.tokenizer
        self._number = 0  # of the next event
        self._items: list[Item] = []
        self._texts: list[list[str]] = []  # of each item, in pieces
        self._logprobs: list[Item] = []  # of the newest item
        self._blank = ""
        self._status, self._why = "in_progress", None

    def count(self, usage: Usage) -> None:
        raise AssertionError("it does not count")

    def opening(self) -> list[bytes]:
        begun = self._response(None)
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def content(self, delta: Delta) -> bytes:
        fields = {"content": delta.text} if self._reader is None else self._reader.push(delta.text)
        found: list[Item] = []
        if delta.logprobs is not None:
            found = chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)["content"]
        return b"".join(self._deltas(fields, found))

    def finish(self, delta: Delta) -> bytes:
        events = [] if self._reader is None else [*self._deltas(self._reader.finish(), [])]
        self._end(delta)
        return b"".join([*events, *self._done()])

    def closing(self, usage: Usage) -> bytes:
        response = self._response(usage)
        self._keep(response)
        return self._event(f"response.{self._status}", response=response)

    def failure(self, error: Exception, request_id: str) -> bytes:
        _, body = error_row(error, request_id)
        said: Any = body["error"]
        self._status = "failed"
        failed = self._response(None) | {"error": {"code": said["code"], "message": said["message"]}}
        return self._event("response.failed", response=failed)

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        (output,) = outputs
        self.content(output)
        self.finish(output)
        response = self._response(usage)
        self._keep(response)
        return response

    def _end(self, output: Delta) -> None:
        cut = output.finish_reason == "length"
        self._status = "incomplete" if cut else "completed"
        self._why = {"reason": "max_output_tokens"} if cut else None

    def _response(self, usage: Usage | None) -> Fields:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": self._why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [*self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": _effort(body.reasoning), "summary": None},
            "service_tier": body.service_tier or "default",
            "store": self._store is not None,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
            "user": body.user,
        }

    def _usage(self, usage: Usage) -> Fields:
        thought = "".join("".join(t) for i, t in zip(self._items, self._texts, strict=True) if i["type"] == "reasoning")
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": len(self._tokenizer.encode(thought)) if thought else 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _keep(self, response: Fields) -> None:
        if self._store is None:
            return
        new, _ = _messages(self._body.input)
        said, _ = _messages(self._items)
        self._store.put(self._tenant, self._id, msgspec.json.encode(response), [*self._before, *new, *said])

    # --- items

    def _deltas(self, fields: Fields, logprobs: list[Item]) -> Iterator[bytes]:
        """
        Args:
            logprobs: of the tokens that the text is of.
        """
        if thought := fields.get("reasoning_content"):
            yield from self._in("reasoning")
            yield self._delta("response.reasoning_text", "delta", thought)
        if text := fields.get("content"):
            text, self._blank = self._blank + text, ""
            if self._kind == "message" or text.strip():
                yield from self._in("message")
                self._logprobs += logprobs
                yield self._delta("response.output_text", "delta", text, logprobs=logprobs)
            else:
                self._blank = text
        for call in fields.get("tool_calls", ()):
            if "id" in call:
                yield from self._done()
                yield from self._in("function_call", call)
            if part := call["function"]["arguments"]:
                yield self._delta("response.function_call_arguments", "delta", part)

    @property
    def _kind(self) -> str:
        """Of the item that has begun and not ended; "" is none."""
        newest = self._items[-1] if self._items else {"status": "completed"}
        return newest["type"] if newest["status"] == "in_progress" else ""

    def _in(self, kind: str, call: Fields | None = None) -> Iterator[bytes]:
        if self._kind == kind and call is None:
            return
        yield from self._done()
        number = len(self._items)
        item: Item = {
            "id": f"{ {'message': 'msg', 'reasoning': 'rs', 'function_call': 'fc'}[kind] }_{number}_{self._id}"
        }
        item |= {"type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            assert call is not None
            item |= {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
        self._items.append(item)
        self._texts.append([])
        self._logprobs = []
        yield self._event("response.output_item.added", output_index=number, item=item)
        if kind != "function_call":
            yield self._part_event("response.content_part.added", _part(kind, "", []))

    def _delta(self, kind: str, field: str, text: str, **more: object) -> bytes:
        self._texts[-1].append(text)
        return self._event(f"{kind}.{field}", **self._place(), **{field: text}, **more)

    def _place(self) -> Fields:
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place if item["type"] == "function_call" else place | {"content_index": 0}

    def _part_event(self, kind: str, part: Fields) -> bytes:
        return self._event(kind, **self._place(), part=part)

    def _done(self) -> Iterator[bytes]:
        """The newest item ends."""
        kind = self._kind
        if not kind:
            return
        item, text = self._items[-1], "".join(self._texts[-1])
        if kind == "function_call":
            item["arguments"] = text
            yield self._event(
                "response.function_call_arguments.done", **self._place(), name=item["name"], arguments=text
            )
        else:
            part = _part(kind, text, self._logprobs)
            more: Fields = {"logprobs": self._logprobs} if kind == "message" else {}
            name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            yield self._event(name, **self._place(), text=text, **more)
            yield self._part_event("response.content_part.done", part)
            item["content"] = [part]
        # a call that was cut is no call; the last item of what is cut is incomplete
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        data = encode({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def _part(kind: str, text: str, logprobs: list[Item]) -> Fields:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
