"""An answer of /v1/responses, whole or as events."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.api.chat import Turn
from penstock.api.errors import error_row
from penstock.api.logprobs import chat_logprobs
from penstock.api.message import Fields, reasoning_tokens
from penstock.api.response_store import ResponseStore
from penstock.api.schema import TIERS
from penstock.api.sse import encode
from penstock.core.errors import Unavailable
from penstock.obs.logs import quoted
from penstock.service.generation import Usage
from penstock.text.detokenizer import Delta

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend

log = logging.getLogger("penstock.api")
Item = dict[str, Any]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of items' ids


class ResponseFields(Protocol):
    """What of a request is repeated in its answer; `responses.ResponsesBody` has it."""

    @property
    def calls(self) -> Mapping[str, Fields]: ...

    background: bool | None
    enable_response_messages: bool | None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning: dict[str, Any] | None
    service_tier: str | None
    temperature: float | None
    text: dict[str, Any] | None
    tool_choice: str | dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    top_logprobs: int | None
    top_p: float | None
    user: str | None


class ResponseShape:
    """See `sse.Shape`. Its output is a list of items: reasoning, a message, calls; in a stream one after another.

    Args:
        before: the conversation that it answers, as chats have it.
        store: where the answer is kept; None where it is not.
    """

    counts = False

    def __init__(
        self,
        body: ResponseFields,
        before: list[Fields],
        store: ResponseStore | None,
        tenant: str,
        frontend: Frontend,
        model: str,
        request_id: str,
        turn: Turn,
    ) -> None:
        self._body, self._before, self._store, self._tenant = body, before, store, tenant
        self._id, self._model = f"resp_{request_id}", model
        self._created = int(time.time())
        self._reader = turn.readers[0] if turn.readers else None
        self._tokenizer = frontend.tokenizer
        self._number = 0  # of the next event
        self._items: list[Item] = []
        self._texts: list[list[str]] = []  # of each item, in pieces
        self._logprobs: list[Item] = []  # of the newest item
        self._blank = ""
        self._status = "in_progress"
        self._why: Fields | None = None
        self._prompt = turn.prompt
        self._tokens: list[int] = []

    @property
    def place(self) -> tuple[str, str]:
        """Its tenant and id, where it is kept."""
        return self._tenant, self._id

    def queued(self) -> Fields:
        """The response before anything is there, which is kept, too."""
        found = self._response(None) | {"status": "queued"}
        self._keep(found)
        return found

    def failed(self, error: Exception) -> Fields:
        """The response that cannot be made."""
        said: Any = error_row(error, self._id)[1]["error"]
        self._status = "failed"
        return self._response(None) | {"error": {"code": said["code"], "message": said["message"]}}

    def count(self, usage: Usage) -> None:
        raise AssertionError("it does not count")

    def opening(self) -> list[bytes]:
        begun = self._response(None)
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def content(self, delta: Delta) -> bytes:
        last = delta.finish_reason is not None
        if self._body.enable_response_messages:
            self._tokens += delta.tokens
        fields = {"content": delta.text} if self._reader is None else self._reader.push(delta.text, last=last)
        found: list[Item] = []
        if delta.logprobs is not None:
            found = chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs)["content"]
        events = [*self._deltas(fields, found)]
        if last:
            self._end(delta)
            events += self._done()
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        response = self._response(usage)
        self._keep(response)
        return self._event(f"response.{self._status}", response=response)

    def failure(self, error: Exception, request_id: str) -> bytes:
        return self._event("response.failed", response=self.failed(error))

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        (output,) = outputs
        self.content(output)
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
            "background": bool(body.background),
            "error": None,
            "incomplete_details": self._why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [*self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "service_tier": TIERS[body.service_tier or "default"],
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
            **(self._raw() if body.enable_response_messages else {}),
        }

    def _raw(self) -> Fields:
        """vLLM's: what the model read and wrote, as text and as tokens."""

        def raw(tokens: list[int]) -> list[Fields]:
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
            return [{"type": "raw_message_tokens", "message": text, "tokens": tokens}] if tokens else []

        return {"input_messages": raw(self._prompt), "output_messages": raw(self._tokens)}

    def _usage(self, usage: Usage) -> Fields:
        readers = [] if self._reader is None else [self._reader]
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(self._tokenizer, readers) or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _keep(self, response: Fields) -> None:
        """Where that cannot be, whoever waits for it gets it all the same, and is told that it is not kept."""
        if self._store is None:
            return
        if self._body.background and response["status"] != "queued":  # it may be cancelled or deleted by now
            kept = self._store.get(*self.place)
            if kept is None or msgspec.json.decode(kept.response)["status"] == "cancelled":
                return
        try:
            self._store.put(self._tenant, self._id, msgspec.json.encode(response), [*self._before, *self._said()])
        except Unavailable as error:
            if self._body.background:
                raise
            log.warning("%s is not kept: %s", quoted(self._id), error)
            response["store"] = False

    def _said(self) -> list[Fields]:
        """The answer as chats have it, in one message."""
        message: Fields = {"role": "assistant", "content": None}
        for item in self._items:
            if item["type"] == "function_call":
                function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            else:
                name = "content" if item["type"] == "message" else "reasoning_content"
                message[name] = (message.get(name) or "") + "".join(part["text"] for part in item["content"])
        return [message] if self._items else []

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
        item: Item = {"id": f"{PREFIXES[kind]}_{number}_{self._id}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            assert call is not None
            name = call["function"]["name"]
            item |= {"call_id": call["id"], **self._body.calls.get(name, {"name": name}), "arguments": ""}
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


def flat_name(name: str, namespace: str | None) -> str:
    """A function's name for the model; one in a namespace is named as vLLM does."""
    return name if namespace is None else f"{namespace}__{name}"


def _part(kind: str, text: str, logprobs: list[Item]) -> Fields:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
