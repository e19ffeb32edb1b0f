"""POST /v1/responses: OpenAI's later API, over chats. Answers are kept for a while, so that later requests go on from
them."""

from __future__ import annotations

import asyncio
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.api.background import Background
from penstock.api.chat import ChatBody, Turn, answer
from penstock.api.http import Route, UntilDisconnect, json_response, read_body
from penstock.api.message import Fields
from penstock.api.response_shape import ResponseShape, flat_name
from penstock.api.response_store import ResponseStore
from penstock.api.schema import SHORT, Body, Int32, Strings, service_level, whole_number
from penstock.api.tools import wrong_value
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.service.media_parts import MediaBlock

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

Item = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"  # what `include` calls them
TEXTS = ("input_text", "output_text", "text")  # kinds of a message's parts
RENAMED = {  # fields of a chat -> of a response
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
SAME: tuple[str, ...] = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "min_tokens", "logit_bias", "skip_special_tokens", "structured_outputs"),
    *("priority", "slo", "service_tier", "cache_salt", "prompt_cache_key", "user", "metadata"),
    *("chat_template_kwargs", "parallel_tool_calls", "stream"),
)


class ResponsesBody(Body):
    """POST /v1/responses"""

    input: Annotated[str | list[dict[str, Any]], SkipValidation]  # `messages_of` says more
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
    tool_choice: Annotated[str | dict[str, Any] | None, SkipValidation] = None  # `tools.tool_use` says more
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Int32 | None = None
    include: list[str] | None = None
    enable_response_messages: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @cached_property
    def calls(self) -> dict[str, Fields]:
        """Functions in namespaces, by their names for the model -> what says so in an answer's calls."""
        found = [(said.get("name"), space) for _, space, said in _functions(self.tools)]
        pairs = [(name, space) for name, space in found if isinstance(name, str) and space is not None]
        return {flat_name(name, space): {"name": name, "namespace": space} for name, space in pairs}

    def check(self) -> None:
        if self.background and self.store is False:
            problem = "true with store: false, background can only be used when `store` is true"
            raise InvalidRequest(f"background: {problem}", "background")
        if self.background and self.stream:
            raise UnsupportedField("background: true is not supported with stream: true", "background")
        if self.truncation == "auto":
            raise UnsupportedField("truncation: 'auto' is not supported, allowed is 'disabled'", "truncation")

    def chat(self, before: list[Fields]) -> ChatBody:
        """The chat that it is. Raises InvalidRequest or UnsupportedField, by the names of the fields that came.

        Args:
            before: the conversation up to here.
        """
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        new, places = messages_of(self.input)
        if not new and not before:
            raise InvalidRequest("input: only reasoning, at least one message is needed", "input")
        functions = _functions(self.tools)
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *before, *new],
            "max_tokens": self.max_output_tokens,
            "response_format": _format(self.text),
            "tools": [_tool(said, space) for _, space, said in functions] or None,
            "tool_choice": _choice(self.tool_choice),
            "reasoning_effort": _effort(self.reasoning),
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            **{name: getattr(self, name) for name in SAME},
        }
        where = [place for place, _, _ in functions]
        return ChatBody.made(fields, self, partial(_renamed, len(system) + len(before), places, where))


def routes(models: Models, store: ResponseStore) -> list[Route]:
    behind = Background(store)

    async def responses(request: Request) -> ASGIApp:
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
        conversation = [*before, *messages_of(body.input)[0]]
        shape = partial(ResponseShape, body, conversation, store if body.store is not False else None, tenant)
        work = partial(answer, models.of(body.model), chat, level, request.state.request_id)
        if not body.background:
            return UntilDisconnect(partial(work, shape))
        begun: asyncio.Future[ResponseShape] = asyncio.get_running_loop().create_future()

        def begin(frontend: Frontend, model: str, request_id: str, turn: Turn) -> ResponseShape:
            begun.set_result(shape(frontend, model, request_id, turn))
            return begun.result()

        return json_response(await behind.begin(partial(work, begin), begun))

    async def get_response(request: Request) -> Response:
        """An answer that is still kept, or is made in the background."""
        name = request.path_params["response"]
        if (found := behind.get(request.state.tenant, name)) is None:
            raise _gone(name)
        return json_response(found)

    async def cancel_response(request: Request) -> Response:
        """End what is made in the background."""
        name = request.path_params["response"]
        try:
            found = behind.cancel(request.state.tenant, name)
        except ValueError:
            raise InvalidRequest("Cannot cancel a synchronous response. Allowed is that of background: true") from None
        if found is None:
            raise _gone(name)
        return json_response(found)

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
        Route("POST", "/v1/responses/{response}/cancel", cancel_response, refusals=refusals),
    ]


def _gone(name: str, field: str = "") -> HTTPException:
    where = f"{field}: " if field else ""
    return HTTPException(
        404,
        f"{where}Response with id {SHORT.repr(name)} not found. It is not kept: it never was, with store: false, or it "
        "was long ago",
    )


def _renamed(first: int, places: list[int], functions: list[str], error: InvalidRequest) -> InvalidRequest:
    """A chat's error by the names of a response's fields.

    Args:
        first: message of the chat that is from `input`.
        places: of each of these, which item it is from.
        functions: where each of the chat's tools is.
    """
    old = error.field or ""
    new = RENAMED.get(old, old).replace(".function", "")
    if old.startswith("messages["):
        number, _, rest = old.removeprefix("messages[").partition("]")
        at = int(number) - first
        new = f"input[{places[at]}]{rest}" if 0 <= at < len(places) else "input"
    elif old.startswith("tools["):
        number, _, rest = old.removeprefix("tools[").partition("]")
        new = f"{functions[int(number)]}{rest.replace('.function', '')}"
    return type(error)(str(error).replace(old, new, 1), new) if new != old else error


# --- a response's fields as a chat's


def messages_of(given: str | list[Item]) -> tuple[list[Fields], list[int]]:
    """The chat's messages, and of each which item it begins with."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], [0]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise wrong_value("input", given, "a string, or a list of at least one item, each an object")
    made: list[Fields] = []
    places: list[int] = []
    thought = ""
    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "reasoning":
            parts = item.get("content") or []
            if not isinstance(parts, list):
                raise wrong_value(f"{where}.content", parts, "a list of parts")
            thought += "".join(_string(part, "text", f"{where}.content[{j}]") for j, part in enumerate(parts))
            continue
        if kind == "message":
            message = {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
        elif kind == "function_call":
            function = {name: _string(item, name, where) for name in ("name", "arguments")}
            if item.get("namespace") is not None:
                function["name"] = flat_name(function["name"], _string(item, "namespace", where))
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            if made and made[-1]["role"] == "assistant" and not thought:
                made[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            told = _content(item.get("output"), f"{where}.output", "output")
            message = {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": told}
        else:
            allowed = "'message', 'reasoning', 'function_call' and 'function_call_output'"
            raise UnsupportedField(f"{where}.type: {SHORT.repr(kind)} is not supported, allowed are {allowed}", where)
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        made.append(message)
        places.append(i)
    return made, places


def _content(content: Any, where: str, field: str = "content") -> str | list[Item]:
    """A message's, or what a function has answered, which may have images in it.

    Args:
        field: its name in the item.
    """
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content, where)
    return [
        MediaBlock(_image(part, f"{where}[{j}]"), f"{field}[{j}].image_url")
        if _is_image(part)
        else {"type": "text", "text": _text([part], where)}
        for j, part in enumerate(content)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(part: Item, where: str) -> str:
    if part.get("file_id") is not None:
        raise UnsupportedField(f"{where}.file_id is not supported, allowed is image_url", where)
    return _string(part, "image_url", where)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_value(where, content, "a string, or a list of parts")
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


def _functions(tools: list[Item] | None) -> list[tuple[str, str | None, Item]]:
    """Of each: where it is, the namespace that it is in, and what is said of it."""
    found: list[tuple[str, str | None, Item]] = []
    for i, tool in enumerate(tools or []):
        where, kind = f"tools[{i}]", tool.get("type")
        if kind == "function":
            found.append((where, None, tool))
        elif kind == "namespace":
            space, within = _string(tool, "name", where), tool.get("tools")
            if not isinstance(within, list) or not within:
                raise wrong_value(f"{where}.tools", within, "a list of at least one function")
            for j, each in enumerate(within):
                if not isinstance(each, dict) or each.get("type") != "function":
                    raise _kind_of_tool(each, f"{where}.tools[{j}]", "'function'")
                found.append((f"{where}.tools[{j}]", space, each))
        else:
            raise _kind_of_tool(tool, where, "'function' or 'namespace'")
    return found


def _kind_of_tool(tool: Any, where: str, allowed: str) -> InvalidRequest:
    kind = tool.get("type") if isinstance(tool, dict) else None
    error = UnsupportedField if isinstance(kind, str) else InvalidRequest
    return error(f"{where}.type: {SHORT.repr(kind)}, allowed is {allowed}", f"{where}.type")


def _tool(said: Item, space: str | None) -> Item:
    """Chats have what a function is one level deeper, and no namespaces."""
    function = {key: value for key, value in said.items() if key != "type" and value is not None}
    if space is not None and isinstance(said.get("name"), str):
        function["name"] = flat_name(said["name"], space)
    return {"type": "function", "function": function}


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
        raise wrong_value("text.format", given, "an object of type 'text', 'json_object' or 'json_schema'")
    return {"type": kind}


def _effort(reasoning: Item | None) -> Any:
    return (reasoning or {}).get("effort")


def _string(part: Any, name: str, where: str) -> str:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, str):
        raise wrong_value(f"{where}.{name}", value, "a string")
    return value
