"""Engines of modelled devices: the text is the one computed offline, whatever happens on the way, or it is another."""

import logging
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.clock import ManualClock
from penstock.core.digest import ModelledSequence, embedding, offline
from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS, SequenceStep, StepPlan, StepResult
from penstock.core.sampling import SamplingParams
from penstock.core.stop import Stop
from penstock.engine.digests import DigestArithmetic
from penstock.engine.executor import InlineExecutor
from penstock.engine.loop import Engine
from penstock.engine.modelled import (
    BLOCK_BYTES,
    ModelledOptions,
    PacedRunner,
    build_modelled,
    ordinary_ids,
)
from penstock.kv.pool import BlockPool
from penstock.sched.local import Limits, Scheduler
from penstock.sched.local.limits import STOPS_IN
from penstock.sched.local.sequence import blocks_for
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service.checkpoint import DEMO
from penstock.text.tokenizer import Tokenizer
from penstock.transfer.memory import PoolMemory
from penstock.transfer.pool import memfd_pool, shared_pool
from tests.helpers.engines import make_embedding, make_request
from tests.helpers.links import pool_server

VOCAB = 300
IDS = range(3, VOCAB)
POSITIONS = 1024
TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def arithmetic():
    return DigestArithmetic(POSITIONS, VOCAB)


def make_runner(memory, clock, sleep=None, **settings):
    return PacedRunner(
        memory,
        TIMES,
        clock,
        device="modelled:h200",
        vocab_size=VOCAB,
        token_ids=IDS,
        positions=POSITIONS,
        rng=random.Random(0),
        sleep=sleep or clock.advance,
        **settings,
    )


def make_engine(*, blocks=64, budget=256, sequences=16, prefix_cache=True):
    memory = PoolMemory.memfd(blocks, BLOCK_BYTES)
    memory.buffer[:] = b"\xa5" * len(memory.buffer)  # what an earlier owner left
    clock = ManualClock()
    limits = Limits(token_budget=budget, max_sequences=sequences, max_model_len=min(POSITIONS, blocks * BLOCK_TOKENS))
    scheduler = Scheduler(limits, BlockPool(range(blocks)), prefix_cache=prefix_cache)
    return Engine(scheduler, InlineExecutor(make_runner(memory, clock), clock), clock)


def run(engine, *requests):
    """{request id: (tokens, finish reason, cached tokens)}"""
    tokens, ends = {r.id: [] for r in requests}, {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step()[0]:
            tokens[output.request_id] += output.tokens
            if output.finish is not None:
                ends[output.request_id] = (output.finish, output.cached_tokens)
        engine.check()
    return {name: (tokens[name], *ends[name]) for name in ends}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_of_the_digests_of_the_whole_prompt(pooling):
    prompt = prompt_of(random.Random(3), 333)
    for budget in (1, 50, 333):
        engine = make_engine(budget=budget, sequences=1)
        engine.add(make_embedding("e", prompt, pooling))
        found = []
        while engine.has_work:
            found += engine.step()[0]
        assert [output.embedding for output in found] == [pytest.approx(embedding(ModelledSequence(prompt).context))]


def expected(request):
    return offline(
        request.prompt,
        max_tokens=request.max_tokens,
        token_ids=IDS,
        seed=None if request.params.greedy else request.seed,
        stop_ids=request.stop_ids,
    )


def prompt_of(rng, length):
    return [rng.randrange(VOCAB) for _ in range(length)]


# --- the arithmetic


@settings(max_examples=60)
@given(st.data())
def test_chunks_in_any_company_are_the_scalar_definition(arithmetic, data):
    """Several sequences, cut anywhere, each step's chunks in one call."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.integers(1, POSITIONS), min_size=1, max_size=5))
    texts = [prompt_of(rng, length) for length in lengths]
    num_blocks = sum(map(blocks_for, lengths))
    ids = rng.sample(range(num_blocks), num_blocks)
    blocks = [[ids.pop() for _ in range(blocks_for(length))] for length in lengths]
    digests = np.full((num_blocks, BLOCK_TOKENS), 0xBAD, dtype=np.uint64)
    scalar = [ModelledSequence() for _ in texts]
    written: list[list[int]] = [[] for _ in texts]
    while any(s.position < len(text) for s, text in zip(scalar, texts, strict=True)):
        steps: list[SequenceStep] = []
        owners: list[int] = []
        for i, (s, text) in enumerate(zip(scalar, texts, strict=True)):
            if s.position < len(text) and (rng.random() < 0.7 or not steps):
                end = s.position + rng.choice([1, 1, rng.randint(1, len(text) - s.position)])
                held = blocks[i][: blocks_for(end)]
                steps.append(SequenceStep(str(i), s.position, text[s.position : end], held, True, GREEDY, 0))
                owners.append(i)
        contexts = arithmetic.run(steps, digests)
        for i, step, context in zip(owners, steps, contexts, strict=True):
            written[i] += scalar[i].extend(step.tokens)
            assert context == scalar[i].context
    for own, values in zip(blocks, written, strict=True):
        assert digests[own].reshape(-1)[: len(values)].tolist() == values


@settings(max_examples=100)
@given(st.integers(1, 700), st.integers(1, 2**64 - 1), st.integers(0, 2**32), st.booleans(), st.data())
def test_one_wrong_digest_anywhere_changes_the_context(arithmetic, length, flip, seed, chunk, data):
    rng = random.Random(seed)
    text = prompt_of(rng, length + (100 if chunk else 1))
    digests = np.zeros((blocks_for(len(text)), BLOCK_TOKENS), dtype=np.uint64)
    blocks = list(range(len(digests)))
    arithmetic.run([SequenceStep("a", 0, text[:length], blocks[: blocks_for(length)], True, GREEDY, 0)], digests)
    after = SequenceStep("a", length, text[length:], blocks, True, GREEDY, 0)
    (right,) = arithmetic.run([after], digests)
    wrong = data.draw(st.integers(0, length - 1))
    digests[divmod(wrong, BLOCK_TOKENS)] ^= np.uint64(flip)
    assert arithmetic.run([after], digests) != [right]


@settings(max_examples=50)
@given(
    st.integers(2, 10), st.sampled_from(["cleared", "swapped", "foreign", "older"]), st.integers(0, 2**32), st.data()
)
def test_a_wrong_block_changes_the_context(arithmetic, count, how, seed, data):
    rng = random.Random(seed)
    i, j = data.draw(st.permutations(range(count)))[:2]
    text, other = (prompt_of(rng, count * BLOCK_TOKENS + 1) for _ in range(2))
    other[j * BLOCK_TOKENS : (j + 1) * BLOCK_TOKENS] = text[j * BLOCK_TOKENS : (j + 1) * BLOCK_TOKENS]
    digests = np.zeros((2 * (count + 1), BLOCK_TOKENS), dtype=np.uint64)
    blocks = list(range(count + 1))
    steps = [SequenceStep("a", 0, text, blocks, True, GREEDY, 0)]
    steps.append(SequenceStep("b", 0, other, [b + count + 1 for b in blocks], True, GREEDY, 0))
    right, _ = arithmetic.run(steps, digests)
    held = list(blocks)
    if how == "cleared":
        digests[i] = 0
    elif how == "swapped":
        held[i], held[j] = held[j], held[i]
    elif how == "foreign":
        held[j] += count + 1  # the very same tokens, after other ones
    else:
        digests[i, rng.randrange(BLOCK_TOKENS) :] = 0  # as it was while it was being filled
    last = SequenceStep("a", count * BLOCK_TOKENS, text[-1:], held, True, GREEDY, 0)
    wrong = arithmetic.run([last], digests)
    # nothing comes before the first block, so there the same tokens are the same block
    assert wrong != [right] or (how == "foreign" and j == 0)


def test_a_wrong_digest_counts_where_a_window_sees_it():
    mixed, length, window = DigestArithmetic(POSITIONS, VOCAB, (None, 100)), 300, 100
    text, blocks = prompt_of(random.Random(0), length + 1), list(range(2 * blocks_for(length + 1)))
    digests = np.full((len(blocks), BLOCK_TOKENS), 0xBAD, dtype=np.uint64)
    mixed.run([SequenceStep("a", 0, text[:length], blocks[: 2 * blocks_for(length)], True, GREEDY, 0)], digests)
    last = SequenceStep("a", length, text[length:], blocks, True, GREEDY, 0)
    right = mixed.run([last], digests)
    assert right == [ModelledSequence(text).context]
    for position in range(length):
        for group, counts in ((0, True), (1, position > length - window)):
            place = 2 * (position // BLOCK_TOKENS) + group, position % BLOCK_TOKENS
            digests[place] ^= np.uint64(12345)
            assert (mixed.run([last], digests) != right) == counts
            digests[place] ^= np.uint64(12345)


# --- through the engine


@pytest.mark.parametrize(
    ("shape", "preempts"),
    [
        ({}, False),
        ({"budget": 16}, False),
        ({"blocks": 12, "sequences": 6}, True),
        ({"blocks": 12, "sequences": 6, "prefix_cache": False}, True),
    ],
)
def test_every_text_is_the_one_computed_offline(shape, preempts):
    rng = random.Random(1)
    shared = prompt_of(rng, 200)
    requests = [
        make_request(
            str(i),
            shared[: rng.randrange(200)] + prompt_of(rng, rng.randint(1, 150)),
            max_tokens=rng.randint(1, 150),
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.getrandbits(63),
            stop_ids=rng.sample(range(VOCAB), 3),
        )
        for i in range(24)
    ]
    engine = make_engine(**shape)
    got = run(engine, *requests)
    for request in requests:
        assert got[request.id][:2] == expected(request), request.id
    assert {finish.value for _, finish, _ in got.values()} == {"stop", "length"}
    assert (engine.scheduler.counters.preemptions > 0) == preempts
    assert engine.scheduler.pool.used == 0


def test_prefix_hits_read_what_others_wrote():
    rng = random.Random(2)
    prompt = prompt_of(rng, 300)
    engine = make_engine()
    first, again = make_request("first", prompt), make_request("again", [*prompt, 7, 8])
    run(engine, first)
    tokens, _, cached = run(engine, again)["again"]
    assert cached == 300
    assert tokens == expected(again)[0]


@pytest.mark.parametrize("victim", range(5))
def test_a_block_that_is_spoiled_meanwhile_changes_the_text(victim):
    request = make_request("a", prompt_of(random.Random(3), 300))
    engine = make_engine()
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step()[0] for token in output.tokens]
        if len(tokens) == 3:
            block = engine.scheduler.sequence("a").blocks[victim]
            engine.executor.worker._digests[block, 11] += np.uint64(1)
    right = expected(request)[0]
    assert tokens[:3] == right[:3]
    assert sum(a == b for a, b in zip(tokens[3:], right[3:], strict=True)) <= 2


def test_logprobs_of_a_model_that_is_sure():
    request = make_request("a", [5, 6], max_tokens=2, logprobs=2)
    engine = make_engine()
    engine.add(request)
    (output,) = engine.step()[0]
    assert output.logprobs[0].chosen == 0.0
    assert output.logprobs[0].top == [(output.tokens[0], 0.0)]


def test_logprobs_of_the_prompt_of_a_model_that_is_sure():
    prompt = list(range(5, 205))
    engine = make_engine(budget=64)
    for name in "ab":  # the second prompt is in the cache
        engine.add(make_request(name, prompt, max_tokens=1, prompt_logprobs=1))
        outputs = []
        while engine.has_work:
            outputs += engine.step()[0]
        assert [r.top for r in outputs[0].prompt_logprobs] == [[(token, 0.0)] for token in prompt[1:]]


# --- pace


def plan_of(tokens=8, start=0):
    blocks = tuple(range(blocks_for(start + tokens)))
    return StepPlan((SequenceStep("a", start, [5] * tokens, blocks, True, GREEDY, 0),), blocks)


class TickingClock(ManualClock):
    """Every look at it takes a while."""

    def __init__(self, tick):
        super().__init__()
        self.tick = tick

    def now(self):
        self.advance(self.tick)
        return super().now()


def test_a_step_takes_what_the_device_would_take():
    clock = ManualClock()
    runner = make_runner(PoolMemory.memfd(16, BLOCK_BYTES), clock, slowdown=3.0)
    runner.run(plan_of(tokens=500))
    prefill = TIMES.step_ms([(500, 0)]) / 1e3
    assert clock.now() == pytest.approx(3 * prefill)
    runner.run(plan_of(tokens=1, start=500))
    assert clock.now() == pytest.approx(3 * (prefill + TIMES.step_ms(decodes=1, kv_tokens=501) / 1e3))
    pacer = runner.pacer
    assert (pacer.steps, pacer.late_steps, pacer.late, pacer.error) == (2, 0, 0, pytest.approx(0, abs=1e-9))
    assert pacer.modelled == pytest.approx(clock.now())


def test_what_the_arithmetic_took_is_not_slept_again():
    clock = TickingClock(1e-3)
    slept: list[float] = []
    runner = make_runner(PoolMemory.memfd(16, BLOCK_BYTES), clock, sleep=slept.append, slowdown=10.0)
    runner.run(plan_of())
    assert slept == [pytest.approx(runner.pacer.modelled - 1e-3)]


def test_what_the_engine_did_between_two_steps_is_part_of_their_overhead():
    clock = ManualClock()
    runner = make_runner(PoolMemory.memfd(16, BLOCK_BYTES), clock, slowdown=10.0)
    runner.run(plan_of())
    other = replace(plan_of().sequences[0], request_id="b")
    for gap, plan, counts in ((0.004, plan_of(), 0.004), (0.104, plan_of(), 0.005), (0.004, StepPlan((other,)), 0)):
        began, before = clock.now(), runner.pacer.modelled
        clock.advance(gap)
        runner.run(plan)
        assert clock.now() - began == pytest.approx(gap - counts + runner.pacer.modelled - before)


def test_lateness_is_counted_and_said(caplog):
    clock = TickingClock(5.0)
    runner = make_runner(PoolMemory.memfd(16, BLOCK_BYTES), clock, sleep=lambda _: pytest.fail("no time is left"))
    with caplog.at_level(logging.WARNING):
        runner.run(plan_of())
        assert not caplog.messages
        assert runner.pacer.late_steps == 1
        assert runner.pacer.late == pytest.approx(5.0 - runner.pacer.modelled)
        runner.pacer.modelled += 30
        runner.pacer.late += 30
        runner.run(plan_of())
    assert "this host cannot keep the pace" in caplog.text


def test_an_oversleep_is_counted():
    clock = ManualClock()
    memory = PoolMemory.memfd(16, BLOCK_BYTES)
    runner = make_runner(memory, clock, sleep=lambda seconds: clock.advance(seconds + 0.25))
    runner.run(plan_of())
    assert (runner.pacer.late_steps, runner.pacer.overslept) == (0, pytest.approx(0.25))
    assert (runner.counts()["modelled_steps"], runner.counts()["overslept_ms"]) == (1, 250)


def test_noise_is_seeded_and_of_the_size_that_was_asked():
    def durations(noise):
        runner = make_runner(PoolMemory.memfd(16, BLOCK_BYTES), ManualClock(), noise=noise)
        return np.array([runner._duration(plan_of()) for _ in range(2000)])

    assert (durations(0.2) == durations(0.2)).all()
    mean = TIMES.step_ms([(8, 0)]) / 1e3
    assert (durations(0.0) == mean).all()
    assert durations(0.2).mean() == pytest.approx(mean, rel=0.03)
    assert durations(0.2).std() == pytest.approx(0.2 * mean, rel=0.1)


# --- options


def build(**options):
    return build_modelled(ModelledOptions(model=str(DEMO), **options), ManualClock())


def test_build_from_a_folder():
    built = build(geometry="llama-3.1-8b", max_model_len=4096, kv_cache_memory=1 << 30, slowdown=2.0)
    limits = built.engine.scheduler.limits
    assert built.engine.scheduler.pool.num_blocks == (1 << 30) // (131072 * 64)
    assert (limits.max_model_len, limits.max_sequences) == (4096, 128)
    assert limits.token_budget == 4096
    assert (built.runner.vocab_size, built.runner.device) == (4096, "modelled:h200")
    assert (built.layout.order, built.layout.dtype, built.layout.block_bytes) == ("digest", "uint64", 4096)
    built.close()


def test_the_next_incarnation_finds_the_blocks_of_the_last(tmp_path):
    prompt = prompt_of(random.Random(4), 300)
    options = ModelledOptions(model=str(DEMO), max_model_len=1024, kv_blocks=32)
    texts = []
    with pool_server(tmp_path / "kv-pool") as path:
        for incarnation, expected_hit in ((1, 0), (2, 256)):
            built = build_modelled(options, ManualClock(), shared_pool(path, "a", incarnation))
            built.runner._sleep = lambda _: None
            tokens, _, cached = run(built.engine, make_request("r", prompt))["r"]
            assert cached == expected_hit
            texts.append(tokens)
            built.close()
    assert texts[0] == texts[1] == offline(prompt, max_tokens=24, token_ids=built.runner.token_ids)[0]


def test_defaults_come_from_the_device_and_the_geometry():
    small, large = build(geometry="qwen3-0.6b"), build(geometry="qwen3-32b")
    # 90 % of 141 GB, less the weights, in blocks of 64 tokens
    assert large.engine.scheduler.pool.num_blocks == int((126.9e9 - 65.522892e9) / (262144 * 64))
    assert small.engine.scheduler.limits.token_budget == 8192
    assert large.engine.scheduler.limits.token_budget == 1472
    assert build(step_time_limit_ms=1.0).engine.scheduler.limits.token_budget == 8192  # the demo model's own geometry
    assert small.layout.difference(large.layout).startswith("model: ")
    assert not small.layout.difference(build(geometry="qwen3-0.6b", max_model_len=512, kv_blocks=9).layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "modelled:h900"}, "device: 'modelled:h900', modelled devices are .*modelled:h200"),
        ({"device": "cpu"}, "device: 'cpu'"),
        ({"geometry": "gpt"}, "geometry: 'gpt', allowed are .*qwen3-32b"),
        ({"slowdown": 0.5}, "slowdown: 0.5, allowed is 1 to"),
        ({"noise": -0.1}, "noise: -0.1"),
        ({"max_num_seqs": 0}, "max-num-seqs: 0"),
        ({"kv_blocks": 0}, "kv-blocks: 0"),
        ({"kv_blocks": 5, "kv_cache_memory": 5}, "kv-blocks: given beside kv-cache-memory"),
        ({"kv_blocks": 1 << 27}, r"kv-blocks: 134217728, allowed are up to \d+ beside the weights"),
        ({"scheduling_policy": "best"}, "scheduling-policy: 'best', allowed are fcfs, priority, slack"),
        ({"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'}, "a modelled device has no draft"),
        ({"kv_blocks": 5, "max_model_len": 500}, "max-model-len: 500 tokens need more KV than the 5 blocks there"),
        ({"max_model_len": 1}, "max-model-len: 1, this checkpoint allows 2 to 40960"),
        ({"max_num_batched_tokens": 64}, "max-num-batched-tokens: 64, allowed is at least max-num-seqs"),
        ({"device": "modelled:l40s", "geometry": "qwen3-32b"}, "device: modelled:l40s has 48 GB, of which 0.0 GB"),
        ({"kv_cache_memory": 1 << 40}, "device: modelled:h200 has 141 GB"),
        ({"kv_cache_memory": 100}, "max-model-len: 2 tokens need more KV than the 0 blocks there"),
        ({"model": "/nowhere"}, "/nowhere/config.json: cannot be read"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build_modelled(ModelledOptions(**{"model": str(DEMO), **options}), ManualClock(), memfd_pool)


def test_sampled_tokens_are_ordinary_text():
    ids, tokenizer = ordinary_ids(DEMO, 4096), Tokenizer(DEMO)
    assert ids == range(3, 4096)
    assert not tokenizer.special_ids & set(ids)
    assert all(tokenizer.token_bytes(i) for i in ids)


@pytest.mark.parametrize(
    ("vocabulary", "ids"),
    [
        ('{"a": 0, "b": 1, "c": 2, "x": 4, "y": 5}', range(3)),
        ('[["a", 0.0], ["b", 0.0], ["c", 0.0], ["d", 0.0]]', range(4)),
        ('{"a": 0, "</s>": 1, "c": 2, "d": 3, "e": 4, "f": 9}', range(2, 5)),
    ],
)
def test_the_longest_run_of_ordinary_ids(tmp_path, vocabulary, ids):
    added = '[{"id": 1, "content": "</s>"}]' if "</s>" in vocabulary else "[]"
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocabulary}}}, "added_tokens": {added}}}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert ordinary_ids(tmp_path, 100) == ids


def test_a_modelled_engine_needs_no_torch():
    code = "import sys, penstock.engine.modelled; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_step_ends_early_when_it_is_told_to():
    clock, stop = ManualClock(), Stop()
    memory = PoolMemory.memfd(16, BLOCK_BYTES)
    told = []

    def sleep(seconds):
        clock.advance(seconds)
        told.append(clock.now())
        if len(told) == 2:
            stop.set()

    runner = make_runner(memory, clock, sleep=sleep, slowdown=10.0)
    assert runner.run(plan_of(tokens=900), stop) == StepResult([], [], interrupted=True)
    assert clock.now() == pytest.approx(2 * 10 * STOPS_IN)
    assert runner.pacer.steps == 0
    began = clock.now()
    whole = runner.run(plan_of(tokens=900), Stop())
    assert clock.now() - began == pytest.approx(runner.pacer.modelled)
    assert (runner.pacer.steps, runner.pacer.late_steps) == (1, 0)
    assert whole.tokens == make_runner(memory, ManualClock()).run(plan_of(tokens=900)).tokens
