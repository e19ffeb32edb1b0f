"""A prompt of 32,000 tokens, read in chunks: it takes memory in proportion to its length, for one layer at a time."""

import random
import re
from pathlib import Path

import httpx
import pytest

from tests.helpers.servers import Server, serving

pytestmark = pytest.mark.slow

LONG, SHORT = 32_000, 2_000  # tokens
KV_BYTES = 4 * 2 * 4 * 32 * 2  # of the demo model, for a token: layers, K and V, heads, values of each, bytes
# bytes for each token while a chunk is read: one layer's K and V in float32, then for all query heads, a mask
LAYER_BYTES = 7 << 10
BESIDES = 16 << 20  # bytes that do not depend on it


def read(server: Server, tokens: int) -> dict:
    """Answer to a prompt of so many tokens."""
    rng = random.Random(tokens)
    body = {
        "model": "demo",
        "prompt": [rng.randrange(4000) for _ in range(tokens)],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=900)
    assert answer.status_code == 200, answer.text
    return answer.json()


def peak(pid: int) -> int:
    """Most bytes of memory that a process has had since it was asked last."""
    proc = Path(f"/proc/{pid}")
    found = re.search(r"VmHWM:\s+(\d+) kB", (proc / "status").read_text())
    assert found is not None
    (proc / "clear_refs").write_text("5")
    return int(found[1]) * 1024


def test_a_long_prompt_takes_memory_in_proportion_to_its_length():
    with serving("demo", "--max-model-len", "33000", "--max-num-batched-tokens", "2048") as server:
        engine = server.engine_pid()
        read(server, SHORT), read(server, SHORT)
        peak(engine)
        read(server, SHORT)
        before = peak(engine)
        answer = read(server, LONG)
        grown = peak(engine) - before
        assert answer["usage"]["prompt_tokens"] == LONG
        assert answer["usage"]["completion_tokens"] == 8
        assert grown < LONG * (KV_BYTES + LAYER_BYTES) + BESIDES, f"{grown / 1e6:.0f} MB more"
        again = read(server, LONG)  # nearly all of it from the prefix cache
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= LONG - 64
