"""What routes answer, as types: for the OpenAPI document alone, from which others generate clients. `tests/api` holds
what is really answered to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Count = Annotated[int, Meta(ge=0)]
FinishReason = Literal["stop", "length", "abort"]
Tier = Literal["default", "flex", "priority"]


class CachedTokens(msgspec.Struct):
    cached_tokens: Count


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: Count


class Usage(msgspec.Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET  # where --reasoning-parser tells them from others


class InputUsage(msgspec.Struct):
    prompt_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


# --- chat


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChosenLogprob]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


class CalledFunction(msgspec.Struct):
    name: str
    arguments: Annotated[str, Meta(description="JSON")]


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(msgspec.Struct):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None


class Timing(msgspec.Struct):
    time_to_first_token_ms: float | UnsetType = UNSET
    generation_time_ms: float | UnsetType = UNSET
    queue_time_ms: float | UnsetType = UNSET
    mean_itl_ms: float | UnsetType = UNSET
    tokens_per_second: float | UnsetType = UNSET


class Answer(msgspec.Struct):
    id: str
    created: int
    model: str
    usage: Usage
    service_tier: Tier | None
    system_fingerprint: str | None
    kv_transfer_params: None
    metrics: Timing | UnsetType = UNSET


class ChatCompletion(Answer, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None


# --- completions


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None


class Completion(Answer, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# --- embeddings


class Embedding(msgspec.Struct):
    index: Count
    object: Literal["embedding"]
    embedding: Annotated[list[float] | str, Meta(description="numbers, or float32, little-endian, in base64")]


class Embeddings(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: InputUsage


class RankedText(msgspec.Struct):
    text: str


class Rank(msgspec.Struct):
    index: Count
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranks(msgspec.Struct):
    id: str
    model: str
    results: list[Rank]
    usage: InputUsage


class Score(msgspec.Struct):
    index: Count
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: InputUsage


# --- messages, responses


class MessageUsage(msgspec.Struct):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class Message(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(msgspec.Struct):
    input_tokens: Count


class InputDetails(msgspec.Struct):
    cached_tokens: Count


class ResponseUsage(msgspec.Struct):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class Response(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "queued", "in_progress", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    previous_response_id: str | None
    incomplete_details: dict[str, str] | None


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response.deleted"]
    deleted: bool


# --- the rest


class Tokens(msgspec.Struct):
    count: Count
    max_model_len: Count
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(msgspec.Struct):
    prompt: str


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    modelled: dict[str, int] | None
    fingerprint: str | None
    input_modalities: list[Literal["text", "image", "video"]]


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class InstanceState(msgspec.Struct):
    name: str
    role: str
    state: str
    trouble: str


class ModelState(msgspec.Struct):
    id: str
    ready: bool
    trouble: str


class Health(msgspec.Struct):
    status: Literal["healthy", "draining"]
    models: list[ModelState]
    instances: list[InstanceState]


class Ready(msgspec.Struct):
    status: Literal["ready"]


class Load(msgspec.Struct):
    server_load: Count


class Version(msgspec.Struct):
    version: str


class Overview(msgspec.Struct):
    model: str
    frontend: dict[str, Any]
    master: dict[str, Any]


class Explained(msgspec.Struct):
    request: str
    policy: str | None
    sequences: list[dict[str, Any]]


class Sleeping(msgspec.Struct):
    is_sleeping: bool


ANSWERS: dict[str, Any] = {  # path, or method and path -> what a 200 is, where that is JSON
    "/v1/chat/completions": ChatCompletion,
    "/v1/chat/completions/batch": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
    "GET /v1/responses/{response}": Response,
    "DELETE /v1/responses/{response}": DeletedResponse,
    "/v1/responses/{response}/cancel": Response,
    "/v1/messages": Message,
    "/v1/messages/count_tokens": MessageTokens,
    "/v1/embeddings": Embeddings,
    "/v1/rerank": Ranks,
    "/v2/rerank": Ranks,
    "/rerank": Ranks,
    "/v1/score": Scores,
    "/score": Scores,
    "/tokenize": Tokens,
    "/detokenize": Prompt,
    "/v1/models": Models,
    "/v1/models/{model}": Model,
    "/health": Health,
    "/ready": Ready,
    "/load": Load,
    "/tokenizer_info": dict[str, Any],
    "/version": Version,
    "/overview": Overview,
    "/explain/{request}": Explained,
    "/is_sleeping": Sleeping,
}


def schemas(template: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """`ANSWERS` with schemas in the place of types, and the schemas that these refer to.

    Args:
        template: where the latter will stand, with {name}.
    """
    found, named = msgspec.json.schema_components(ANSWERS.values(), ref_template=template)
    return dict(zip(ANSWERS, found, strict=True)), named
