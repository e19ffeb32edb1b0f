"""A request's tokens do not depend on what it is batched with, how it is chunked, how often it was interrupted, or on
whether steps are scheduled while others run."""

import random
from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

from penstock.nn import loader, native
from penstock.nn.loader import load_model
from penstock.nn.ops import OPS, sdpa
from tests.helpers import engines
from tests.helpers.checkpoints import ARCHITECTURES, write_checkpoint
from tests.helpers.engines import Collector, make_request

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
VARIANTS = {"greedy": {}, "seeded": SAMPLED, "top-k": {"temperature": 1.1, "top_k": 20, "min_p": 0.01}}


ELSEWHERE = ("qwen3", "mistral-window")  # run in every address mode, order and kernels, the others in the default one
DEFAULT = ("contiguous", "block", "short", "ahead", "auto")


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """In float32, or as its name says after a colon: in bfloat16, which needs our kernels, or on torch's own ops."""
    pytest.importorskip("transformers")
    name, _, kind = request.param.partition(":")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "bfloat16" and ((reason := native.missing()) is not None or device.type != "cpu"):
        pytest.skip(f"rounds differently for few rows and for many: {reason or device}")
    folder, dtype = write_checkpoint(tmp_path_factory.mktemp("model"), name), torch.float32
    with ExitStack() as stack:
        if kind == "torch":
            stack.enter_context(mock.patch.object(loader, "packs", return_value=False))
            for op in OPS.values():
                stack.enter_context(op.using(next(b.name for b in op.backends if b.name != "native")))
        model = load_model(folder, device, torch.bfloat16 if kind == "bfloat16" else dtype)
        model.bound_logits(0)  # few rows, where it can choose for all, have their tokens without logits
        yield model


@pytest.fixture
def make_engine(request, model, monkeypatch):
    """With blocks addressed and laid out as asked; "long" has decoding sequences computed as torch's own ops compute
    long ones, "ahead" schedules a step while another one runs, and "eager" computes op by op."""
    mode, order, length, scheduling, graph = request.param
    if length == "long":
        monkeypatch.setattr(sdpa, "ALONE", 0)
    monkeypatch.setattr(model, "graph_mode", graph)
    return partial(engines.make_engine, address_mode=mode, order=order, ahead=scheduling == "ahead")


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 320) for _ in range(length)]


PROMPT = prompt(200, 1)


ADDRESSED = list(product(("contiguous", "table"), ("block", "token")))
AHEAD = ("ahead", "in-turn")
GRAPHS = ("auto", "partial", "eager")
ON_KERNELS = [(*a, "short", ahead, graph) for a, ahead, graph in product(ADDRESSED, AHEAD, GRAPHS)]
ON_TORCH = [(*a, length, ahead, "auto") for a, length, ahead in product(ADDRESSED, ("short", "long"), AHEAD)]
CASES = [
    *product([*ARCHITECTURES, *(f"{name}:bfloat16" for name in ELSEWHERE)], [DEFAULT], VARIANTS),
    *product(ELSEWHERE, [how for how in ON_KERNELS if how != DEFAULT], ["seeded"]),
    *product([f"{name}:torch" for name in ELSEWHERE], ON_TORCH, ["seeded"]),
    *product([f"{name}:bfloat16" for name in ELSEWHERE], [how for how in ON_KERNELS if how != DEFAULT], ["seeded"]),
]


@pytest.mark.parametrize(
    ("model", "make_engine", "variant"),
    [pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}-{case[2]}") for case in CASES],
    indirect=["model", "make_engine"],
)
def test_same_tokens_however_it_runs(model, make_engine, variant):
    def mine(**changes):
        return make_request("mine", PROMPT, seed=7, **VARIANTS[variant], **changes)

    alone = Collector(make_engine(model)).run(mine())["mine"]
    assert len(set(alone)) > 3, "a constant text proves nothing"

    others = [make_request(f"r{i}", prompt(7 + 23 * i, i), seed=i, **SAMPLED) for i in range(15)]
    assert Collector(make_engine(model)).run(*others[:8], mine(), *others[8:])["mine"] == alone

    for budget in (1, 7, 64, 129):
        chunked = make_engine(model, budget=budget, sequences=1)
        assert Collector(chunked).run(mine())["mine"] == alone

    assert Collector(engines.make_engine(model, ahead=False)).run(mine())["mine"] == alone

    cached = Collector(make_engine(model))
    cached.run(make_request("first", PROMPT))
    assert cached.run(mine())["mine"] == alone
    assert cached.cached["mine"] == 192

    for prefix_cache in (True, False):
        assert preempted(make_engine, model, mine, prefix_cache) == alone


def preempted(make_engine, model, mine, prefix_cache):
    """Tokens of a request that was thrown out while decoding and came back."""
    crowded = Collector(make_engine(model, blocks=8, model_len=512, prefix_cache=prefix_cache))
    for i in range(2):
        crowded.engine.add(make_request(f"urgent{i}", prompt(100, i), max_tokens=120, priority=-1))
    crowded.engine.add(mine())
    for _ in range(10):
        crowded.step()
    assert 0 < len(crowded.tokens["mine"]) < 24
    before = crowded.engine.scheduler.counters.preemptions
    crowded.engine.add(make_request("bully", prompt(150, 5), max_tokens=8, priority=-2))
    while crowded.engine.scheduler.counters.preemptions == before:  # it waits for the steps in flight
        crowded.step()
    return crowded.run()["mine"]
