"""A large batch beside online traffic, while every process of the deployment is killed in turn."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.batches import client_of, line, over, results, submitted
from tests.helpers.deployments import PACED, UpProcesses, colocated, deployed
from tests.helpers.waiting import eventually

LINES, TOKENS = 10_000, 32  # so many that it lasts longer than all restarts
VICTIMS = ("frontend", "master", "engine-0", "kv-pool", "other frontend")  # and the launcher after them
ENGINE = PACED | {"max-num-seqs": 16, "slowdown": 4}  # 15 ms a token: processes keep up with it on two cores
RATE = 8.0  # online requests per second
TTFT, TPOT = 1.0, 0.1  # seconds that these are to keep: several times what they take
ALONE = 40.0  # seconds without the batch


@dataclass
class Online:
    """Online requests at a steady rate, each asked again until it is answered.

    Attributes:
        urls: of the frontends, which take turns.
        sent: when each was, and whether it kept its targets at the first try.
        quiet: from when to when something was down.
    """

    urls: list[str]
    sent: list[tuple[float, bool]] = field(default_factory=list)
    quiet: list[tuple[float, float]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Online:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def attainment(self, since: float, until: float) -> float:
        """Of requests that met all processes up."""
        seen = [
            kept
            for at, kept in self.sent
            if since <= at < until and not any(start - 2.0 <= at <= end + 1.0 for start, end in self.quiet)
        ]
        assert len(seen) > 100
        return sum(seen) / len(seen)

    async def _send(self) -> None:
        async with httpx.AsyncClient(timeout=30) as client, asyncio.TaskGroup() as tasks:
            begun = time.monotonic()
            for number in count():
                if self._over.is_set():
                    return
                tasks.create_task(self._one(client, number))
                await asyncio.sleep(max(0.0, begun + (number + 1) / RATE - time.monotonic()))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": f"online {number}", "max_tokens": 20, "ignore_eos": True, "stream": True}
        at = time.monotonic()
        for attempt in range(number, number + 300):
            try:
                ttft, tpot = await self._asked(client, self.urls[attempt % len(self.urls)], body)
                self.sent.append((at, attempt == number and ttft <= TTFT and tpot <= TPOT))
                return
            except (httpx.HTTPError, EOFError):
                await asyncio.sleep(0.2)
        raise AssertionError(f"online request {number} is not answered")

    async def _asked(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[float, float]:
        begun = time.monotonic()
        tokens: list[float] = []
        async with client.stream("POST", url + "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for text in answer.aiter_lines():
                if '"choices"' in text:
                    tokens.append(time.monotonic())
                elif text.endswith("[DONE]"):
                    return tokens[0] - begun, (tokens[-1] - tokens[0]) / 19
        raise EOFError


class Row:
    """The batch as it is on disk."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "batches.sqlite"

    def __getattr__(self, name: str) -> Any:
        with closing(sqlite3.connect(self._file, timeout=20)) as db:
            return db.execute(f"SELECT {name} FROM batches").fetchone()[0]


def kill(up: UpProcesses, name: str) -> None:
    """Until all instances serve all frontends again."""
    earlier = up.pids()
    up.kill(name)
    up.wait_restarted(name, earlier[name])

    def serves() -> bool:
        if up.pids().keys() != earlier.keys():
            return False
        try:
            states = [httpx.get(f"{url}/health", timeout=10).json().get("instances", ()) for url in up.urls]
        except (httpx.HTTPError, ValueError):
            return False
        return all(len(found) == 2 and all(one["state"] == "ready" for one in found) for found in states)

    eventually(serves, 90, up.log)


@pytest.mark.slow
def test_ten_thousand_lines_while_every_process_is_killed(tmp_path: Path) -> None:
    """Each line has one answer, and online requests fare as they do without the batch."""
    content = colocated(2, engine=ENGINE, frontends=2, **{"batch-dir": str(tmp_path)})
    row = Row(tmp_path)
    with deployed(content) as up:
        online = Online(up.urls)
        with online:
            begun = time.monotonic()
            eventually(lambda: time.monotonic() > begun + ALONE, 2 * ALONE)
            batch = submitted(client_of(up.urls[0]), (line(i, max_tokens=TOKENS, seed=i) for i in range(LINES)))
            submission = time.monotonic()
            for victim in VICTIMS:
                done = row.completed
                eventually(lambda done=done: row.completed >= done + LINES // 50, 120, up.log)
                assert row.status == "in_progress"
                name = victim
                if victim.endswith("frontend"):
                    holder = row.holder.rpartition("-")[0]
                    name = holder if victim == "frontend" else {"frontend-0": "frontend-1"}.get(holder, "frontend-0")
                down = time.monotonic()
                kill(up, name)
                online.quiet.append((down, time.monotonic()))
            down, done = time.monotonic(), row.completed
            assert done < LINES, "it is over before all were killed"
            up.process.kill()
            up.process.wait()
            with deployed(content) as again:
                online.urls[:] = again.urls
                online.quiet.append((down, time.monotonic()))
                client = client_of(again.url)
                ended = over(client, batch.id, 300)
                end = time.monotonic()
                online.__exit__()
                assert (ended.status, ended.request_counts.completed) == ("completed", LINES)
                answers = results(client, ended.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"id-{i}" for i in range(LINES)]
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {TOKENS}
    alone, beside = online.attainment(begun, submission), online.attainment(submission, end)
    print(f"online attainment {alone:.2%} without the batch, {beside:.2%} beside it, {len(online.sent)} requests")
    assert beside >= alone - 0.01
