"""Prefixes that end inside a block, with real kernels: what is new is computed, and nobody's tokens differ."""

from itertools import product

import pytest
import torch

from penstock.core.plan import BLOCK_TOKENS, StepPlan, TailCopy
from penstock.engine.cache import KVCache, as_layers, make_layout
from tests.helpers.engines import Collector, make_embedding, make_engine, make_request

PROMPT = [i * 7 % 300 + 1 for i in range(100)]


@pytest.mark.parametrize(("mode", "kv"), [*product(("contiguous", "table"), ("auto", "int8"))])
def test_the_next_turns_compute_only_what_is_new(model, mode, kv):
    """The first goes on where the last one ended, and the second, at the same time, in a copy of that."""
    collector = Collector(make_engine(model, address_mode=mode, kv_cache_dtype=kv))
    collector.engine.executor.worker.cache.blocks.fill_(255)  # as every dtype has them, NaNs
    collector.run(make_request("first", PROMPT, max_tokens=10))
    said = [*PROMPT, *collector.tokens["first"]]
    turns = [make_request(name, [*said, *own], max_tokens=30) for name, own in (("a", [5, 6, 7]), ("b", [8] * 9))]
    fork = make_request("fork", [*PROMPT[:90], *[9] * 50], max_tokens=30)
    before = collector.engine.scheduler.counters.prompt_tokens
    collector.run(*turns, fork)
    assert collector.engine.scheduler.counters.prompt_tokens - before == 4 + 10 + 52
    assert [collector.cached[name] for name in ("a", "b", "fork")] == [109, 109, 88]
    alone = Collector(make_engine(model, address_mode=mode, kv_cache_dtype=kv, prefix_cache=False)).run(*turns, fork)
    assert {name: collector.tokens[name] for name in alone} == alone
    assert collector.engine.scheduler.pool.used == 0


def test_a_text_that_is_embedded_again_is_found_as_far_as_it_may_be(model):
    collector = Collector(make_engine(model))
    how = {"a": "last", "b": "last", "c": "mean"}
    texts = [make_embedding(name, [*PROMPT, *PROMPT[:28]], pooling) for name, pooling in how.items()]
    for text in texts:
        collector.run(text)
    assert collector.embeddings["a"] == collector.embeddings["b"]
    assert [collector.cached[text.id] for text in texts] == [0, 124, 0]


@pytest.mark.parametrize(("order", "kv"), [*product(("block", "token"), ("auto", "int8", "fp8"))])
def test_a_copy_has_these_tokens_and_nothing_behind_them(model, order, kv):
    layout = make_layout(model.config, model.dtype, order, "test", kv)
    memory = torch.randint(1, 120, (4 * layout.block_bytes,), dtype=torch.uint8)
    cache = KVCache(memory.clone(), layout, 4)
    cache.prepare(StepPlan((), (2,), copies=(TailCopy(1, 2, 20), TailCopy(3, 3, 7))))
    same = (1, 2, 20), (3, 3, 7), (0, 0, BLOCK_TOKENS), (1, 1, BLOCK_TOKENS)
    for layer, was in zip(cache.layers, as_layers(memory, layout), strict=True):
        kept = [(layer.values, was.values)] + ([] if was.scales is None else [(layer.scales, was.scales)])
        for (now, before), (source, target, tokens) in product(kept, same):
            assert torch.equal(now[target, :, :, :tokens].float(), before[source, :, :, :tokens].float())
            assert not now[target, :, :, tokens:].float().any()
