"""A request that was interrupted goes on elsewhere with the tokens that it would have had, whoever runs beside it."""

import random
from dataclasses import replace

import pytest

from penstock.core.errors import InvalidRequest
from penstock.sched.local import LOCAL_POLICIES
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from tests.helpers.engines import Collector, make_engine, make_request

TIMES = StepTime(DEVICES["h200"], GEOMETRIES["qwen3-0.6b"])
LENGTH = 90
CUTS = (0, 1, 23, 40, 64, 89)  # with a prompt of 40: before, at and after edges of blocks, and before the last token
VARIANTS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy-penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.6, "logit_bias": {5: 3.0}},
}


def asked(name="r", prompt=40, **more):
    rng = random.Random(prompt)
    return make_request(name, [rng.randrange(1, 320) for _ in range(prompt)], **more)


def crowd():
    """What runs beside it: some decode already, some are still read, and some go before it."""
    for i in range(4):
        request = asked(f"other-{i}", 30 + 50 * i, max_tokens=20, seed=i, temperature=0.8)
        yield replace(request, ttft_ms=100.0 * i or None, tpot_ms=20.0, offline=i == 3)


@pytest.mark.parametrize("policy", LOCAL_POLICIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_goes_on_with_the_tokens_that_would_have_come(model, policy, variant):
    request = asked(seed=11, max_tokens=LENGTH, logprobs=2, **VARIANTS[variant])
    request = replace(request, ttft_ms=200.0, tpot_ms=20.0)
    whole = Collector(make_engine(model))
    whole.run(request)
    tokens, logprobs = whole.tokens["r"], whole.logprobs["r"]
    assert len(tokens) == LENGTH
    for cut in CUTS:
        engine = make_engine(model, budget=64, blocks=24, policy=LOCAL_POLICIES[policy](TIMES, StepLimit.asked(None)))
        rest = Collector(engine)
        for other in crowd():
            engine.add(other)
        for _ in range(3):
            rest.step()
        engine.add(replace(request, generated=tuple(tokens[:cut]), waited=0.1))
        rest.run()
        assert rest.tokens["r"] == tokens[cut:]
        assert rest.starts["r"] == list(range(cut, LENGTH))
        assert rest.finish["r"] == "length"
        assert [p.rank for p in rest.logprobs["r"]] == [p.rank for p in logprobs[cut:]]
        assert [p.chosen for p in rest.logprobs["r"]] == pytest.approx([p.chosen for p in logprobs[cut:]], abs=1e-5)
        assert engine.scheduler.pool.used == 0


def test_its_stop_token_and_its_limit_are_still_its_own(model):
    free = Collector(make_engine(model)).run(asked(max_tokens=30))["r"]
    stop = next(token for i, token in enumerate(free) if i > 12 and token not in free[:i])
    end = free.index(stop) + 1
    collector = Collector(make_engine(model))
    assert collector.run(replace(asked(max_tokens=30, stop_ids=[stop]), generated=free[:10]))["r"] == free[10:end]
    assert collector.finish["r"] == "stop"
    with pytest.raises(InvalidRequest, match="generated: 30 tokens, fewer than max_tokens=30 are allowed"):
        make_engine(model).add(replace(asked(max_tokens=30), generated=free))


def test_what_it_left_in_a_cache_is_found(model):
    engine = make_engine(model)
    collector = Collector(engine)
    tokens = list(collector.run(asked(max_tokens=100))["r"])
    collector.run(replace(asked("again", max_tokens=100), prompt=asked().prompt, generated=tokens[:95]))
    assert collector.tokens["again"] == tokens[95:]
    assert collector.cached["again"] == 132, "also of what was generated"


def test_neither_its_pause_nor_what_it_had_spoils_what_is_measured(model):
    collector = Collector(make_engine(model))
    measured = collector.engine.scheduler.measurements
    collector.run(replace(asked(max_tokens=40), generated=[5] * 30))
    assert measured.ttft_ms is None, "its first token came elsewhere"
    assert measured.tpot_ms is not None
    collector.run(asked("fresh", max_tokens=40))
    assert measured.ttft_ms is not None
