"""A request's tokens do not depend on what it is batched with, how it is chunked, how often it was interrupted, or on
whether steps are scheduled while others run."""

import random
from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

from penstock.kv.groups import WHOLE
from penstock.nn import loader, native, triton
from penstock.nn.formats import AT_LOAD
from penstock.nn.loader import load_model
from penstock.nn.methods import PLAIN
from penstock.nn.ops import OPS, sdpa
from tests.helpers import engines
from tests.helpers.checkpoints import ARCHITECTURES, write_checkpoint
from tests.helpers.engines import Collector, make_request
from tests.helpers.pairs import pairwise
from tests.helpers.proposers import guessing, heads

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
VARIANTS = {"greedy": {}, "seeded": SAMPLED, "top-k": {"temperature": 1.1, "top_k": 20, "min_p": 0.01}}


ELSEWHERE = ("qwen3", "mistral-window")  # run in every address mode, order and kernels, the others in the default one
DEFAULT = ("contiguous", "block", "short", "ahead", "auto", "auto")


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """In float32, or as its name says after a colon: in bfloat16, which needs our kernels, perhaps quantised, or on
    torch's own ops; or with a draft head."""
    pytest.importorskip("transformers")
    name, _, kind = request.param.partition(":")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    narrow = kind == "bfloat16" or kind in AT_LOAD
    kernels = native if device.type == "cpu" else triton
    if narrow and (reason := kernels.missing()) is not None:
        pytest.skip(f"rounds differently for few rows and for many: {reason}")
    further = kind == "mtp"
    folder, dtype = write_checkpoint(tmp_path_factory.mktemp("model"), name, further=further), torch.float32
    with ExitStack() as stack:
        if kind == "torch":
            stack.enter_context(mock.patch.object(loader, "method_for", return_value=PLAIN))
            for op in OPS.values():
                stack.enter_context(op.using(next(b.name for b in op.backends if b.name != "native")))
        asked = kind if kind in AT_LOAD else None
        dtype = torch.bfloat16 if narrow else dtype
        model = load_model(folder, device, dtype, quantization=asked, draft_head=further)
        model.bound_logits(0)  # few rows, where it can choose for all, have their tokens without logits
        yield model


@pytest.fixture
def make_engine(request, monkeypatch):
    """With blocks addressed and laid out as asked; "long" has decoding sequences computed as torch's own ops compute
    long ones, "ahead" schedules a step while another one runs, "eager" computes op by op, and "int8" stores KV so."""
    mode, order, length, scheduling, graph, kv = request.param
    if length == "long":
        monkeypatch.setattr(sdpa, "ALONE", 0)
    how = {"address_mode": mode, "order": order, "ahead": scheduling == "ahead", "kv_cache_dtype": kv}
    return partial(engines.make_engine, **how, graph_mode=graph)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 320) for _ in range(length)]


PROMPT = prompt(200, 1)


MODES, ORDERS, AHEAD, KV = ("contiguous", "table"), ("block", "token"), ("ahead", "in-turn"), ("auto", "int8")
ON_KERNELS = (MODES, ORDERS, ("short",), AHEAD, ("auto", "partial", "eager"), KV)
ON_TORCH = (MODES, ORDERS, ("short", "long"), AHEAD, ("auto",), KV)
BFLOAT16 = [f"{name}:bfloat16" for name in ELSEWHERE]
LATENT = ("deepseek-v3", "deepseek-v3:bfloat16", "deepseek-v3:mtp")
EVERYWHERE = [
    ((*ELSEWHERE, *BFLOAT16), ON_KERNELS),
    ([f"{name}:torch" for name in ELSEWHERE], ON_TORCH),
    (LATENT, (MODES, ORDERS, ("short",), AHEAD, ("auto",), KV)),
]


def cases():
    """(model, how it runs, variant), and whether it is one of the few that run with the others: the rest is slow."""
    names = [*ARCHITECTURES, *BFLOAT16, "qwen3-moe:bfloat16"]
    for (i, name), variant in product(enumerate(names), VARIANTS):
        quick = name.partition(":")[0] in ELSEWHERE or variant == list(VARIANTS)[i % len(VARIANTS)]
        yield name, DEFAULT, variant, quick
    for models, how in EVERYWHERE:
        few = pairwise(models, *how)
        for name, *how_it_runs in product(models, *how):
            if tuple(how_it_runs) != DEFAULT or name.endswith(":torch"):
                yield name, tuple(how_it_runs), "seeded", (name, *how_it_runs) in few

    for name in AT_LOAD:
        yield f"qwen3:{name}", DEFAULT, "greedy", name in ("int8", "hqq3")


def parameter(name, how, variant, quick):
    return pytest.param(
        name, how, variant, id=f"{name}-{'-'.join(how)}-{variant}", marks=[] if quick else pytest.mark.slow
    )


@pytest.mark.parametrize(
    ("model", "make_engine", "variant"),
    [parameter(*case) for case in cases()],
    indirect=["model", "make_engine"],
)
def test_same_tokens_however_it_runs(request, model, make_engine, variant):
    if model.device.type == "cuda" and model.dtype == torch.bfloat16:
        asked = request.node.callspec.params
        if (asked["make_engine"], asked["variant"]) != (DEFAULT, "greedy"):
            pytest.skip("each engine's products are measured and its steps captured: half a minute each")

    def mine(**changes):
        return make_request("mine", PROMPT, seed=7, **VARIANTS[variant], **changes)

    alone = Collector(make_engine(model)).run(mine())["mine"]
    assert len(set(alone)) > 3, "a constant text proves nothing"

    others = [make_request(f"r{i}", prompt(7 + 23 * i, i), seed=i, **SAMPLED) for i in range(15)]
    assert Collector(make_engine(model)).run(*others[:8], mine(), *others[8:])["mine"] == alone

    slow = request.node.callspec.params["model"].endswith(":torch")  # 200 steps of a token each take a second there
    for budget in (7, 64, 129) if slow else (1, 7, 64, 129):
        chunked = make_engine(model, budget=budget, sequences=1)
        assert Collector(chunked).run(mine())["mine"] == alone

    assert Collector(make_engine(model, ahead=False)).run(mine())["mine"] == alone

    cached = Collector(make_engine(model))
    cached.run(make_request("first", PROMPT))
    turn = make_request("turn", [*PROMPT, *cached.tokens["first"], 5, 6], seed=7, max_tokens=8, **VARIANTS[variant])
    again = Collector(make_engine(model, prefix_cache=False)).run(turn)["turn"]
    assert cached.run(turn)["turn"] == again
    assert cached.run(mine())["mine"] == alone
    ends_inside = cached.engine.scheduler.kv.windows == WHOLE
    assert (cached.cached["turn"], cached.cached["mine"]) == ((223, 196) if ends_inside else (192, 192))

    # drafts that are right, wrong, or now and then wrong; of the others all are wrong
    known = [*PROMPT, *alone]
    for wrong, most in ((0.0, 3), (0.3, 7), (1.0, 1)):
        drafted = make_engine(model, speculation=guessing(lambda t, n: known[len(t) : len(t) + n], wrong, most))
        assert Collector(drafted).run(*others[:3], mine(), *others[3:6])["mine"] == alone
        counters = drafted.scheduler.speculation.counters
        assert (counters.accepted_tokens > 5) == (wrong < 1.0), "of the wrong ones chance makes few right"
        assert counters.draft_tokens > counters.accepted_tokens

    if model.draft_head is not None:
        for count, budget in ((1, 50), (3, 512)):
            drafted = Collector(make_engine(model, budget=budget, speculation=heads(count)))
            assert drafted.run(*others[:3], mine(), *others[3:6])["mine"] == alone
            assert drafted.run(turn)["turn"] == again
            assert drafted.engine.scheduler.speculation.counters.drafts > 10
    for prefix_cache in (True, False):
        drafts = None if model.draft_head is None else heads(2)
        assert preempted(make_engine, model, mine, prefix_cache, drafts) == alone


def preempted(make_engine, model, mine, prefix_cache, drafts):
    """Tokens of a request that was thrown out while decoding and came back."""
    how = {"blocks": 8, "model_len": 512, "prefix_cache": prefix_cache, "speculation": drafts}
    crowded = Collector(make_engine(model, **how))
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
