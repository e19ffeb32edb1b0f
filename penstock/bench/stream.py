"""The bytes of a streamed answer, turned into counts of tokens. No sockets here: bytes and times come as arguments."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.bench.record import Answer, RequestRecord


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        return self.text or (self.delta and self.delta.content) or ""

    def has_text(self) -> bool:
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


class EventReader:
    """Server-sent events out of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the `data:` lines that are complete by now."""
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerTally:
    """Counts one answer into its record.

    A server that reports token ids is counted exactly, event by event. One that does not says at the end, in `usage`,
    how many tokens there were, and they are spread evenly over the events with text: an event is never taken for a
    token.
    """

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._reader = EventReader()
        self._text_times: list[float] = []
        self._last_time = record.sent
        self._usage: _Usage | None = None
        self.token_ids_seen = False

    def feed(self, time: float, data: bytes) -> None:
        """Bytes that arrived at `time`."""
        for payload in self._reader.feed(data):
            if payload != b"[DONE]" and self._record.error is None:
                self._payload(time, payload)

    def _payload(self, time: float, payload: bytes) -> None:
        try:
            event = _EVENT.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._record.fail("bad event", f"{error}: {payload[:100]!r}")
            return
        if event.error is not None:
            self._record.fail("error event", str(event.error))
            return
        self._usage = event.usage or self._usage
        self._last_time = time
        for choice in event.choices:
            self._record.finish_reason = choice.finish_reason or self._record.finish_reason
            if choice.token_ids is not None:
                self.token_ids_seen = True
            if choice.token_ids:
                self._record.events.append((time, len(choice.token_ids)))
            if choice.has_text():
                self._text_times.append(time)
            if self._record.answer is not None:
                self._keep(self._record.answer, choice)

    def _keep(self, answer: Answer, choice: _Choice) -> None:
        answer.pieces.append(choice.content())
        if choice.token_ids is not None:
            answer.token_ids = answer.token_ids or []
            answer.token_ids.extend(choice.token_ids)

    def close(self) -> None:
        """The stream has ended well: settle the counts, or fail the record when the answer is not whole."""
        record, usage = self._record, self._usage
        if record.error is not None:
            return
        if record.finish_reason is None:
            record.fail("incomplete", f"the stream ended without a finish reason after {len(self._text_times)} events")
            return
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0
        if self.token_ids_seen:
            return
        if usage is None:
            record.fail("uncounted", "the server gave neither token ids nor usage")
        elif usage.completion_tokens:
            record.events = spread(usage.completion_tokens, self._text_times or [self._last_time])


def spread(tokens: int, times: list[float]) -> list[tuple[float, int]]:
    """`tokens` shared out evenly over events at `times` (at least one); the first is not given more than its share."""
    ends = [tokens * i // len(times) for i in range(len(times) + 1)]
    return [(time, ends[i + 1] - ends[i]) for i, time in enumerate(times)]
