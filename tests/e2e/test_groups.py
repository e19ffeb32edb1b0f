"""Data-parallel groups among which experts are spread, with real processes: where one dies all start again, and no
token is another one than one rank alone would have drawn."""

import json
import logging
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from penstock.nn import native
from penstock.service.checkpoint import DEMO
from tests.e2e.test_apply import apply
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.deployments import deployed
from tests.helpers.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code"),
]
log = logging.getLogger(__name__)
ENGINE = {"kv-cache-memory": "32M", "max-model-len": 512}
PROMPTS = [f"def f{i}(" for i in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("transformers")
    config = json.loads((DEMO / "config.json").read_text())
    ids = {name: config[name] for name in ("vocab_size", "eos_token_id")}
    folder = write_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3-moe", dtype=torch.float32, **ids)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def longer(checkpoint, tmp_path_factory):
    """The same kind, with attention that takes a while over some thousand tokens."""
    config = json.loads((checkpoint / "config.json").read_text())
    more = {"max_position_embeddings": 8192, "num_hidden_layers": 4}
    more |= {name: config[name] for name in ("vocab_size", "eos_token_id")}
    folder = write_checkpoint(tmp_path_factory.mktemp("longer"), "qwen3-moe", dtype=torch.float32, **more)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def content(checkpoint, **engine):
    served = {"model": str(checkpoint), "served-model-name": "m", "restart": {"backoff": 0.1, "limit": 20}}
    return served | {"engine": ENGINE | engine, "instances": [{}]}


def text(up, prompt, first=None, tokens=200, gaps=None):
    """
    Args:
        gaps: gets ms between tokens.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces, before = [], None
    with httpx.stream("POST", up.url + "/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if first is not None:
                    first.set()
                now, last, before = time.monotonic(), before, time.monotonic()
                if gaps is not None and last is not None:
                    gaps.append(1e3 * (now - last))
    return "".join(pieces)


def states(up):
    return {row["name"]: row["state"] for row in json.loads(up.get("/health"))["instances"]}


@pytest.mark.parametrize("tensor", [1, 2])
def test_all_groups_start_again_where_one_dies(checkpoint, tmp_path, tensor):
    with deployed(content(checkpoint)) as up:
        expected = [text(up, prompt) for prompt in PROMPTS]
    groups = {"data-parallel-size": 2, "tensor-parallel-size": tensor, "enable-expert-parallel": True}
    groups |= {"enable-dbo": True, "helper-kv-memory": "8M"}
    with deployed(content(checkpoint, **groups)) as up, ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(lambda prompt: text(up, prompt), PROMPTS)) == expected
        for victim in ("engine-1", "engine-0"):
            before, begun = up.pids(), [threading.Event() for _ in PROMPTS]
            answers = [clients.submit(text, up, *one) for one in zip(PROMPTS, begun, strict=True)]
            assert all(event.wait(60) for event in begun)  # who comes later is told that there is no instance
            os.kill(before[victim], signal.SIGKILL)
            assert [answer.result() for answer in answers] == expected, up.log()
            eventually(lambda: set(states(up).values()) == {"ready"}, 60, up.log)
            assert not set(before.values()) & {up.pids()[name] for name in states(up)}, "both are others now"
        code, said = apply(up, tmp_path, content(checkpoint, **groups | {"max-num-seqs": 7}))
        assert code == 2
        assert "data-parallel-size: another group, with enable-expert-parallel allowed is what it began with" in said
        assert up.stop() == 0, up.log()


@pytest.mark.parametrize("options", [{}, {"helper-kv-memory": "64M"}])
def test_a_sequence_moves_from_the_group_whose_contexts_are_long(longer, options):
    """Once those that were in the other group have ended, also where that one helps with parts of it."""
    prompts = [[(31 * i + k * k) % 300 + 1 for k in range(3000)] for i in range(4)]
    lengths = (1000, 4, 1000, 4)
    long = {"max-model-len": 8192, "kv-cache-memory": "256M"}
    with deployed(content(longer, **long)) as up:
        expected = [text(up, prompt, tokens=tokens) for prompt, tokens in zip(prompts, lengths, strict=True)]
    groups = {"data-parallel-size": 2, "enable-expert-parallel": True, **options}
    served = content(longer, **long, **groups) | {"policy": "round_robin"}
    with deployed(served) as up, ThreadPoolExecutor(4) as clients:
        gaps = [list[float]() for _ in prompts]
        answers = []
        for prompt, tokens, took in zip(prompts, lengths, gaps, strict=True):  # one after the other to each group
            begun = threading.Event()
            answers.append(clients.submit(text, up, prompt, begun, tokens, took))
            assert begun.wait(300), up.log()
        assert [answer.result() for answer in answers] == expected, up.log()
        assert 1 <= up.metric("relocations_total", reason="sequence") == up.metric("handoffs_total"), up.log()
        assert "sequence: of 3," in up.get("/overview"), up.log()
        long_ones = sorted(gaps[0] + gaps[2])
        log.info("ms between tokens: median %.1f, longest %.1f", long_ones[len(long_ones) // 2], long_ones[-1])
