"""The engine on a real, tiny model: ends, limits, timing, start-up measurements."""

import json
import shutil
from contextlib import closing
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from penstock.core.clock import ManualClock, SystemClock
from penstock.core.errors import ConfigError
from penstock.core.layout import windows_of
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.cache import make_layout
from penstock.engine.memory import size_cache
from penstock.nn.identity import identity
from penstock.nn.loader import load_model
from penstock.nn.native import missing
from penstock.service.checkpoint import find_checkpoint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector, make_engine, make_request


def test_a_stop_token_ends_the_text_and_is_reported(model):
    free = Collector(make_engine(model)).run(make_request("a", [1, 2, 3]))["a"]
    stop = free[5]
    collector = Collector(make_engine(model))
    tokens = collector.run(make_request("a", [1, 2, 3], stop_ids=[stop]))["a"]
    assert tokens == free[: free.index(stop) + 1]
    assert collector.finish["a"] == "stop"
    assert collector.engine.scheduler.pool.used == 0


def test_length_ends_the_text(model):
    collector = Collector(make_engine(model, model_len=128))
    tokens = collector.run(make_request("a", [1] * 120, max_tokens=3), make_request("b", [1] * 120, max_tokens=100))
    assert (len(tokens["a"]), len(tokens["b"])) == (3, 8)
    assert set(collector.finish.values()) == {"length"}


def test_cancel_gives_everything_back(model):
    collector = Collector(make_engine(model))
    for name in "abc":
        collector.engine.add(make_request(name, [1] * 100, max_tokens=500))
    collector.step()
    collector.engine.cancel(["a", "c", "unknown"])
    collector.engine.check()
    assert collector.engine.scheduler.num_running == 1
    collector.engine.cancel(["b"])
    collector.run()
    assert list(map(len, collector.tokens.values())) == [1, 1, 1], "tokens came after the end"
    assert collector.engine.scheduler.pool.used == 0


def test_logprobs_come_with_every_token(model):
    collector = Collector(make_engine(model))
    collector.run(make_request("a", [1, 2], logprobs=2, max_tokens=5), make_request("b", [1, 2], max_tokens=5))
    assert [len(r.top) for r in collector.logprobs["a"]] == [2] * 5
    assert all(r.rank == 1 and r.chosen == r.top[0][1] for r in collector.logprobs["a"])
    assert collector.logprobs["b"] == []


def test_logprobs_of_named_tokens_are_those_of_the_vocabulary(model):
    collector = Collector(make_engine(model))
    named = (7, 2, 9)
    collector.run(
        make_request("all", [1, 2], logprobs=-1, max_tokens=5),
        make_request("named", [1, 2], logprobs=0, logprob_token_ids=named, max_tokens=5),
    )
    assert collector.tokens["named"] == collector.tokens["all"]
    for token, some, every in zip(
        collector.tokens["named"], collector.logprobs["named"], collector.logprobs["all"], strict=True
    ):
        assert (some.chosen, some.rank) == (every.chosen, every.rank)
        wanted = {other: logprob for other, logprob in every.top if other in {token, *named}}
        assert dict(some.top) == pytest.approx(wanted, abs=1e-6)
        assert len(some.top) == len({token, *named})
        assert [logprob for _, logprob in some.top] == sorted((value for _, value in some.top), reverse=True)


def test_what_an_earlier_owner_left_in_a_block_reaches_nobody(model):
    engine = make_engine(model, blocks=16, prefix_cache=False)
    engine.executor.worker.cache.blocks.fill_(255)  # as every dtype has them, NaNs
    a = Collector(engine).run(make_request("a", [1] * 70), make_request("b", [2] * 10))
    clean = Collector(make_engine(model)).run(make_request("a", [1] * 70), make_request("b", [2] * 10))
    assert a == clean


@pytest.mark.parametrize(("budget", "kv"), [(512, "auto"), (64, "auto"), (64, "int8")])
def test_rows_that_are_no_numbers_end_their_request_and_reach_nobody(checkpoint, budget, kv):
    model = load_model(checkpoint, torch.device("cpu"))
    model.model.embed_tokens.weight[300] = float("inf")
    shared = [i % 290 + 1 for i in range(130)]
    clean = Collector(make_engine(model, budget=budget, kv_cache_dtype=kv)).run(make_request("b", [*shared, 7, 8]))["b"]
    collector = Collector(make_engine(model, budget=budget, kv_cache_dtype=kv))
    collector.run(make_request("bad", [*shared, 300, 5]), make_request("beside", [1, 2, 3]))
    assert collector.finish == {"bad": "error", "beside": "length"}
    assert collector.tokens["bad"] == []
    assert collector.run(make_request("b", [*shared, 7, 8]))["b"] == clean
    assert collector.engine.scheduler.pool.used == 0


class SlowRunner:
    """Takes a second of a manual clock per step."""

    def __init__(self, runner, clock):
        self.runner, self.clock = runner, clock

    def prepare(self, plan):
        pass

    def run(self, plan):
        self.clock.advance(1.0)
        return self.runner.run(plan)


@pytest.mark.parametrize("ahead", [True, False])
def test_timing_of_a_finished_request(model, ahead):
    engine = make_engine(model, budget=64, sequences=1, ahead=ahead)
    clock = ManualClock()
    executor = engine.executor
    engine._clock = executor._clock = clock
    executor.worker = SlowRunner(executor.worker, clock)
    engine.add(make_request("first", [1] * 10, max_tokens=2))
    engine.add(make_request("second", [1] * 100, max_tokens=3))
    timing = {}
    while engine.has_work:
        timing |= {o.request_id: o.timing for o in engine.step()[0] if o.timing}
    assert (timing["first"].queue, timing["first"].prefill, timing["first"].decode) == (0, 1, 1)
    assert (timing["second"].queue, timing["second"].prefill, timing["second"].decode) == (2, 2, 2)


class Traced:
    """What runs in which order, and what the loop has reported by then."""

    def __init__(self, runner, reported):
        self.runner, self.reported, self.began = runner, reported, []

    def prepare(self, plan):
        self.runner.prepare(plan)

    def run(self, plan):
        self.began.append((plan.num_tokens, len(self.reported)))
        return self.runner.run(plan)


def test_a_step_begins_before_the_last_one_is_reported(model):
    engine = make_engine(model)
    reported = []
    runner = engine.executor.worker = Traced(engine.executor.worker, reported)
    engine.add(make_request("a", [1] * 10, max_tokens=8))
    while engine.has_work:
        outputs, _ = engine.step()
        engine.settle()
        reported += outputs
    assert runner.began == [(10, 0), (1, 0), *((1, i) for i in range(1, 7))]
    assert engine.busy > 0


SPECIAL = {
    "stop": {"stop_ids": range(0, 320, 9), "max_tokens": 60},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "max_tokens": 40},
    "sampled": {"temperature": 1.2, "top_p": 0.9, "max_tokens": 40},
    "least": {"min_tokens": 7, "stop_ids": range(0, 320, 5), "max_tokens": 60},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 20},
    "length": {"max_tokens": 500},
}


@pytest.mark.parametrize("mode", ["contiguous", "table"])
@pytest.mark.parametrize("blocks", [64, 9, 7])
def test_scheduling_ahead_changes_nothing_but_when(model, mode, blocks):
    """Also where there is hardly room, and some leave while a step computes them."""

    def answers(ahead, requests):
        limits = {"blocks": blocks, "model_len": 400, "budget": 70, "sequences": 6}
        collector = Collector(make_engine(model, address_mode=mode, ahead=ahead, **limits))
        for i, request in enumerate(requests):
            collector.engine.add(request)
            collector.engine.add(make_request(f"leaves{i}", [i + 1] * 90, max_tokens=50, priority=i % 2))
            for _ in range(1 + i % 3):
                collector.step()
            collector.engine.cancel([f"leaves{i}"])
        collector.run()
        assert collector.engine.scheduler.pool.used == 0
        return {r.id: (collector.tokens[r.id], collector.finish[r.id], len(collector.logprobs[r.id])) for r in requests}

    bad_word = replace(make_request("bad words", [5] * 40, max_tokens=30), bad_words=((212,), (7, 9)))
    requests = [bad_word] + [
        make_request(f"{name}{i}", [(7 * i + k) % 300 + 1 for k in range(30 + 40 * i)], seed=i, priority=i, **special)
        for i in range(2)
        for name, special in SPECIAL.items()
    ]
    ahead = answers(True, requests)
    assert ahead == answers(False, requests)
    assert {finish for _, finish, _ in ahead.values()} == {"stop", "length"}


def test_a_runner_that_fails_once_has_cost_nothing_but_time(model):
    collector = Collector(make_engine(model))
    runner, failed = collector.engine.executor.worker.run, []

    def fail_once(plan):
        if not failed and plan.sequences[0].start > 12:
            failed.append(plan)
            raise MemoryError
        return runner(plan)

    collector.engine.executor.worker.run = fail_once
    with pytest.raises(MemoryError):
        collector.run(make_request("a", [1] * 10), make_request("b", [2] * 10))
    collector.run()
    assert collector.tokens == Collector(make_engine(model)).run(
        make_request("a", [1] * 10), make_request("b", [2] * 10)
    )


@pytest.mark.parametrize(("asked", "most"), [(None, 512), (100.0, 128)])
def test_a_step_on_a_cpu_may_take_half_a_second(checkpoint, asked, most):
    options = EngineOptions(model=str(checkpoint), device="cpu", max_num_seqs=64, step_time_limit_ms=asked)
    built = build_engine(options, SystemClock())
    budget = built.engine._budget
    while (tokens := budget.tokens) < 1024 and budget.ran(tokens, tokens * 0.9e-3):  # a millisecond a token, nearly
        pass
    assert most / 2 <= tokens <= most
    built.close()


def test_build_sizes_and_finds_its_budget(checkpoint):
    built = build_engine(EngineOptions(model=str(checkpoint), max_num_seqs=8, device="cpu"), SystemClock())
    engine, runner = built.engine, built.runner
    limits = engine.scheduler.limits
    assert limits.max_model_len == 1024
    assert limits.token_budget == 64
    assert engine.scheduler.pool.num_blocks == len(runner.cache.blocks) == 8 * 16
    Collector(engine).run(make_request("a", [1] * 600))
    assert 8 <= engine.scheduler.limits.token_budget <= 1024


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_int8_kv_takes_the_bytes_of_its_values_and_scales(checkpoint, dtype, width):
    """And nothing computed with other KV is taken for its own."""
    options = EngineOptions(model=str(checkpoint), dtype=dtype, max_num_seqs=8, kv_cache_memory=4 << 20)
    whole, packed = (build_engine(replace(options, kv_cache_dtype=kv), SystemClock()) for kv in ("auto", "int8"))
    dim = whole.runner.model.config.head_dim
    assert packed.shape.kv_bytes_per_token == (dim + 4) / (dim * width) * whole.shape.kv_bytes_per_token
    assert packed.layout.block_bytes <= packed.shape.kv_bytes_per_token * 64 + 4095
    assert packed.engine.scheduler.pool.num_blocks == (4 << 20) // packed.layout.block_bytes
    assert packed.engine.scheduler.root != whole.engine.scheduler.root
    assert f"kv_dtype: {dtype} here, int8 there" in whole.layout.difference(packed.layout)
    other = make_layout(whole.runner.model.config, torch.float16, "block", whole.layout.model, "int8")
    assert packed.layout.difference(other) == f"dtype: {dtype} here, float16 there"
    for built in (whole, packed):
        built.close()


@pytest.mark.parametrize(("in_place", "mode"), [(True, "table"), (False, "contiguous")])
def test_ranges_where_attention_gains_by_them(checkpoint, monkeypatch, in_place, mode):
    monkeypatch.setattr("penstock.engine.worker.reads_in_place", lambda device, dtype: in_place)
    built = build_engine(EngineOptions(model=str(checkpoint), max_num_seqs=8, device="cpu"), SystemClock())
    assert built.runner.cache.address_mode == mode
    built.close()


def test_a_checkpoint_is_known_by_what_is_in_it(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "moved")
    assert identity(tmp_path / "moved") == identity(checkpoint)
    model = safetensors.torch.load_file(checkpoint / "model.safetensors")
    model["model.layers.1.self_attn.o_proj.weight"] += 0.01  # trained a little further
    safetensors.torch.save_file(model, tmp_path / "moved" / "model.safetensors")
    assert identity(tmp_path / "moved") != identity(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    shutil.copytree(checkpoint, tmp_path / "turned")
    (tmp_path / "turned" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert identity(tmp_path / "turned") != identity(checkpoint)


def test_engines_that_rotate_otherwise_share_no_kv(tmp_path):
    write_checkpoint(tmp_path, "phi3-longrope", original_max_position_embeddings=128)
    keys, models = set(), set()
    for model_len in (128, 129, None):
        options = EngineOptions(model=str(tmp_path), max_model_len=model_len, kv_cache_memory=16 << 20, max_num_seqs=4)
        with closing(build_engine(options, SystemClock())) as built:
            keys.add(built.engine.scheduler.root)
            models.add(built.layout.model)
    assert len(keys) == len(models) == 2
    assert models == {f"{identity(tmp_path)}-{name}" for name in ("short", "long")}


def test_layers_with_and_without_a_window_are_in_no_range(tmp_path):
    way = {"max_num_seqs": 8, "max_model_len": 1024, "device": "cpu"}
    options = EngineOptions(model=str(write_checkpoint(tmp_path, "gemma3")), **way)
    with pytest.raises(ConfigError, match="kv-address-mode: 'contiguous', for a model of which only some layers have"):
        build_engine(replace(options, kv_address_mode="contiguous"), SystemClock())
    with closing(build_engine(options, SystemClock())) as built:
        assert built.runner.cache.address_mode == "table"
        assert windows_of(built.shape.kv_groups) == windows_of(built.layout.groups) == (None, 100, 100)
        scheduler = built.engine.scheduler
        assert scheduler.pool.num_blocks == 8 * 16 * 3, "a step may come to hold a whole sequence"
        assert scheduler.kv.as_whole(scheduler.pool.num_blocks) == 2 * 8 * 16, "a step of 64 tokens holds less"
        for name in "ab":
            Collector(built.engine).run(make_request(name, [i % 300 + 1 for i in range(700)], max_tokens=9))
        assert scheduler.counters.prefix_hits == 640
        assert scheduler.pool.used == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_model_len": 5000}, "max-model-len: 5000, this checkpoint allows 2 to 1024"),
        ({"dtype": "int3"}, "dtype: 'int3', allowed are auto, bfloat16, float16, float32"),
        ({"max_num_seqs": 0}, "max-num-seqs: 0, allowed is 1 to 65536"),
        ({"step_time_limit_ms": -1.0}, "step-time-limit-ms: -1.0, allowed is"),
        ({"kv_address_mode": "flat"}, "kv-address-mode: 'flat', allowed are auto, contiguous, table"),
        ({"kv_cache_dtype": "int4"}, "kv-cache-dtype: 'int4', allowed are auto, int8, fp8, fp8_e4m3"),
        (
            {"kv_cache_dtype": "fp8"},
            "kv-cache-dtype: 'fp8', there are no kernels for it on a CPU, allowed are auto, int8",
        ),
        ({"kv_layout": "head"}, "kv-layout: 'head', allowed are auto, block, token"),
        ({"graph_mode": "some"}, "graph-mode: 'some', allowed are auto, eager, partial, full"),
        ({"graph_mode": "full", "dtype": "float16"}, "graph-mode: 'full' is not to be had, "),
        ({"device": "tpu"}, "device: 'tpu', allowed are cpu, cuda"),
        ({"device": "cuda:9"}, "device: 'cuda:9', this machine has"),
        ({"max_num_batched_tokens": 4}, "max-num-batched-tokens: 4, at least max-num-seqs"),
        ({"kv_cache_memory": 1 << 50}, "kv-cache-memory: 1048576.0 GiB, .* GiB are free"),
        ({"kv_cache_memory": 1000}, "kv-cache-memory: 0.0 MiB, at least one block"),
        ({"kv_cache_memory": 1 << 20, "max_model_len": 1024}, "max-model-len: 1024 tokens need"),
        ({"model": "/nowhere"}, r"/nowhere: no weights"),
    ],
)
def test_bad_options_name_the_flag(checkpoint, changes, says):
    usual = {"model": str(checkpoint), "max_num_seqs": 8, "max_num_batched_tokens": 64, "device": "cpu"}
    with pytest.raises(ConfigError, match=says):
        build_engine(EngineOptions(**usual | changes), SystemClock())


def test_the_smallest_cache_is_one_block(checkpoint):
    options = EngineOptions(model=str(checkpoint), max_num_seqs=1, max_model_len=64)
    assert (
        len(Collector(build_engine(options, SystemClock()).engine).run(make_request("a", [1] * 60, max_tokens=9))["a"])
        == 4
    )


def test_a_length_nobody_asked_for_is_cut_to_what_fits():
    size = {"block_bytes": 1000, "max_sequences": 4, "model_len": 10000}
    assert size_cache(available=20_000, asked_model_len=None, exact=False, **size) == (20, 20 * 64)
    assert size_cache(available=10**9, asked_model_len=None, exact=False, **size) == (4 * 157, 10000)
    assert size_cache(available=10**6, asked_model_len=None, exact=True, **size) == (1000, 10000)


GRAINS = {"aten.index.Tensor": 3000, "aten.cos.default": 2048, "aten.sin.default": 2048}  # what torch computes alone
MOVES_NOTHING = ("empty", "new_empty", "slice", "select", "view", "split", "detach", "alias", "unsqueeze", "expand")


class LargeOps(TorchDispatchMode):
    """Notes the ops that torch would share among its threads."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_flatten((args, result))[0] if isinstance(x, torch.Tensor)]
        name = str(op)
        if name.split(".")[1] not in MOVES_NOTHING and max(sizes, default=0) >= GRAINS.get(name, 32768):
            self.found.add((name, max(sizes)))
        return result


@pytest.mark.skipif(missing() is not None, reason="no kernels")
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_k": 20}], ids=["greedy", "sampled"])
def test_steps_leave_torchs_threads_asleep(params):
    """They would spin for milliseconds, on the cores that kernels compute on."""
    options = EngineOptions(
        model=str(find_checkpoint("demo")), device="cpu", dtype="bfloat16", max_num_batched_tokens=512,
        kv_cache_memory=64 << 20, async_scheduling=False,
    )  # fmt: skip
    built = build_engine(options, SystemClock())
    engine, runner = built.engine, built.runner
    for i in range(64):
        engine.add(make_request(str(i), [i * 7 + k for k in range(1, 60)], max_tokens=20, **params))
    engine.step()  # tables grow
    steps, run = [], runner.run

    def watched(plan):
        with LargeOps() as ops:
            result = run(plan)
        steps.append((plan.num_tokens, len(plan.sequences)))
        assert not ops.found, plan.num_tokens
        return result

    runner.run = watched
    while engine.has_work:
        engine.step()
    assert max(tokens for tokens, _ in steps) == 512
    assert (64, 64) in steps
    built.close()
