"""Embeddings are transformers' last hidden states, pooled; and the same bits however their prompts are computed."""

import random
from copy import deepcopy
from functools import partial

import pytest
import torch

from penstock.nn import native
from penstock.nn.loader import load_model
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector, make_embedding, make_engine, make_request

transformers = pytest.importorskip("transformers")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POOLINGS = ("last", "mean")


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 320) for _ in range(length)]


PROMPT = prompt(200, 1)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "bare"), [("qwen3-tied", True), ("qwen3", True), ("mistral-window", False)])
def test_hidden_states_are_those_of_transformers(name, bare, tmp_path):
    folder = write_checkpoint(tmp_path, name, bare=bare)
    other = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
    model = load_model(folder, DEVICE)
    assert model.headless == (bare and name == "qwen3"), "a tied head is an embedding"
    engine = Collector(make_engine(model, budget=70))
    for length in (1, 17, 300):
        tokens = prompt(length, length)
        hidden = other(torch.tensor([tokens], device=DEVICE)).last_hidden_state[0].double().cpu()
        engine.run(*(make_embedding(f"{pooling}-{length}", tokens, pooling) for pooling in POOLINGS))
        for pooling, theirs in zip(POOLINGS, (hidden[-1], hidden.mean(0)), strict=True):
            ours = torch.tensor(engine.embeddings[f"{pooling}-{length}"], dtype=torch.float64)
            assert (ours - theirs).abs().max() < 1e-4
    assert not engine.tokens["last-1"]
    assert engine.finish["mean-300"] == "stop"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request, tmp_path_factory):
    if (reason := native.missing()) is not None or DEVICE.type != "cpu":
        pytest.skip(f"rounds differently for few rows and for many: {reason or DEVICE}")
    return load_model(
        write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3"), DEVICE, getattr(torch, request.param)
    )


@pytest.mark.parametrize("pooling", POOLINGS)
def test_same_bits_however_it_runs(model, pooling):
    mine = partial(make_embedding, "mine", PROMPT, pooling)

    def run(*requests, **options):
        engine = Collector(make_engine(model, **options))
        engine.run(*requests)
        return engine

    alone = run(mine()).embeddings["mine"]
    assert len(set(alone)) > 32, "a constant proves nothing"

    others = [make_embedding(f"e{i}", prompt(9 + 31 * i, i), POOLINGS[i % 2]) for i in range(6)]
    others += [make_request(f"r{i}", prompt(7 + 23 * i, i), temperature=0.9, seed=i) for i in range(6)]
    assert run(*others[:6], mine(), *others[6:]).embeddings["mine"] == alone
    for budget in (1, 7, 64, 129):
        for ahead in (True, False):
            assert run(mine(), budget=budget, sequences=1, ahead=ahead).embeddings["mine"] == alone

    cached = run(make_request("first", PROMPT))
    cached.run(mine())
    assert cached.embeddings["mine"] == alone
    assert cached.cached["mine"] == (196 if pooling == "last" else 0)

    crowded = Collector(make_engine(model, blocks=6, model_len=384, budget=25, prefix_cache=False))
    crowded.engine.add(mine())
    for _ in range(3):
        crowded.step()
    crowded.run(make_request("bully", prompt(150, 5), max_tokens=8, priority=-2))
    assert crowded.engine.scheduler.counters.preemptions
    assert crowded.embeddings["mine"] == alone


def test_what_is_no_number_ends_with_an_error(model):
    broken = deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight[3] = float("inf")
    engine = Collector(make_engine(broken))
    engine.run(*(make_embedding(pooling, PROMPT, pooling) for pooling in POOLINGS))
    assert engine.finish == {"last": "error", "mean": "error"}
    assert not engine.embeddings
    assert engine.engine.scheduler.pool.cached == 0
