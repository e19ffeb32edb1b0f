"""Conversations to prompt text, by the model's own Jinja templates, with the same results as in transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.errors import ConfigError, InvalidRequest, UnsupportedField

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]

_REASONING_KEYS = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # one thing; clients and templates disagree on the name
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_PROBE = "penstock-probe"
_CONTINUE_MARK = "\ufdd0continue here\ufdd1 "  # the space at the end shows whether a template strips content


class Placeholder(dict[str, Any]):
    """A part of a message in whose place a template writes what stands for an image or a video: its type is "image" or
    "video". Clients' own parts are none, whatever they say."""


class ChatTemplate:
    """One compiled template. Safe to use from several threads.

    Args:
        source: the Jinja text.
        origin: where it comes from, for error messages.
        special_tokens: `bos_token` and so on, for the template.

    Attributes:
        source: see there.
    """

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `ConfigError` when the template is not valid Jinja."""
        import jinja2

        from penstock.text.sandbox import limited

        try:
            with limited():
                self._template = _environment().from_string(source)
        except RecursionError:
            raise ConfigError(f"{origin}: not a valid chat template: nested too deeply") from None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{origin}: not a valid chat template: line {error.lineno}: {error.message}") from error
        self.source = source
        self._special_tokens = special_tokens
        # whether content must be a list of parts: some templates, made for images too, know nothing else
        self._wants_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt's text.

        Args:
            messages: as a client sent them, in OpenAI's shape.
            add_generation_prompt: end with what opens the assistant's turn.
            continue_final_message: end inside the last message, for the model to go on with it.
            tools: function declarations in OpenAI's shape.
            template_kwargs: more variables for the template.

        Raises:
            InvalidRequest: messages that are malformed, or that the template refuses.
            UnsupportedField: a content part that is not text.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: not possible together with add_generation_prompt", "continue_final_message"
            )
        if taken := _RESERVED & template_kwargs.keys():
            raise InvalidRequest(
                f"chat_template_kwargs: {min(taken)!r} is a field of the request itself", "chat_template_kwargs"
            )
        messages = normalise(messages)
        if continue_final_message:
            messages[-1] = _marked(messages[-1])
        if self._wants_parts:
            messages = [_in_parts(message) for message in messages]
        text = self._run(messages, add_generation_prompt, tools or None, template_kwargs)
        return _cut_at_mark(text) if continue_final_message else text

    def _run(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        from penstock.text.sandbox import limited

        variables = {**self._special_tokens, "documents": None, **template_kwargs}
        try:
            with limited():
                return self._template.render(
                    variables, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
                )
        except Exception as error:  # any failure of a template is one with these messages
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(f"messages: the chat template failed: {reason}", "messages") from error

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        try:
            return _PROBE in self._run([{"role": "user", "content": content}], True, None, {})
        except InvalidRequest:
            return False


def normalise(messages: list[Message]) -> list[Message]:
    """Messages as templates expect them, in new dicts.

    Content becomes one string (text parts are joined by newlines) unless there are placeholders in it, keys that are
    None go, tool call arguments become objects, and reasoning is found under each of its names. Raises `InvalidRequest`
    or `UnsupportedField`.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: at least one message is needed", "messages")
    return [_normalise_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalise_message(message: Message, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}: must be an object with a role", "messages")
    message = {key: value for key, value in message.items() if value is not None}
    if "content" in message:
        message["content"] = _content(message["content"], f"{where}.content")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(content: object, where: str) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: must be a string or a list of parts", "messages")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, Placeholder):
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"{where}[{i}]: must be an object with a type", "messages")
        if kind != "text":
            raise UnsupportedField(f"{where}[{i}]: parts of type {kind!r} are not supported, only 'text'", "messages")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{i}].text: must be a string", "messages")
        texts.append(part["text"])
    return "\n".join(texts) if len(texts) == len(content) else content


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """OpenAI's API carries the arguments as JSON text; templates are written for the object."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}: must be a list", "messages")
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where}[{i}]: must be an object with a function", "messages")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                problem = f"{where}[{i}].function.arguments: not JSON: {error}"
                raise InvalidRequest(problem, "messages") from error
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{where}[{i}].function.arguments: must be an object, or its JSON text", "messages")
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _in_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _marked(message: Message) -> Message:
    if "content" not in message:
        raise InvalidRequest("messages: the final message has no content to continue", "messages")
    if not isinstance(message["content"], str):
        raise InvalidRequest("messages: the final message has more than text, which cannot be continued", "messages")
    return {**message, "content": message["content"] + _CONTINUE_MARK}


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CONTINUE_MARK.rstrip())
    if place < 0:
        raise InvalidRequest("messages: the chat template does not show the final message's content", "messages")
    kept = text[:place]
    return kept if text.startswith(_CONTINUE_MARK, place) else kept.rstrip()


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.nodes

    from penstock.text.sandbox import Sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; it renders as its body."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own class attribute)

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.add_filters(tojson=_tojson)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter; models are not trained on those."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
