"""What travels between a frontend and an engine. msgpack, one tagged message a frame; never pickle."""

from __future__ import annotations

import msgspec

from penstock.core.request import Request, TokenOutput

PROTOCOL = 1


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A frontend makes itself known; the engine answers with `Ready` once it can serve."""

    protocol: int = PROTOCOL


class Enqueue(msgspec.Struct, tag=True, frozen=True):
    request: Request


class Cancel(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Stop now; what runs is lost."""


Command = Hello | Enqueue | Cancel | Shutdown


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine can serve.

    Attributes:
        max_model_len: prompt and output tokens of one sequence together.
        vocab_size: token ids are below it.
        num_blocks: KV blocks in all.
        token_budget: tokens in one step at most.
    """

    protocol: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    token_budget: int
    device: str
    dtype: str


class EngineStats(msgspec.Struct, frozen=True):
    """Load now, and totals since the engine started."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # prompt tokens found
    steps: int


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """What a step brought this frontend. `step_tokens` is 0 in the heartbeat that an idle engine sends."""

    outputs: list[TokenOutput]
    stats: EngineStats
    step_tokens: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The engine would not take a request."""

    request_id: str
    message: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine is about to exit with an error."""

    message: str


Event = Ready | StepReport | Refused | Failed


class Codec:
    """Encodes and decodes one side's messages."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

    def encode(self, message: Command | Event) -> bytes:
        return self._encoder.encode(message)

    def command(self, data: bytes) -> Command:
        """Raises `msgspec.DecodeError` on anything that is not a command."""
        return self._commands.decode(data)

    def event(self, data: bytes) -> Event:
        """Raises `msgspec.DecodeError` on anything that is not an event."""
        return self._events.decode(data)
