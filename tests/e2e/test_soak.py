"""Two thousand requests against one server, of which many are broken off, wrong or hostile: nothing is lost, nothing is
kept."""

import asyncio
import json
import random
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from penstock.cli.scenario_file import TRACES
from penstock.workload.lengths import Independent, log_normal
from penstock.workload.traces import read_trace
from tests.helpers.servers import Server, serving
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

REQUESTS, AT_ONCE, LONGEST = 2000, 64, 4096
SHORTER = 4
VOCABULARY = 4000  # the demo's is a little larger
GROWTH = 1.05  # of memory, over the second half
KEPT = 1.10  # of memory from the start, with every page of the KV cache written, to the end
WRONG = [  # (what is wrong with it, status)
    ({"max_tokens": -1}, 400),
    ({"max_tokens": "many"}, 400),
    ({"temperature": -0.5}, 400),
    ({"temperature": 1e400}, 400),
    ({"top_p": 2.0}, 400),
    ({"n": 0}, 400),
    ({"prompt": []}, 400),
    ({"prompt": [1 << 40]}, 400),
    ({"prompt": [5] * (2 * LONGEST)}, 400),
    ({"prompt": "a hostile one " * 500_000}, 400),
    ({"prompt": [5] * 500_000}, 400),
    ({"bad_words": ["x"] * 300_000}, 400),
    ({"stop_token_ids": [1] * 500_000}, 400),
    ({"logit_bias": {f"{i:06}": 1 for i in range(100_000)}}, 400),
    ({"prompt": None}, 400),
    ({"model": "nobody"}, 404),
    ({"stop": [""] * 100}, 400),
    ({"logit_bias": {"x": 1}}, 400),
    ({"seed": "s"}, 400),
]


@dataclass
class Ask:
    """One request.

    Attributes:
        body: of it.
        status: that it gets.
        leaves_after: events after which its client goes; None when it stays.
    """

    body: dict
    status: int = 200
    leaves_after: int | None = None


def lengths() -> list[tuple[int, int]]:
    """Prompts and answers, in tokens, that fit the model together: a SHORTER-th of a trace's, so that two slow cores
    end in half an hour."""
    file = TRACES / "azure2023_conv.csv.gz"
    if file.exists():
        pairs = [(r.prompt_tokens, r.output_tokens) for r in read_trace(file)[:REQUESTS]]
    else:  # lengths like the trace's
        drawn = Independent(log_normal(1155, 1000), log_normal(211, 170)).draw(REQUESTS, np.random.default_rng(0))
        pairs = [(int(prompt), int(output)) for prompt, output in zip(*drawn, strict=True)]
    cut = [(max(1, min(prompt // SHORTER, LONGEST - 64)), max(1, output // SHORTER)) for prompt, output in pairs]
    return [(prompt, min(output, LONGEST - prompt)) for prompt, output in cut]


def asks(seed: int) -> list[Ask]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCABULARY) for _ in range(512)]
    made = []
    for prompt, output in lengths():
        tokens = [rng.randrange(VOCABULARY) for _ in range(prompt)]
        if rng.random() < 0.3:
            tokens[: min(prompt, 512)] = shared[:prompt]
        body = {"model": "demo", "prompt": tokens, "max_tokens": output, "ignore_eos": True, "seed": rng.randrange(99)}
        body["stream"] = rng.random() < 0.5
        lot = rng.random()
        if lot < 0.1:
            wrong, status = rng.choice(WRONG)
            made.append(Ask(body | wrong, status))
        elif lot < 0.3:
            made.append(Ask(body | {"stream": True}, leaves_after=rng.choice((0, 1, 2, 10, 50))))
        else:
            made.append(Ask(body))
    return made


def filling(number: int) -> Ask:
    """One of the requests that write every block of the KV cache: no two share a prefix. A page counts as memory from
    when it is first written, and is the cache's from when it is reserved."""
    return Ask(
        {"model": "demo", "prompt": [5 + number] * (LONGEST - 64), "max_tokens": 8, "ignore_eos": True, "stream": False}
    )


async def send(client: httpx.AsyncClient, ask: Ask) -> str:
    """What went wrong; "" when nothing did."""
    content = json.dumps(ask.body).encode()  # also what no JSON can say
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/completions", content=content, headers=headers) as answer:
        if answer.status_code != ask.status:
            return f"{answer.status_code} and not {ask.status}: {(await answer.aread())[:300]!r} for {content[-200:]!r}"
        if ask.status != 200:
            error = httpx.Response(200, content=await answer.aread()).json()["error"]
            return "" if error["message"] and error["type"] else f"{error} says nothing"
        if not ask.body["stream"]:
            whole = httpx.Response(200, content=await answer.aread()).json()
            done = whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]
            return "" if done == (ask.body["max_tokens"], "length") else f"{done} of {ask.body['max_tokens']}"
        events = 0
        async for line in answer.aiter_lines():
            if events == ask.leaves_after:
                return ""
            if line == "data: [DONE]":
                return ""
            if '"error"' in line:
                return line
            events += bool(line)
    return "a stream ended without an end" if ask.leaves_after is None else ""


async def soak(server: Server, made: list[Ask]) -> tuple[list[str], list[int]]:
    """(what went wrong, memory after every hundredth request)."""
    problems: list[str] = []
    memory: list[int] = []
    waiting = iter(made)
    done = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done
        for ask in waiting:
            if problem := await send(client, ask):
                problems.append(problem)
            done += 1
            if done % 100 == 0:
                memory.append(server.memory(kv=True))

    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=3600, limits=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))
    return problems, memory


@pytest.fixture(scope="module")
def memory():
    """After every hundredth request, once all of them were answered rightly and the server has ended well."""
    with serving("demo", "--max-model-len", str(LONGEST), "--kv-cache-memory", "256M") as server:
        assert asyncio.run(soak(server, [filling(i) for i in range(AT_ONCE)]))[0] == []
        start = server.memory()
        problems, found = asyncio.run(soak(server, asks(seed=0)))
        assert not problems, f"{len(problems)}: " + "\n".join(problems[:10])
        assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.process.poll() is None
        eventually(lambda: server.memory() < KEPT * start, what=lambda: f"{start} grew to {server.memory()}")
        assert server.get("/health")
        assert server.stop() == 0
    return found


def test_two_thousand_requests_are_answered(memory):
    assert len(memory) == REQUESTS // 100


def test_and_memory_stays_flat(memory):
    half = len(memory) // 2
    assert max(memory[half:]) < GROWTH * memory[half], [round(m / 1e6) for m in memory]
