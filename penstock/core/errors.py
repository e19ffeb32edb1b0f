"""The errors that penstock raises, and the HTTP status of each.

    PenstockError
    ├── UserError (ValueError)      a caller's mistake; names field, value, what is allowed
    │   ├── InvalidRequest          400  a request field is wrong
    │   │   └── UnsupportedField    400  a known field that this server does not serve
    │   ├── PromptTooLong           400  can never fit, whatever else is running
    │   ├── Unauthorized            401
    │   ├── ModelNotFound           404
    │   ├── Conflict                409  not in the state that it is in
    │   └── ConfigError             a flag, file or checkpoint is wrong; the command line exits with 2
    ├── Overloaded                  429  try again after `retry_after` seconds
    ├── Unavailable                 503  not ready, draining, or no engine
    ├── ClientTooSlow               408  the client does not read its answer
    ├── EngineFailure               500  an internal error
    │   └── BreaksEngines           500  the request has broken an engine twice, and is not tried again
    └── RankFailed                       a process that computes a model with this one has ended, or stands still

A broken invariant of penstock is an `assert`, never one of these.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Root of the tree. `str(error)` is one line that may be shown to a user."""


class UserError(PenstockError, ValueError):
    """Bad input: which field, the value given, and what would be allowed.

    Args:
        message: one sentence for people.
        field: the request field, flag or file key that is wrong, or None when it is the whole.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequest(UserError):
    """A request field has a wrong type or value."""


class UnsupportedField(InvalidRequest):
    """A field that clients know, and that this server does not serve."""


class Unauthorized(UserError):
    """The API key is missing or unknown."""


class ModelNotFound(UserError):
    """No model of that name is served here."""


class Conflict(UserError):
    """What is asked for cannot be done in the state that things are in."""


class PromptTooLong(UserError):
    """The prompt could never fit, even alone."""

    @classmethod
    def of(cls, tokens: int, longest: int, output: int = 1) -> PromptTooLong:
        """A prompt of so many tokens, where a sequence may have `longest`, `output` of them generated. In OpenAI's
        words: by them clients know that they may try again with less."""
        return cls._saying(f"{tokens}", longest, output)

    @classmethod
    def more_than(cls, longest: int, output: int = 1) -> PromptTooLong:
        """The same, of a prompt whose tokens nobody has counted to the end."""
        return cls._saying(f"more than {longest - output}", longest, output)

    def of_field(self, field: str) -> PromptTooLong:
        """The same, of a prompt that came in that field."""
        return PromptTooLong(f"{field}{str(self).removeprefix('prompt')}", field)

    @classmethod
    def _saying(cls, tokens: str, longest: int, output: int) -> PromptTooLong:
        room = f"at most {longest - output} fit beside one output token. " if output else ""
        return cls(
            f"prompt: This model's maximum context length is {longest} tokens. However, your prompt has {tokens} "
            f"tokens; {room}Please reduce the length of the prompt.",
            "prompt",
        )


class ConfigError(UserError):
    """A flag, a configuration file or a checkpoint is wrong."""


class Overloaded(PenstockError):
    """The queue is full. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(PenstockError):
    """Nothing can be served now. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClientTooSlow(PenstockError):
    """More output waits for a client than is buffered for one."""


class EngineFailure(PenstockError):
    """The engine failed on a request that was valid."""


class BreaksEngines(EngineFailure):
    """A request has broken an engine twice, the second time alone in its step.

    Attributes:
        headers: of the answer: OpenAI's clients send again what ends with a 500, but for this.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = {"x-should-retry": "false"}


class RankFailed(PenstockError):
    """A process that computes a model together with this one has ended, or stands still.

    Args:
        broken: by what it computed; else it may have been ended from outside.
    """

    def __init__(self, message: str, *, broken: bool = False) -> None:
        super().__init__(message)
        self.broken = broken


# class -> (HTTP status, OpenAI `type`, OpenAI `code`); a subclass that is absent has its parent's row
HTTP_TABLE: dict[type[BaseException], tuple[int, str, str]] = {
    InvalidRequest: (400, "invalid_request_error", "invalid_value"),
    UnsupportedField: (400, "invalid_request_error", "unsupported_field"),
    Unauthorized: (401, "authentication_error", "invalid_api_key"),
    ModelNotFound: (404, "invalid_request_error", "model_not_found"),
    Conflict: (409, "invalid_request_error", "conflict"),
    PromptTooLong: (400, "invalid_request_error", "context_length_exceeded"),
    UserError: (400, "invalid_request_error", "invalid_value"),
    Overloaded: (429, "rate_limit_error", "overloaded"),
    Unavailable: (503, "service_unavailable_error", "unavailable"),
    ClientTooSlow: (408, "invalid_request_error", "client_too_slow"),
    BreaksEngines: (500, "server_error", "request_breaks_engines"),
    PenstockError: (500, "server_error", "internal_error"),
    BaseException: (500, "server_error", "internal_error"),
}


def http_row(error: BaseException) -> tuple[int, str, str]:
    """(HTTP status, OpenAI error type, OpenAI error code) of an error."""
    return next(HTTP_TABLE[cls] for cls in type(error).__mro__ if cls in HTTP_TABLE)
