"""Data-parallel groups among which experts are spread, with real processes: where one dies all start again, and no
token is another one than one rank alone would have drawn."""

import contextlib
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

from penstock import LLM, SamplingParams
from penstock.nn import native
from penstock.service.checkpoint import DEMO
from tests.e2e.test_apply import apply
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.deployments import deployed
from tests.helpers.servers import serving
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


def text(up, prompt, first=None, tokens=200, gaps=None, leave=None, ids=None):
    """
    Args:
        gaps: gets ms between tokens.
        leave: an event; the client does so once it is set.
        ids: gets the answer's.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces, before = [], None
    with httpx.stream("POST", up.url + "/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                pieces.append(event["choices"][0]["text"])
                if ids is not None and not ids:
                    ids.append(event["id"])
                if leave is not None and leave.is_set():
                    break
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


@contextlib.contextmanager
def served(checkpoint, *flags):
    """Two groups of `penstock serve`, both ready."""
    groups = ("--served-model-name", "m", "--data-parallel-size", "2")
    with serving(str(checkpoint), *groups, *flags) as server:
        eventually(lambda: list(states(server).values()) == ["ready", "ready"], 90, server.log)
        yield server


def place_of(server, answer):
    """Name of the instance that a sequence went to last."""
    (sequence,) = json.loads(server.get(f"/explain/{answer}"))["sequences"]
    moved, placed = sequence["relocated"], sequence["placements"][-1]
    return moved[-1]["to"] if moved else placed["decode"] or placed["prefill"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_sequence_moves_between_groups_of_serve(longer, killed):
    """Once clients have left one group alone. Where the group that it moves to is killed meanwhile nobody notices."""
    prompts = [[(31 * i + k * k) % 300 + 1 for k in range(3000)] for i in range(4)]
    flags = ("--enable-expert-parallel", "--max-model-len", "8192", "--kv-cache-memory", "256M")
    with served(longer, *flags, "--helper-kv-memory", "64M") as server, ThreadPoolExecutor(4) as clients:
        leave, ids = [threading.Event() for _ in prompts], [list[str]() for _ in prompts]
        answers = []
        for prompt, left, own in zip(prompts, leave, ids, strict=True):
            begun = threading.Event()
            answers.append(clients.submit(text, server, prompt, begun, 1000, leave=left, ids=own))
            assert begun.wait(300), server.log()
        places = [place_of(server, own[0]) for own in ids]
        crowded = max(sorted(set(places)), key=places.count)
        for left, place in zip(leave, places, strict=True):
            if place != crowded:
                left.set()
        if killed:
            eventually(lambda: server.metric("relocations_total"), 60, server.log)
            (other,) = states(server).keys() - {crowded}
            os.kill(server.pids()[other], signal.SIGKILL)
        stay = [i for i, place in enumerate(places) if place == crowded]
        found = [answers[i].result() for i in stay]
        assert server.metric("relocations_total", reason="sequence") >= 1, server.log()
        assert killed or server.metric("handoffs_total") >= 1, server.log()
        assert server.stop() == 0, server.log()
    llm = LLM(str(longer), max_model_len=8192, kv_cache_memory=256 << 20)
    greedy = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    assert found == [answer.text for answer in llm.generate([prompts[i] for i in stay], greedy)]


@pytest.mark.parametrize("victim", ["engine-0", "kv-pool"])
def test_what_is_killed_beside_serve_ends_no_stream(victim):
    """Streams of a group go on in the other one, where groups have nothing in common; those of both wait for the memory
    of their blocks."""
    prompts = [f"def f{i}(" for i in range(4)]
    with (
        served("demo", "--kv-cache-memory", "64M", "--max-model-len", "2048") as server,
        ThreadPoolExecutor(len(prompts)) as clients,
    ):
        expected = [text(server, prompt, tokens=400) for prompt in prompts]
        begun, before = [threading.Event() for _ in prompts], server.pids()
        answers = [clients.submit(text, server, *each, 400) for each in zip(prompts, begun, strict=True)]
        assert all(event.wait(60) for event in begun), server.log()
        os.kill(before[victim], signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected, server.log()
        eventually(lambda: server.pids().get(victim, before[victim]) != before[victim], 60, server.log)
        eventually(lambda: list(states(server).values()) == ["ready", "ready"], 90, server.log)
        assert server.stop() == 0, server.log()
