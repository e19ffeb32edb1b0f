"""What the bodies of requests have in common: how they are read, which fields are served, and what those mean to the
engine. Each endpoint's own body stands beside it.

Types are checked here; the ranges of sampling fields by `SamplingParams`; messages by the chat template. Fields that a
body declares are served. `NOT_YET` and `REMOVED_PREFIXES` name those that clients know and this server refuses.
Everything else is ignored, and said to be ignored.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, SkipValidation, ValidationError
from pydantic_core import ErrorDetails

from penstock.api import structured
from penstock.core.errors import InvalidRequest, PromptTooLong, UnsupportedField
from penstock.core.sampling import NOT_WITH_BEAMS, SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.service.intake import check_salt

# of which all bodies may speak
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "thinking")
MAX_PROMPTS = 1024
MAX_BIAS_DIGITS = 10
MOST_SHOWN = 5  # wrong keys
MAX_DEPTH = 200  # objects and lists in a body that are within each other: what pydantic's parser takes
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 60


def whole_number(value: object) -> object:
    """1.0 as 1: JSON knows no difference, and some languages' encoders write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(values: Any) -> Any:
    """The same for each in a list, in which there is hardly ever one."""
    return [*map(whole_number, values)] if isinstance(values, list) and float in set(map(type, values)) else values


Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), BeforeValidator(whole_number)]
Strings = Annotated[list[str], Field(fail_fast=True), BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]], Field(fail_fast=True), BeforeValidator(whole_numbers)
]
Names = Callable[[InvalidRequest], InvalidRequest]
Prompts = str | list[str] | list[int] | list[list[int]]

# Known fields that are not served yet -> the values that would change nothing (null never does).
NOT_YET: dict[str, tuple[object, ...]] = {
    # tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    # which tokens, how many
    "logits_processors": ([],),
    "repetition_detection": (),
    "watermarking": (False,),
    "best_of": (1,),
    "thinking_token_budget": (),
    # the prompt
    "suffix": ("",),
    "chat_template": (),
    "documents": ([],),
    "reasoning_effort": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    # the answer
    "return_prompt_text": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    # how it is served
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
}
# Fields that clients send, that change nothing about the tokens, and that this server reads as little as unknown ones.
IGNORED = (
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "session_id",
    "store",
    "stream_options.include_obfuscation",
)
# Fields of older servers, and of others; ignoring them would change the answer.
REMOVED_PREFIXES = ("guided_", "beam_", "logits_processor_")
FOREIGN = {"ebnf", "grammar", "json_schema", "max_new_tokens", "no_repeat_ngram_size", "regex", "typical_p"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

SLO_HEADERS = {"ttft_ms": "x-llm-d-slo-ttft-ms", "tpot_ms": "x-llm-d-slo-tpot-ms"}
TIERS = {"auto": "default", "default": "default", "scale": "default", "flex": "flex", "priority": "priority"}
PRIORITY = -1  # of the tier of that name, where the request says none

# pydantic's error types -> what would be allowed
ALLOWED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length}",
    "extra_forbidden": "ttft_ms and tpot_ms",
}


class Body(BaseModel):
    """What every body has in common. Without `model` it is for the one that is served."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    _size: int = PrivateAttr(0)
    _tenant: str = PrivateAttr("")
    _names: Names | None = PrivateAttr(None)

    @property
    def size(self) -> int:
        """Bytes of the body as it came."""
        return self._size

    def came_from(self, tenant: str) -> None:
        """
        Args:
            tenant: whose cached prefixes and conversations are its own; all of one length. "" shares them.
        """
        self._tenant = tenant

    @classmethod
    def made(cls, fields: Mapping[str, Any], of: Body, names: Names) -> Self:
        """One that stands for another that came. Raises `InvalidRequest` or `UnsupportedField`.

        Args:
            fields: those that are None are left out.
            names: makes of an error by the names of these one by those that came.
        """
        try:
            body = cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise names(_explained(error.errors(include_url=False)[0])) from None
        body._size, body._tenant, body._names = of._size, of._tenant, names
        try:
            body.check()
        except InvalidRequest as error:
            raise names(error) from None
        return body

    def as_came(self, error: InvalidRequest) -> InvalidRequest:
        """An error by the names of the fields that came."""
        return error if self._names is None else self._names(error)

    def check(self) -> None:
        """What types cannot say. Raises `InvalidRequest` naming the field."""

    def undeclared(self) -> dict[str, Any]:
        """Fields that came although no model declares them."""
        return self.model_extra or {}


class Targets(BaseModel):
    """Service level objectives, in milliseconds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ttft_ms: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0})
    tpot_ms: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0})


class ServedBody(Body):
    """What engines work on: how their prompts are cut, and how they are served."""

    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Annotated[Literal["left", "right"] | None, SkipValidation] = None  # `SamplingParams` says more
    cache_salt: str | None = None
    priority: Int32 | None = None
    slo: Targets | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def served_tier(self) -> str | None:
        """The tier by which it is served, where it asked for one; see `service_level`."""
        return None if self.service_tier is None else TIERS[self.service_tier]

    @property
    def prefix_salt(self) -> str:
        """Only requests with the same one share cached prefixes."""
        return self._tenant + (self.cache_salt or "")

    @property
    def conversation(self) -> str:
        """Requests with the same one belong together; "" is no conversation."""
        return self._tenant + self.prompt_cache_key if self.prompt_cache_key else ""

    def check(self) -> None:
        if self.cache_salt is not None:
            check_salt(self.cache_salt)


class GenerationBody(ServedBody):
    """Fields of both ways to generate. None means that the model's own default holds, and penstock's after it."""

    default_max_tokens: ClassVar[int | None] = None  # as many as fit

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Int32 | None = None
    seed: Annotated[int, BeforeValidator(whole_number)] | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stop: Strings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prompt_logprobs: Int32 | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[bool | Literal["never"] | None, SkipValidation] = None  # `SamplingParams` says more
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: TokenIds | None = None
    _shows_timing: bool = PrivateAttr(False)

    @property
    def shows_timing(self) -> bool:
        """Whether the answer says how long it took."""
        return self._shows_timing

    def show_timing(self, shows: bool) -> None:
        self._shows_timing = shows

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    @property
    def continuous_usage(self) -> bool:
        """Whether every event says how much was used so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.get("continuous_usage_stats"))

    @property
    def asked_tokens(self) -> int | None:
        """How long an output may become, by the request itself."""
        return self.max_tokens

    def wishes(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the body speaks of; None where it does not."""
        wishes = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        if self.response_format is not None:
            wishes["structured_outputs"] = structured.wanted(self.response_format, self.structured_outputs)
        return wishes

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """An error by the names of the fields that came."""
        return error if self.structured_outputs is not None else structured.renamed(error)

    def check(self) -> None:
        super().check()
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options: given, allowed only with stream: true", "stream_options")
        for name in STREAM_OPTIONS:
            value = (self.stream_options or {}).get(name)
            if value is not None and not isinstance(value, bool):
                field = f"stream_options.{name}"
                raise InvalidRequest(f"{field}: {SHORT.repr(value)}, allowed is true or false", field)
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                f"prompt_logprobs: {SHORT.repr(self.prompt_logprobs)}, allowed only without stream: true",
                "prompt_logprobs",
            )
        if self.stream and self.use_beam_search:
            raise InvalidRequest("use_beam_search: true, allowed only without stream: true", "use_beam_search")

    def undeclared(self) -> dict[str, Any]:
        given = self.stream_options or {}
        options = {f"stream_options.{name}": given[name] for name in given if name not in STREAM_OPTIONS}
        return super().undeclared() | options


BodyType = TypeVar("BodyType", bound=Body)


def parse(data: bytes, model: type[BodyType]) -> tuple[BodyType, list[str]]:
    """Read a body; returns it with the names of the fields that were ignored.

    Raises:
        InvalidRequest: naming the first wrong field.
        UnsupportedField: naming the first field that is known but not served.
    """
    try:
        body = model.model_validate_json(data)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0]) from None
    body._size = len(data)
    ignored = [name for name, value in body.undeclared().items() if not _harmless(name, value)]
    body.check()
    return body, ignored


def field_table(model: type[Body]) -> dict[str, str]:
    """Every field with a meaning in this body -> "served", "not yet" or "ignored"."""
    options = (f"stream_options.{name}" for name in STREAM_OPTIONS if "stream_options" in model.model_fields)
    served = dict.fromkeys((*model.model_fields, *options), "served")
    return dict.fromkeys(NOT_YET, "not yet") | dict.fromkeys(IGNORED, "ignored") | served


def check_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """Raises `InvalidRequest` when the prompt should end both in a new turn and in the last one."""
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message: true, allowed only without add_generation_prompt: true", "continue_final_message"
        )


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises `InvalidRequest` naming the first part of a message that nobody knows, or that is missing."""
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:  # templates know others than OpenAI does
            field = f"messages[{i}].role"
            problem = "missing, allowed" if role is None else f"{SHORT.repr(role)}, allowed"
            raise InvalidRequest(f"{field}: {problem} is a string, such as {', '.join(ROLES)}", field)
        if message.get("content") is None and role != "assistant":
            raise InvalidRequest(f"messages[{i}].content: missing, it is required", f"messages[{i}].content")


def sampling_params(body: GenerationBody, defaults: Mapping[str, object], vocab_size: int) -> SamplingParams:
    """The body's wishes over the model's `defaults`. Raises `InvalidRequest` naming the field."""
    given: dict[str, Any] = {name: value for name, value in body.wishes().items() if value is not None}
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if (count := len(given.get(name, ()))) > vocab_size:
            raise InvalidRequest(
                f"{name}: {count} token ids, at most {vocab_size} are allowed, the size of the vocabulary", name
            )
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"], vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_token_ids(given.get(name, []), vocab_size, name)
    if given.get("use_beam_search"):
        defaults = {name: value for name, value in defaults.items() if name not in NOT_WITH_BEAMS}
    try:
        params = SamplingParams(**{"max_tokens": body.default_max_tokens, **defaults, **given})
    except InvalidRequest as error:
        raise body.named(error) from None
    if params.thinking is not None:
        check_token_ids([*params.thinking.start, *params.thinking.end], vocab_size, "thinking")
    return params


def service_level(body: ServedBody, headers: Mapping[str, str]) -> ServiceLevel:
    """What the body says, and the headers where it says nothing.

    Raises:
        InvalidRequest: naming the field or header.
        UnsupportedField: a tier that is not served.
    """
    if body.service_tier is not None and body.service_tier not in TIERS:
        allowed = ", ".join(TIERS)
        raise UnsupportedField(
            f"service_tier: {SHORT.repr(body.service_tier)} is not supported, allowed are {allowed}", "service_tier"
        )
    targets = {name: _target(body, headers, name) for name in SLO_HEADERS}
    offline = body.served_tier == "flex"
    if offline and any(target is not None for target in targets.values()):
        raise InvalidRequest("slo: given, allowed only without service_tier 'flex', which has no targets", "slo")
    priority = PRIORITY if body.served_tier == "priority" else 0
    if body.priority is not None:
        priority = body.priority
    return ServiceLevel(**targets, priority=priority, offline=offline, chat=body.conversation)


def _target(body: ServedBody, headers: Mapping[str, str], name: str) -> float | None:
    given = getattr(body.slo, name) if body.slo is not None else None
    if given is not None:
        return _positive(f"slo.{name}", given, given)
    header = headers.get(SLO_HEADERS[name])
    if header is None:
        return None
    try:
        value = float(header)
    except ValueError:
        value = math.nan
    return _positive(SLO_HEADERS[name], value, header)


def _positive(field: str, value: float, given: object) -> float:
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{field}: {SHORT.repr(given)}, allowed is a number of milliseconds above 0", field)
    return value


def prompts_of(
    prompt: Any, vocab_size: int, max_model_len: int | None = None, *, field: str = "prompt", most: int = MAX_PROMPTS
) -> list[str] | list[list[int]]:
    """One entry per prompt, all of them texts or all of them token ids.

    Args:
        max_model_len: token ids have to be fewer; None takes any number.
        field: where they came.
        most: how many prompts are allowed.

    Raises:
        InvalidRequest: it is neither, or there are too many prompts, or tokens that are unknown.
        PromptTooLong: see `max_model_len`.
    """
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    if not (_all(prompts, str) or _all(prompts, list)):
        raise InvalidRequest(
            f"{field}: {SHORT.repr(prompt)}, allowed is a string, a list of token ids, or a list of either", field
        )
    if len(prompts) > most:
        raise InvalidRequest(f"{field}: {len(prompts)} prompts, at most {most} are allowed", field)
    if not all(prompts):
        raise InvalidRequest(f"{field}: empty, at least one token is needed", field)
    for i, tokens in enumerate(prompts):
        if isinstance(tokens, list):
            if max_model_len is not None and len(tokens) >= max_model_len:
                raise PromptTooLong.of(len(tokens), max_model_len)
            prompts[i] = whole_numbers(tokens)
            check_token_ids(prompts[i], vocab_size, field)
    return prompts


def check_token_ids(tokens: list[Any], vocab_size: int, field: str) -> None:
    """Raises `InvalidRequest` unless every one of `tokens` is in the vocabulary."""
    if tokens and not (_all(tokens, int) and min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if type(token) is not int or not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{field}: {SHORT.repr(wrong)} is out of vocabulary, allowed are token ids from 0 to {vocab_size - 1}",
            field,
        )


def _all(values: list[Any], kind: type) -> bool:
    """Whether each is exactly a `kind` (true is no integer), in one pass of C: prompts are long."""
    return set(map(type, values)) <= {kind}


def _harmless(name: str, value: object) -> bool:
    """Whether an undeclared field changes nothing. Raises `UnsupportedField` when it is one that clients rely on."""
    if value is None:
        return True
    if name in NOT_YET:
        if any(type(value) is type(each) and value == each for each in NOT_YET[name]):  # 0 is not false
            return True
        raise UnsupportedField(f"{name} is not supported yet", name)
    if name.startswith(REMOVED_PREFIXES) or name in FOREIGN:
        raise UnsupportedField(f"{SHORT.repr(name)} is not supported", name)
    return False


def _biases(given: Mapping[str, Any], vocab_size: int) -> dict[int, Any]:
    """By token ids. Raises InvalidRequest that names the first few keys that are none."""

    def known(key: str) -> bool:
        return key.isascii() and key.isdigit() and len(key) <= MAX_BIAS_DIGITS and int(key) < vocab_size

    if wrong := [key for key in given if not known(key)]:
        named = ", ".join(map(SHORT.repr, wrong[:MOST_SHOWN])) + (", ..." if len(wrong) > MOST_SHOWN else "")
        raise InvalidRequest(
            f"logit_bias: {named}, allowed are token ids from 0 to {vocab_size - 1}: the vocabulary has {vocab_size}",
            "logit_bias",
        )
    return {int(key): bias for key, bias in given.items()}


def _explained(error: ErrorDetails) -> InvalidRequest:
    """pydantic's error in one sentence: field, value, what is allowed."""
    if error["type"] == "json_invalid":
        if error["ctx"]["error"].startswith("recursion limit"):
            deep = f"nested too deeply, at most {MAX_DEPTH} objects and lists within each other"
            return InvalidRequest(f"the body: {deep}")
        return InvalidRequest(f"the body is not valid JSON: {error['ctx']['error']}")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "missing":
        return InvalidRequest(f"{field}: missing, it is required", field)
    allowed = ALLOWED[error["type"]].format(**error.get("ctx", {}))
    return InvalidRequest(f"{field or 'the body'}: {SHORT.repr(error['input'])}, allowed is {allowed}", field or None)


GenerationType = TypeVar("GenerationType", bound=GenerationBody)


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """What the server's flags say of answers, where a request says nothing.

    Attributes:
        tokens_as_ids: see `GenerationBody.return_tokens_as_token_ids`.
        usage: whether all events of streams say how much was used, whatever the request says.
        timing: whether answers say how long they took.
    """

    tokens_as_ids: bool = False
    usage: bool = False
    timing: bool = False

    def applied(self, body: GenerationType) -> GenerationType:
        """The same body, with them."""
        if body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = self.tokens_as_ids
        if self.usage and body.stream:
            body.stream_options = {"include_usage": True, "continuous_usage_stats": True}
        body.show_timing(self.timing)
        return body
