"""How many of our files a streamed chat passes. Few, so that whoever follows a request through the code gets there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from penstock.nn import native
from tests.helpers import path_trace
from tests.helpers.path_trace import KERNEL, REQUEST
from tests.helpers.servers import QUICK, serving

ROOT = Path(__file__).parents[2]
CHATS, TOKENS = 5, 60
FRONTEND, ENGINE = 25, 20  # at most so many files before Enqueue is sent, and from its arrival to the first kernel
FRONTEND_LATER, ENGINE_LATER = 12, 18  # at most so many for a later token


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


def typical(windows: list[set[str]]) -> set[str]:
    """The one of median size: others hold what is done by the clock beside requests, such as signs of life."""
    assert windows
    return sorted(windows, key=len)[len(windows) // 2]


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
    report = "StepReport"
    paths = {
        "frontend, to Enqueue": (typical(list(path_trace.between(frontend, REQUEST, "> sent Enqueue"))), FRONTEND),
        "engine, to the first kernel": (
            typical(list(path_trace.between(engine, "> received Enqueue", KERNEL))),
            ENGINE,
        ),
        "frontend, a later token": (
            typical(list(path_trace.between(frontend, f"> received {report}", f"> received {report}"))),
            FRONTEND_LATER,
        ),
        "engine, a later token": (
            typical(list(path_trace.between(engine, f"> sent {report}", f"> sent {report}"))),
            ENGINE_LATER,
        ),
    }
    with capsys.disabled():
        print()
        for name, (files, limit) in paths.items():
            print(f"{name}: {len(files)} files (at most {limit}): {' '.join(sorted(files))}")
    assert {name: len(files) for name, (files, limit) in paths.items() if len(files) > limit} == {}
