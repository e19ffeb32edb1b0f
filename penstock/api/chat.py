"""POST /v1/chat/completions; and what is asked for by it, which is a turn of a chat in other APIs, too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, SkipValidation
from starlette.requests import Request
from starlette.types import Send

from penstock.api.http import Route, UntilDisconnect, read_body
from penstock.api.logprobs import chat_logprobs, prompt_logprobs
from penstock.api.media import encode_with_media
from penstock.api.message import MessageReader, plain_message, reasoning_tokens
from penstock.api.openai import Envelope, beside, head, timing_body, usage_body
from penstock.api.schema import (
    SHORT,
    AnswerDefaults,
    GenerationBody,
    Messages,
    check_messages,
    check_token_ids,
    check_turn,
    sampling_params,
    service_level,
    whole_number,
    whole_numbers,
)
from penstock.api.sse import Shape, send_events, send_whole
from penstock.api.structured import check_grammar
from penstock.api.tools import ToolUse, tool_use
from penstock.core.errors import InvalidRequest, PromptTooLong, UnsupportedField
from penstock.core.sampling import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.core.structured_outputs import StructuredOutputs
from penstock.service.generation import Usage
from penstock.service.intake import check_named, check_room, longest_whole, truncated
from penstock.text.detokenizer import Delta
from penstock.text.dialect import Dialect
from penstock.text.reasoning import ReasoningParser

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend, Models

PROMPT_END = 32  # tokens in which a prompt's end says whether reasoning has begun


class PredictedPart(BaseModel):
    """A part of a `Prediction`."""

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """Text that much of the answer is expected to repeat (OpenAI's predicted outputs)."""

    model_config = ConfigDict(strict=True)

    type: Literal["content"]
    content: Annotated[str | list[PredictedPart], SkipValidation]  # `text` says more

    @property
    def text(self) -> str:
        """Raises InvalidRequest."""
        parts: Any = self.content
        if isinstance(parts, str):
            return parts
        if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            texts = [part.get("text") for part in parts]
            if all(isinstance(text, str) for text in texts):
                return "".join(texts)
        field = "prediction.content"
        raise InvalidRequest(
            f"{field}: {SHORT.repr(parts)}, allowed is a string, or a list of parts of type 'text'", field
        )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(whole_number)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=ALL_LOGPROBS, le=MAX_LOGPROBS), BeforeValidator(whole_number)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, SkipValidation] = None  # `tool_use` says more
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**31 - 1), BeforeValidator(whole_number)] | None = None
    _tool_use: ToolUse | None = PrivateAttr(None)

    @property
    def tool_use(self) -> ToolUse | None:
        """What is to be called; None is nothing."""
        return self._tool_use

    @property
    def echoed(self) -> str:
        """What the answer's content begins with: the message that it goes on with, where that is asked for."""
        last = self.messages[-1]
        if not self.echo or self.opens_turn or last["role"] != "assistant":
            return ""
        content = last.get("content") or ""
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    @property
    def has_parts(self) -> bool:
        """Whether some message has more than text."""
        return any(
            isinstance(part, dict) and part.get("type") != "text"
            for message in self.messages
            if isinstance(content := message.get("content"), list)
            for part in content
        )

    @property
    def given_prompt(self) -> list[int] | None:
        """The prompt's tokens, where another instance has made them of these messages: a router brings them."""
        tokens: list[int] | None = whole_numbers((self.kv_transfer_params or {}).get("prompt_token_ids"))
        return tokens

    @property
    def thinking_budget(self) -> int | None:
        """-1 is none, too."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """Variables for the chat template. Those that templates know for how much the model is to think are set by
        `reasoning_effort`, unless they are given."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        said: dict[str, Any] = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            said |= {"enable_thinking": False, "thinking": False}
        return said | (self.chat_template_kwargs or {})

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with what opens the assistant's turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wishes(self) -> dict[str, Any]:
        wishes = super().wishes() | {
            "logprobs": (0 if self.logprob_token_ids else self.top_logprobs or 0) if self.logprobs else None,
            "max_tokens": self.asked_tokens,
        }
        if self._tool_use is not None and self._tool_use.form is not None:
            wishes["structured_outputs"] = self._tool_use.form  # then there is no content
        return wishes

    def named(self, error: InvalidRequest) -> InvalidRequest:
        if self._tool_use is not None and self._tool_use.choice == "required":
            return self._tool_use.renamed(error)
        return super().named(error)

    def check(self) -> None:
        super().check()
        check_turn(self.add_generation_prompt, self.continue_final_message)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(f"top_logprobs: {self.top_logprobs}, allowed only with logprobs: true", "top_logprobs")
        if self.prediction is not None:
            _ = self.prediction.text
        _check_transfer(self.kv_transfer_params or {})
        check_messages(self.messages)
        if self.tools is not None or self.tool_choice is not None:
            self._tool_use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self._tool_use is not None and self._tool_use.choice == "required" and self.structured_outputs is not None:
            raise InvalidRequest(
                "structured_outputs: given, allowed only without a tool_choice that forces a call", "structured_outputs"
            )


def routes(models: Models, defaults: AnswerDefaults) -> list[Route]:
    async def chat_completions(request: Request) -> UntilDisconnect:
        body = defaults.applied(await read_body(request, ChatBody))
        level = service_level(body, request.headers)
        make = partial(ChatShape, body)
        frontend = models.of(body.model)
        return UntilDisconnect(partial(answer, frontend, body, level, request.state.request_id, make))

    return [Route("POST", "/v1/chat/completions", chat_completions, ChatBody)]


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """
    Attributes:
        prompt: token ids.
        prediction: of the answer, as tokens.
        readers: one for each output; none where an output's text is the message's content as it stands.
        shown: special tokens that the readers have to see.
        seen: what of the prompt stands for images, as fields of `Frontend.submit`.
    """

    prompt: list[int]
    params: SamplingParams
    prediction: list[int]
    readers: list[MessageReader]
    shown: frozenset[int]
    seen: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class MakeShape(Protocol):
    """How an API presents the turn."""

    def __call__(self, frontend: Frontend, model: str, request_id: str, turn: Turn) -> Shape: ...


async def answer(
    frontend: Frontend, body: ChatBody, level: ServiceLevel, request_id: str, make: MakeShape, send: Send
) -> None:
    """Generate the turn, and send it. Raises what `turn_of` raises."""
    arrival = frontend.clock.now()
    model = frontend.served_model(body.model)
    frontend.check_ready()
    try:
        turn = await turn_of(frontend, body)
    except InvalidRequest as error:
        raise body.as_came(error) from None
    with frontend.submit(
        [turn.prompt],
        turn.params,
        request_id=request_id,
        model=model,
        level=level,
        arrival=arrival,
        cache_salt=body.prefix_salt,
        prediction=turn.prediction,
        shown=turn.shown,
        **turn.seen,
    ) as generation:
        shape = make(frontend, model, request_id, turn)
        if body.stream:
            await send_events(send, generation, shape, request_id)
        else:
            await send_whole(send, generation, shape)


async def turn_of(frontend: Frontend, body: ChatBody) -> Turn:
    """What a body asks for. Raises InvalidRequest and the like, naming the field."""
    dialect, use = frontend.dialect, body.tool_use
    _check_tools(dialect, use)
    params = sampling_params(body, frontend.default_sampling, frontend.vocab_size)
    if params.structured_outputs is not None:
        await check_grammar(frontend, params, body.named)
    if use is not None and (form := _free_form(dialect, use, body, params)) is not None:
        params = dataclasses.replace(params, structured_outputs=form)
        await check_grammar(frontend, params, use.renamed)
    prompt, seen = body.given_prompt, dict[str, Any]()
    if prompt is not None:
        check_token_ids(prompt, frontend.vocab_size, "kv_transfer_params.prompt_token_ids")
    elif body.has_parts:
        prompt, seen = await _seen(frontend, body, params)
    else:
        prompt = await prompt_of(frontend, body, longest_whole(params, frontend.max_model_len))
    if not seen:
        prompt = list(truncated(prompt, params, frontend.max_model_len))
    asked_in = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_room(len(prompt), body.asked_tokens, frontend.max_model_len, asked_in)
    check_named([prompt], params, frontend.max_model_len, frontend.vocab_size)
    prediction = await _predicted(frontend, body.prediction)
    opened = _reasoning_opened(frontend, prompt)
    params = _with_thinking(frontend, body, params, opened)
    readers = _message_readers(dialect, body, opened, params.n)
    shown = dialect.reasoning_ids.union(() if use is None else dialect.tool_tokens.values())
    return Turn(prompt, params, prediction, readers, shown, seen)


async def prompt_of(frontend: Frontend, body: ChatBody, max_model_len: int | None) -> list[int]:
    """
    Raises:
        PromptTooLong: of more tokens than that.
    """
    how = _encoding(body, max_model_len)
    if not body.has_parts:
        return await frontend.encode_chat(body.messages, **how)
    return (await encode_with_media(frontend, body.messages, frontend.max_model_len, **how)).tokens


async def _seen(frontend: Frontend, body: ChatBody, params: SamplingParams) -> tuple[list[int], dict[str, Any]]:
    """The prompt of messages with parts; and what of it stands for images, as `Turn` has it."""
    longest = frontend.max_model_len
    how = _encoding(body, longest_whole(params, longest))
    prompt = await encode_with_media(frontend, body.messages, longest, **how)
    if not prompt.media:
        return prompt.tokens, {}
    if params.truncate_prompt_tokens is not None:
        field = "truncate_prompt_tokens"
        raise InvalidRequest(f"{field}: {params.truncate_prompt_tokens}, allowed only without images", field)
    return prompt.tokens, prompt.seen


def _encoding(body: ChatBody, max_model_len: int | None) -> dict[str, Any]:
    """How messages become tokens, as `Frontend.encode_chat` has it."""
    return {
        "size": body.size,
        "add_special_tokens": bool(body.add_special_tokens),
        "add_generation_prompt": body.opens_turn,
        "continue_final_message": bool(body.continue_final_message),
        "tools": None if body.tool_use is None else body.tool_use.declared,
        "template_kwargs": body.template_kwargs,
        "max_model_len": max_model_len,
    }


def _check_tools(dialect: Dialect, use: ToolUse | None) -> None:
    """Raises InvalidRequest when calls are asked for that nobody reads."""
    if use is None or use.choice == "required" or (dialect.free_calls and dialect.tools is not None):
        return
    flag = "--tool-call-parser says" if dialect.free_calls else "--enable-auto-tool-choice and --tool-call-parser say"
    raise InvalidRequest(
        f"tool_choice: 'auto', allowed is that only where {flag} how this model writes calls; allowed are 'none', "
        "'required', or a function",
        "tool_choice",
    )


def _free_form(dialect: Dialect, use: ToolUse, body: ChatBody, params: SamplingParams) -> StructuredOutputs | None:
    """What form an output has whose calls are the model's own choice, where tools are strict, or content has a form of
    its own; None is any, or the one that it has already. Raises InvalidRequest."""
    if use.choice != "auto" or dialect.tools is None or body.structured_outputs is not None:
        return None
    wanted = params.structured_outputs
    content: dict[str, Any] | None = None
    if wanted is not None:
        content = {"type": "object"} if wanted.json is None else json.loads(wanted.json)
    return use.free_form(dialect.tools, dialect.tool_tokens, content)


def _reasoning_opened(frontend: Frontend, prompt: list[int]) -> bool | None:
    """See `Reasoning.opened`."""
    if frontend.dialect.reasoning is None:
        return False
    end = frontend.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    return frontend.dialect.reasoning.opened(end)


def _with_thinking(frontend: Frontend, body: ChatBody, params: SamplingParams, opened: bool | None) -> SamplingParams:
    """With what engines have to know of the model's thinking, if that is something. Raises InvalidRequest."""
    budget = body.thinking_budget
    if budget is not None:
        if frontend.dialect.reasoning is None:
            raise InvalidRequest(
                f"thinking_token_budget: {budget}, allowed only where --reasoning-parser says how this model thinks",
                "thinking_token_budget",
            )
        if frontend.modelled_some:
            raise UnsupportedField(
                "thinking_token_budget: engines of modelled devices have no logits to mask", "thinking_token_budget"
            )
    elif params.structured_outputs is None:
        return params
    thinking = frontend.dialect.thinking(opened, budget)
    return params if thinking is None else dataclasses.replace(params, thinking=thinking)


def _message_readers(dialect: Dialect, body: ChatBody, opened: bool | None, count: int) -> list[MessageReader]:
    """One for each output; none where an output's text is the message's content as it stands."""
    use = body.tool_use
    if use is None and dialect.reasoning is None:
        return []
    return [
        MessageReader(
            None if dialect.reasoning is None else ReasoningParser(dialect.reasoning, opened),
            None if use is None else use.parser(dialect.tools),
            several=use is None or use.several,
            shows_reasoning=body.include_reasoning is not False,
        )
        for _ in range(count)
    ]


async def _predicted(frontend: Frontend, prediction: Prediction | None) -> list[int]:
    if prediction is None:
        return []
    try:
        return await frontend.encode(prediction.text, False, frontend.max_model_len)
    except PromptTooLong:
        longest = frontend.max_model_len
        raise InvalidRequest(f"prediction: more than the {longest} tokens of the context", "prediction") from None
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("prompt", "prediction", 1), "prediction") from None


class ChatShape:
    """See `sse.Shape`."""

    def __init__(self, body: ChatBody, frontend: Frontend, model: str, request_id: str, turn: Turn) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = head(f"chatcmpl-{request_id}", kind, model, body)
        self._tokenizer = frontend.tokenizer
        self._token_ids = bool(body.return_token_ids)
        self._beside = beside(frontend, body)
        self._prompt = turn.prompt
        self._n = turn.params.n
        self._readers = turn.readers
        self._one_call = body.tool_use is not None and body.tool_use.named is not None
        self._envelope = Envelope(self._head, body.include_usage)
        self.failure = self._envelope.failure
        self._by_id, self._timed = body.return_tokens_as_token_ids, body.shows_timing
        self._echo = body.echoed
        self.counts = body.continuous_usage
        self.count = self._envelope.count

    def opening(self) -> list[bytes]:
        role = {"role": "assistant", "content": self._echo}
        choices = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(self._n)]
        return [self._envelope.event(choice, None if choice["index"] else self._prompt_ids()) for choice in choices]

    def closing(self, usage: Usage) -> bytes:
        return self._envelope.closing(self._used(usage))

    def _used(self, usage: Usage) -> dict[str, Any]:
        """With what of it was reasoning, where that is told from the content."""
        body = usage_body(usage)
        if (count := reasoning_tokens(self._tokenizer, self._readers)) is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": count}
        return {"usage": body, **(timing_body(usage) if self._timed else {})}

    def content(self, delta: Delta) -> bytes:
        last = delta.finish_reason is not None
        if self._readers:
            said = self._readers[delta.index].push(delta.text, last=last)
        else:
            said = {"content": delta.text} if delta.text or not last else {}
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": said,
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish_reason(delta),
        }
        if last:
            choice["stop_reason"] = delta.stop_reason
        if self._token_ids:
            choice["token_ids"] = delta.tokens
        return self._envelope.event(choice)

    def whole(self, outputs: list[Delta], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "message": self._message(output),
                "logprobs": self._logprobs(output),
                "finish_reason": self._finish_reason(output),
                "stop_reason": output.stop_reason,
                "token_ids": output.tokens if self._token_ids else None,
            }
            for output in outputs
        ]
        found = outputs[0].prompt_logprobs
        scored = None if found is None else prompt_logprobs(self._tokenizer, self._prompt, found)
        of_prompt = {"prompt_logprobs": scored, "prompt_token_ids": self._prompt if self._token_ids else None}
        return {**self._head, "choices": choices, **self._used(usage), **self._beside, **of_prompt}

    def _message(self, output: Delta) -> dict[str, Any]:
        message = self._readers[output.index].whole(output.text) if self._readers else plain_message(output.text)
        return message | {"content": self._echo + (message["content"] or "")} if self._echo else message

    def _finish_reason(self, delta: Delta) -> str | None:
        """As OpenAI has it: an output that ends with calls says so, but not where the one call was named."""
        calls = self._readers[delta.index].calls if self._readers else 0
        return "tool_calls" if calls and not self._one_call and delta.finish_reason == "stop" else delta.finish_reason

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, delta.tokens, delta.logprobs, self._by_id)

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self._prompt} if self._token_ids else {}


def _check_transfer(given: Mapping[str, Any]) -> None:
    """Raises `UnsupportedField` or `InvalidRequest`: where KV comes from is not for requests to say."""
    for name, value in given.items():
        field = f"kv_transfer_params.{name}"
        if name != "prompt_token_ids":
            if value:
                raise UnsupportedField(f"{field} is not supported, allowed is prompt_token_ids", field)
        elif value is not None and not (isinstance(value, list) and value):
            raise InvalidRequest(f"{field}: {SHORT.repr(value)}, allowed is a list of at least one token id", field)
