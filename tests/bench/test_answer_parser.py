import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.client import AnswerParser, spread
from penstock.bench.metrics import ClientRecord


def encode(*events, done=True):
    payloads = [json.dumps(event).encode() for event in events] + ([b"[DONE]"] if done else [])
    return b"".join(b"data: " + payload + b"\r\n\r\n" for payload in payloads)


def text(words, ids=None, finish=None):
    choice = {"index": 0, "text": words, "finish_reason": finish}
    return {"choices": [choice | ({} if ids is None else {"token_ids": ids})]}


def chat(finish=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt, completion, cached=0):
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def tally(*pieces):
    """The record after (time, bytes) pieces and the end of the stream."""
    record = ClientRecord(number=0, start=0.0, sent=0.0, prompt_tokens=11)
    counted = AnswerParser(record)
    for time, data in pieces:
        counted.feed(time, data)
    counted.close()
    return record


def test_token_ids_are_counted_event_by_event():
    record = tally(
        (1.0, encode(text("a", [5]), done=False)),
        (2.0, encode(text("", [6, 7]), text("bcd", [8, 9, 10], "stop"), usage(20, 6, 16))),
    )
    assert record.events == [(1.0, 1), (2.0, 2), (2.0, 3)]  # the second brought tokens and no text yet
    assert (record.prompt_tokens, record.cached_tokens) == (20, 16)
    assert (record.finish_reason, record.error) == ("stop", None)


def test_without_token_ids_usage_is_spread_and_an_event_is_no_token():
    record = tally(
        (1.0, encode(text("a"), done=False)), (2.0, encode(text("bcd"), text("", finish="length"), usage(20, 7)))
    )
    assert record.events == [(1.0, 3), (2.0, 4)]


def test_an_answer_without_any_text_still_has_its_tokens():
    record = tally((1.0, encode(text("", finish="stop"), usage(3, 2))))
    assert record.events == [(1.0, 2)]


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_chat_deltas(key):
    record = tally(
        (1.0, encode(chat(role="assistant", content=""), done=False)),
        (2.0, encode(chat(**{key: "x"}), chat(finish="stop"), usage(5, 1))),
    )
    assert record.events == [(2.0, 1)]  # the role is no token


def test_without_usage_the_prompt_is_as_it_was_sent():
    assert tally((1.0, encode(text("a", [5], "stop")))).prompt_tokens == 11


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encode(text("a", [5])), "incomplete"),
        (b"", "incomplete"),
        (encode(text("a", finish="stop")), "uncounted"),
        (b"data: {nonsense\n\n", "bad event"),
        (b'data: {"choices": 5}\n\n', "bad event"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "bad event"),
        (encode(text("a", [5]), {"error": {"message": "out of luck"}}), "error event"),
    ],
)
def test_answers_that_are_not_whole_are_failures(data, kind):
    assert tally((1.0, data)).error == kind


def test_comments_and_other_fields_are_passed_over():
    assert tally((1.0, b": ping\n\nevent: x\nid: 3\n" + encode(text("a", [5], "stop")))).events == [(1.0, 1)]


@given(
    st.lists(st.lists(st.integers(0, 10**6), max_size=4), min_size=1, max_size=8),
    st.lists(st.integers(1, 40), max_size=60),
    st.booleans(),
)
def test_any_chopping_of_the_bytes_gives_the_same_counts(groups, sizes, with_ids):
    events = [text("é" * len(ids), ids if with_ids else None) for ids in groups]
    data = encode(*events, text("", finish="stop"), usage(9, sum(map(len, groups))))
    pieces, rest = [], data
    for size in sizes:
        pieces.append((1.0, rest[:size]))
        rest = rest[size:]
    chopped, whole = tally(*pieces, (1.0, rest)), tally((1.0, data))
    assert chopped == whole
    assert whole.output_tokens == sum(map(len, groups))
    assert whole.error is None


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_spread_gives_all_tokens_evenly_and_the_first_no_more_than_its_share(tokens, times):
    shares = spread(tokens, times)
    counts = [count for _, count in shares]
    assert [time for time, _ in shares] == times
    assert sum(counts) == tokens
    assert max(counts) - min(counts) <= 1
    assert counts[0] == tokens // len(times)
