"""Several ranks compute what one does, up to rounding; and for a given number of them always the same."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from penstock.core.plan import Split
from penstock.nn import native
from penstock.nn.experts import Experts
from penstock.nn.loader import load_model
from tests.helpers.checkpoints import ARCHITECTURES, write_checkpoint
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.proposers import heads
from tests.helpers.ranks import CPU, load_shards, make_parallel_engine

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")

LONG = [(7 * i) % 300 + 1 for i in range(200)]
KINDS = {
    "greedy": {},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "sampled": {"temperature": 1.1, "top_p": 0.9, "seed": 3},
    "top_k": {"temperature": 0.8, "top_k": 9, "seed": 4},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "beams": {"n": 3, "use_beam_search": True},
}


def requests(max_tokens=12):
    prompts = [LONG[:130], [1, 2, 3], LONG[40:111], LONG, LONG[:64], LONG[20:41]]
    return [
        make_request(name, prompt, max_tokens=max_tokens, **kind)
        for (name, kind), prompt in zip(KINDS.items(), prompts, strict=True)
    ]


def answers(engine, asked):
    collector = Collector(engine)
    found = collector.run(*asked)
    assert engine.scheduler.pool.used == 0
    return found, collector.logprobs.get("logprobs", [])


@pytest.mark.parametrize("mode", ["full", "eager"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_two_ranks_say_what_one_says(tmp_path, name, mode):
    """In float32, where rounding changes no token of these."""
    write_checkpoint(tmp_path, name)
    asked = requests() if mode == "full" else requests()[:2]
    one, of_one = answers(make_engine(load_model(tmp_path, CPU), graph_mode=mode), asked)
    two, of_two = answers(make_parallel_engine(load_shards(tmp_path, 2), graph_mode=mode), asked)
    assert two == one
    for a, b in zip(of_one, of_two, strict=True):
        assert b.chosen == pytest.approx(a.chosen, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "changes"),
    [
        ("llama-multi-head", 4, {}),
        ("qwen3-tied", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}),
        ("qwen2", 4, {}),  # two heads of K and V for four ranks
    ],
)
def test_any_number_of_ranks(tmp_path, name, size, changes):
    write_checkpoint(tmp_path, name, **changes)
    one, _ = answers(make_engine(load_model(tmp_path, CPU)), requests())
    several, _ = answers(make_parallel_engine(load_shards(tmp_path, size)), requests())
    assert several == one


@pytest.mark.parametrize(("name", "size"), [("qwen3-moe", 4), ("qwen3-moe-mixed", 2), ("qwen2-moe", 2), ("mixtral", 4)])
def test_ranks_with_whole_experts_say_what_one_says(tmp_path, name, size):
    """Of 5 to 12 experts, where four ranks have not the same number of them."""
    write_checkpoint(tmp_path, name)
    one, _ = answers(make_engine(load_model(tmp_path, CPU)), requests()[:4])
    shards = load_shards(tmp_path, size, expert_parallel=True)
    several, _ = answers(make_parallel_engine(shards), requests()[:4])
    assert several == one
    counts = [[part.counts for part in shard.modules() if isinstance(part, Experts)] for shard in shards]
    assert all(map(torch.equal, counts[0], counts[1]))
    assert all(each.sum() > 0 for each in counts[0])


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_two_micro_batches_change_no_bit(tmp_path, name):
    """Cut anywhere: between sequences, and inside of a prompt; what one exchanges, the other computes beside."""
    write_checkpoint(tmp_path, name, dtype=torch.bfloat16)
    shards, rng, splits = load_shards(tmp_path, 2, expert_parallel=True), random.Random(4), []

    def cut(plan):
        rows = plan.num_tokens
        if rows < 2:
            return plan
        splits.append(rng.randint(1, rows - 1))
        return replace(plan, split=Split(splits[-1], 1))

    asked = requests()[:-1]  # beams are never split
    whole = answers(make_parallel_engine(shards, budget=150), asked)
    assert answers(make_parallel_engine(shards, budget=150, change=cut), asked) == whole
    assert len(splits) > 10
    assert max(splits) > 64


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_draft_alike_and_what_one_says_stays(tmp_path, expert_parallel):
    write_checkpoint(tmp_path, "deepseek-v3", further=True)
    one, _ = answers(make_engine(load_model(tmp_path, CPU)), requests())
    shards = load_shards(tmp_path, 2, expert_parallel=expert_parallel, draft_head=True)
    engine = make_parallel_engine(shards, speculation=heads(2))
    assert answers(engine, requests())[0] == one
    assert engine.scheduler.speculation.counters.drafts


@pytest.mark.parametrize("bounded", [False, True])
def test_neither_batches_nor_chunks_change_a_token(tmp_path, bounded):
    """To the bit, in bfloat16; also where tokens are told from bounds of logits."""
    write_checkpoint(tmp_path, "qwen3-tied", dtype=torch.bfloat16)
    shards = load_shards(tmp_path, 2)
    if bounded:
        with ThreadPoolExecutor(2) as pool:  # which say to each other whether they can
            list(pool.map(lambda shard: shard.bound_logits(0), shards))
    asked = requests(max_tokens=20)
    together, logprobs = answers(make_parallel_engine(shards), asked)
    assert answers(make_parallel_engine(shards, budget=48, ahead=False), asked) == (together, logprobs)
    for request in asked:
        alone, _ = answers(make_parallel_engine(shards), [request])
        assert alone == {request.id: together[request.id]}
