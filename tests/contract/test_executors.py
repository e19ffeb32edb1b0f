"""Every executor brings the same results of the same plans, in order, whatever it computes them with; and says so when
a worker has failed."""

import json
import os
import signal
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

import penstock.engine.loop
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, RankFailed
from penstock.core.plan import Branches, Encode, SequenceStep, StepPlan, TailCopy
from penstock.core.request import MediaSpan
from penstock.core.sampling import SamplingParams
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.executor import processes
from penstock.engine.executor.plans import PlanDecoder, encode_plan
from penstock.engine.server import stats_of
from penstock.nn import native
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector, make_request

together = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
EXECUTORS = {
    "in turn": {"async_scheduling": False},
    "thread": {},
    "processes": {"tensor_parallel_size": 2, "load_format": "sequential"},
    "processes in turn": {"tensor_parallel_size": 2, "async_scheduling": False},
    "stages": {"pipeline_parallel_size": 2},
    "stages of shards": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
SPECIAL = {
    "greedy": {"max_tokens": 30},
    "stop": {"stop_ids": range(0, 320, 9), "max_tokens": 40},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "max_tokens": 20},
    "sampled": {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "max_tokens": 20},
    "least": {"min_tokens": 7, "stop_ids": range(0, 320, 5), "max_tokens": 20},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 10},
    "bias": {"logit_bias": {7: 5.0, 9: -100.0}, "allowed_token_ids": tuple(range(5, 200)), "max_tokens": 10},
    "beams": {"n": 2, "use_beam_search": True, "max_tokens": 8},
    "beams of some": {
        **{"n": 3, "use_beam_search": True, "max_tokens": 9, "early_stopping": "never"},
        **{"allowed_token_ids": tuple(range(0, 200, 3)), "min_tokens": 4, "stop_ids": range(0, 320, 9)},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama-bias", dtype=torch.float32)


def build(folder, **options):
    threads = native.threads()
    try:
        return build_engine(
            EngineOptions(model=str(folder), device="cpu", kv_cache_memory=16 << 20, max_num_seqs=8, **options),
            SystemClock(),
        )
    finally:
        native.set_threads(threads)


def answers(built):
    requests = [
        make_request(f"{name}{i}", [(7 * i + k) % 300 + 1 for k in range(30 + 70 * i)], seed=i, **special)
        for i in range(2)
        for name, special in SPECIAL.items()
    ]
    collector = Collector(built.engine)
    collector.run(*requests)
    built.engine.settle()
    assert built.engine.scheduler.pool.used == 0
    return {r.id: (collector.tokens.get(r.id), collector.finish[r.id]) for r in requests}


@together
def test_every_executor_brings_the_same_results_in_order(folder):
    """Also of two steps of one sequence, the second of which reads what the first has drawn."""
    params = SamplingParams(temperature=0.0)
    plans = [
        StepPlan((SequenceStep("a", 0, [1, 2, 3], (0,), 1, params, 0),), (0,)),
        StepPlan((SequenceStep("a", 3, [-1], (0,), 1, params, 0),)),
    ]
    found, drawn, blocks = {}, {}, set()
    for name, options in EXECUTORS.items():
        with closing(build(folder, max_num_batched_tokens=70, **options)) as built:
            blocks.add(stats_of(built.engine).num_blocks)
            executor = built.engine.executor
            last = plans[1]
            if built.engine.scheduler.stages == 1:
                pending = [executor.launch(plan) for plan in plans]
                ran = [one.result() for one in pending]
                assert ran[0].ended <= ran[1].began
            else:  # whose first has no token that the last has not told of
                pending = [executor.launch(plans[0])]
                ran = [pending[0].result()]
                ((token,),) = ran[0].result.tokens
                last = StepPlan((replace(plans[1].sequences[0], tokens=[token]),))
                pending += [executor.launch(last), executor.launch(last)]
                ran += [one.result() for one in pending[1:]]
                assert ran[1].result.tokens == ran.pop().result.tokens
            assert all(one.done() for one in pending)
            assert ran[0].began <= ran[0].ended
            assert ran[1].began <= ran[1].ended
            executor.settle()
            executor.expect_alive()
            executor.check()
            drawn[name] = [one.result.tokens for one in ran]
            stopped = executor.launch(last, stoppable=True)
            can_stop = stopped.stop()
            assert stopped.result().result.interrupted in {False, can_stop}
            assert can_stop == (name == "thread"), "ranks would wait for each other"
            found[name] = answers(built)
    assert all(tokens == drawn["in turn"] for tokens in drawn.values()), drawn
    assert len(blocks) == 1, "ranks have the same blocks, of which each has its part"
    assert all(of_one == found["in turn"] for of_one in found.values()), found


@pytest.mark.slow
@together
def test_what_ranks_have_computed_the_next_ones_find_in_a_store(folder, tmp_path, monkeypatch):
    """Beside a disk, which keeps copies of the same blocks; other ranks, or one alone, find nothing of it."""
    monkeypatch.setattr(penstock.engine.loop, "ANSWERS_IN", 60.0)
    monkeypatch.setattr(penstock.engine.loop, "GRACE", 60.0)
    (tmp_path / "store").mkdir()
    store, disk = f"file://{tmp_path}/store?timeout=20", {"disk_cache": str(tmp_path / "disk")}
    ranks = {"tensor_parallel_size": 2, "remote_cache": store}
    prompts = [[(7 * i + 11 * k) % 300 + 1 for k in range(250)] for i in range(3)]
    found = []
    for options in (ranks | disk, ranks, {"remote_cache": store}):
        with closing(build(folder, **options)) as built:
            collector = Collector(built.engine)
            for i, prompt in enumerate(prompts):
                collector.run(make_request(f"{i}", prompt, max_tokens=12))
            built.engine.settle()
            built.engine.move()
            built.engine.check()
            said = {tier.name: tier.hit_tokens for tier in stats_of(built.engine).tiers}
            found.append((collector.tokens, [collector.cached[f"{i}"] for i in range(3)], said))
    (first, nothing, both), (second, cached, remote), (_, other, alone) = found
    assert second == first
    assert nothing == other == [0, 0, 0]
    assert cached == [192, 192, 192]
    assert (both, remote, alone) == ({"disk": 0, "remote": 0}, {"remote": 3 * 192}, {"remote": 0})


@together
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_stages_and_shards_with_experts_bring_what_one_does(tmp_path, name):
    folder = write_checkpoint(tmp_path, name, dtype=torch.float32, further=name == "deepseek-v3")
    found = {}
    for kind in ("in turn", "stages", "processes"):
        with closing(build(folder, **EXECUTORS[kind])) as built:
            found[kind] = answers(built)
    if name == "deepseek-v3":
        config = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})
        for kind in ("processes", "stages"):
            with closing(build(folder, **EXECUTORS[kind], speculative_config=config)) as built:
                found[f"{kind}, drafts"] = answers(built)
                assert built.engine.scheduler.speculation.counters.drafts
        with pytest.raises(ConfigError, match="pipeline-parallel-size 3 leaves the last stage the head alone"):
            build(folder, pipeline_parallel_size=3, speculative_config=config)
    assert all(of_one == found["in turn"] for of_one in found.values()), found


def in_time(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def others_of(built):
    return built.engine.executor._others


SIZES = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@together
@pytest.mark.parametrize("sizes", SIZES, ids=["shards", "stages"])
def test_a_killed_rank_is_named(folder, sizes):
    """Where nothing runs, and in the midst of a step; then nothing more can be launched, and closing does not wait."""
    with closing(build(folder, **sizes)) as built:
        (rank,) = others_of(built).others
        collector = Collector(built.engine)
        collector.run(make_request("a", [1, 2, 3], max_tokens=3))
        os.kill(rank.process.pid, signal.SIGKILL)
        in_time(lambda: others_of(built).failure is not None)
        says = rf"rank 1 \(process {rank.process.pid}\) was killed by SIGKILL"
        with pytest.raises(RankFailed, match=says):
            built.engine.executor.expect_alive()
        built.engine.add(make_request("b", [1, 2, 3]))
        with pytest.raises(RankFailed, match=says):
            built.engine.step()


@together
@pytest.mark.parametrize("sizes", SIZES, ids=["shards", "stages"])
def test_a_rank_that_stands_still_is_named(folder, monkeypatch, sizes):
    with closing(build(folder, **sizes)) as built:
        monkeypatch.setattr(processes, "LOOK", 0.05)
        (rank,) = others_of(built).others
        os.kill(rank.process.pid, signal.SIGSTOP)
        built.engine.add(make_request("a", [1, 2, 3]))
        with pytest.raises(RankFailed, match=rf"rank 1 \(process {rank.process.pid}\) stands still"):
            built.engine.step()
    assert rank.process.returncode == -signal.SIGKILL, "closing the engine ends it"


@together
@pytest.mark.parametrize("sizes", SIZES, ids=["shards", "stages"])
def test_a_rank_that_answers_faster_than_its_clock_ticks_stands_not_still(folder, monkeypatch, sizes):
    with closing(build(folder, **sizes)) as built:
        monkeypatch.setattr(processes, "LOOK", 600.0)
        monkeypatch.setattr(processes.Rank, "processor_time", lambda rank: 7)
        collector = Collector(built.engine)
        collector.run(*(make_request(f"{i}", [1, 2, 3], max_tokens=30) for i in range(4)))
        others_of(built).expect_alive()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"tensor_parallel_size": 3},
            "tensor-parallel-size: 3, allowed is what divides the model's num_attention_heads, 4",
        ),
        ({"pipeline_parallel_size": 9}, "pipeline-parallel-size: 9, allowed is at most the model's num_hidden_layers"),
        ({"tensor_parallel_size": 0}, "tensor-parallel-size: 0, allowed is 1 to 64"),
        ({"tensor_parallel_size": 2, "kv_address_mode": "contiguous"}, "contiguous is not supported"),
        ({"tensor_parallel_size": 2, "host_cache_memory": 1 << 20}, "host-cache-memory"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, options, says):
    with pytest.raises(ConfigError, match=says):
        build(folder, **options)


def test_plans_arrive_as_they_were():
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.5}, allowed_token_ids=[1, 2], stop=["x"], seed=1 << 40)
    whole = SequenceStep(
        request_id="a",
        start=100,
        tokens=[5, -1],
        blocks=[4, 1],
        sample=2,
        params=params,
        seed=(1 << 62) + 1,
        generated=[1, 2, -1],
        prompt=[6, 5],
        ahead=[9],
        stop_ids=frozenset({3}),
        bad_words=[(1, 2), (3,)],
        targets=[8],
        candidates=4,
        branches=Branches([[0, 1], [1, 1]], 3, [7, 8], [[5, 6], [5, 7]]),
        pool="mean",
        following=7,
        proposes=3,
        media=[MediaSpan(100, 2, b"digest")],
    )
    others = replace(whole, request_id="b", generated=None, branches=None)
    encodes = (Encode("a", MediaSpan(100, 2, b"digest"), bytes(12)), Encode("b", MediaSpan(1, 2, b""), b"", b"made"))
    plan = StepPlan((whole, others), (4,), ("c",), (TailCopy(1, 4, 20),), encodes=encodes, forgotten=(b"gone",))
    decode = PlanDecoder()
    for _ in range(2):  # the second time parameters are known
        arrived = decode(encode_plan(plan))
        assert arrived.fresh_blocks == (4,)
        assert arrived.released == ("c",)
        assert arrived.copies == (TailCopy(1, 4, 20),)
        assert (arrived.encodes, arrived.forgotten) == (encodes, (b"gone",))
        for mine, theirs in zip(plan.sequences, arrived.sequences, strict=True):
            for name in SequenceStep.__dataclass_fields__:
                assert getattr(theirs, name) == getattr(mine, name), name
