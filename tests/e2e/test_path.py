"""How many of our files a streamed chat passes. Few, so that whoever follows a request through the code gets there.

The path between two marks is recorded for every request and every token. Beside it the same threads do work by the
clock, such as reports and signs of life, and on a loaded machine, under a profiler, that falls between the marks more
often than not. So the path is the lower quartile by size: one that as much as a quarter of the requests really took.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from penstock.nn import native
from tests.helpers import path_trace
from tests.helpers.path_trace import KERNEL, REQUEST
from tests.helpers.servers import QUICK, serving

ROOT = Path(__file__).parents[2]
CHATS, TOKENS = 16, 20
FRONTEND, ENGINE = 25, 21  # at most so many files before Enqueue is sent, and from its arrival to the first kernel
FRONTEND_LATER, ENGINE_LATER = 12, 19  # at most so many for a later token


def chat(url: str) -> None:
    ask = {
        "model": "demo",
        "stream": True,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    }
    with httpx.stream("POST", url + "/v1/chat/completions", json=ask, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"]


def typical(windows: Iterable[set[str]], essential: str) -> set[str]:
    """The lower quartile by size of those that pass a file without which nothing was done, as where two messages are
    read at once and handled after it."""
    found = sorted((window for window in windows if essential in window), key=len)
    assert len(found) >= CHATS // 2
    return found[len(found) // 4]


@pytest.mark.skipif(native.missing() is not None, reason="needs the native kernels")
def test_a_streamed_chat_passes_few_of_our_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "site").mkdir()
    (tmp_path / "events").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(path_trace.sitecustomize())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    monkeypatch.setenv(path_trace.FOLDER, str(tmp_path / "events"))
    with serving("demo", *QUICK) as server:
        for _ in range(CHATS):
            chat(server.url)
    frontend, engine = path_trace.read(tmp_path / "events")
    sent, received = "> sent StepReport", "> received StepReport"
    measured = {
        "frontend, to Enqueue": (frontend, REQUEST, "> sent Enqueue", "api/chat.py", FRONTEND),
        "engine, to the first kernel": (engine, "> received Enqueue", KERNEL, "engine/runner.py", ENGINE),
        "frontend, a later token": (
            frontend,
            received,
            received,
            "api/sse.py",
            FRONTEND_LATER,
        ),
        "engine, a later token": (engine, sent, sent, "engine/runner.py", ENGINE_LATER),
    }
    paths = {
        name: (typical(path_trace.between(events, start, end), essential), limit)
        for name, (events, start, end, essential, limit) in measured.items()
    }
    with capsys.disabled():
        print()
        for name, (files, limit) in paths.items():
            print(f"{name}: {len(files)} files (at most {limit}): {' '.join(sorted(files))}")
    assert {name: len(files) for name, (files, limit) in paths.items() if len(files) > limit} == {}
