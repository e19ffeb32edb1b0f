"""The demo model through this engine: its recorded perplexity, and its tokens in any company."""

import math
import re

import pytest
import torch

from penstock.core.plan import BLOCK_TOKENS, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.nn import native
from penstock.nn.batch import Batch
from penstock.nn.loader import load_model
from penstock.service.checkpoint import DEMO
from penstock.text.tokenizer import Tokenizer
from tests.helpers.engines import Collector, make_engine, make_request

WINDOW, STRIDE = 512, 256  # as in the model's card


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model_of_either(request, model):
    if request.param == "float32":
        return model
    if (reason := native.missing()) is not None:
        pytest.skip(f"torch's own ops round differently for few rows and for many: {reason}")
    return load_model(DEMO, torch.device("cpu"), torch.bfloat16)


@torch.inference_mode()
def logprobs(model, cache, tokens: list[int]) -> torch.Tensor:
    """[tokens - 1] log-probability of each token but the first."""
    blocks = tuple(range(-(-len(tokens) // BLOCK_TOKENS)))
    step = SequenceStep("r", 0, tokens, blocks, 1, SamplingParams(), 0)
    rows = model.logits(model(Batch([step], model.device), cache))[:-1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("kv_cache_dtype", "within"), [("auto", 1e-3), ("int8", 5e-3), ("fp8", 5e-3)])
def test_the_recorded_perplexity_is_what_this_engine_computes(model, kv_cache_dtype, within, monkeypatch):
    monkeypatch.setattr(model, "graph_mode", "eager" if kv_cache_dtype == "fp8" else "auto")  # no kernel reads fp8
    recorded = float(re.search(r"perplexity per token \| \*\*([\d.]+)\*\*", (DEMO / "README.md").read_text()).group(1))
    tokenizer = Tokenizer(DEMO)
    text = "<|endoftext|>" + (DEMO / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False)
    layout = make_layout(model.config, model.dtype, "block", "", kv_cache_dtype)
    cache = KVCache.on_device(layout, WINDOW // BLOCK_TOKENS, model.device).layers
    total, scored = 0.0, 1  # every token but the first, in the first window that holds it
    for start in range(0, len(ids), STRIDE):
        window = ids[start : start + WINDOW]
        if start + len(window) <= scored:
            break
        fresh = logprobs(model, cache, window)[scored - start - 1 :]
        total -= float(fresh.sum())
        scored += len(fresh)
    assert scored == len(ids)
    assert math.exp(total / (scored - 1)) == pytest.approx(recorded, rel=within)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "seeded"])
def test_many_texts_alone_together_and_in_pieces(model_of_either, params):
    model = model_of_either
    tokenizer = Tokenizer(DEMO)
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False)
    requests = [
        make_request(f"r{i}", ids[i * 300 : i * 300 + 20 + 7 * i], seed=i, max_tokens=64, **params) for i in range(32)
    ]
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= Collector(make_engine(model)).run(request)
    for budget, sequences, blocks in ((512, 32, 256), (32, 32, 256), (100, 5, 24)):
        engine = make_engine(model, budget=budget, sequences=sequences, blocks=blocks)
        assert Collector(engine).run(*requests) == alone
