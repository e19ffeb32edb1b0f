"""What is refused for its size costs little, and leaves nothing behind."""

import random
import re
from pathlib import Path

import httpx
import pytest

from tests.helpers.waiting import eventually

TEXT = "".join(random.Random(1).choices("abcdefghij XYZ.,;-+*", k=70_000)) * 100
CONTENT = [{"role": "user", "content": TEXT}]
TEXTS = {  # what is sent -> route, body, the field that is named
    "text": ("/v1/completions", {"prompt": TEXT}, "prompt"),
    "a text that its size alone does not refuse": ("/v1/completions", {"prompt": TEXT[:600_000]}, "prompt"),
    "content": ("/v1/chat/completions", {"messages": CONTENT}, "prompt"),
    "text to count": ("/tokenize", {"prompt": TEXT}, "prompt"),
}
LISTS = {
    "ids": ("/v1/completions", {"prompt": [5] * 2_000_000}, "prompt"),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 150_000}, "messages"),
    "messages to count": ("/tokenize", {"messages": CONTENT}, "messages"),
    "ids to spell": ("/detokenize", {"tokens": [5] * 1_000_000}, "tokens"),
    "stop strings": ("/v1/completions", {"prompt": "a", "stop": ["a"] * 1_000_000}, "stop"),
    "bad words": ("/v1/completions", {"prompt": "a", "bad_words": ["a"] * 1_000_000}, "bad_words"),
    "stop ids": ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 2_000_000}, "stop_token_ids"),
    "allowed ids": ("/v1/completions", {"prompt": "a", "allowed_token_ids": [1] * 2_000_000}, "allowed_token_ids"),
    "biases": ("/v1/completions", {"prompt": "a", "logit_bias": {f"{i:06}": 1 for i in range(400_000)}}, "logit_bias"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_ten_texts_that_are_too_long_leave_no_memory_behind(alone, name):
    path, body, field = TEXTS[name]
    fits = httpx.post(alone.url + "/v1/completions", json={"prompt": TEXT[:3000], "max_tokens": 1}, timeout=60)
    assert fits.status_code == 200
    is_refused(alone, path, body, field)  # what the allocator keeps for the next one, it has now
    before = resident(alone.process.pid)
    for _ in range(10):
        is_refused(alone, path, body, field)
    eventually(lambda: resident(alone.process.pid) < 1.1 * before)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_is_too_long_is_refused_by_its_field(alone, name):
    is_refused(alone, *LISTS[name])


def is_refused(server, path, body, field):
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def resident(pid):
    """Bytes of the server, without its engine."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10
