"""Scheduling one step ahead: what it costs to be wrong, who waits, and that nothing is anybody's while in flight."""

from dataclasses import replace

from penstock.core.plan import BLOCK_TOKENS, StepResult
from penstock.core.request import FinishReason
from tests.sched.test_scheduler import STOP, expected, make, request, run


def stopping_prompt():
    """A prompt whose text ends by a stop token after more than a block."""
    return next(p for i in range(1000) if BLOCK_TOKENS < len(out := expected(p := [i], 200)) < 200 and STOP in out)


def test_a_length_is_known_beforehand_and_costs_nothing():
    engine = make(ahead=True, model_len=200, budget=64)
    engine.scheduler.add(request("by tokens", [1] * 70, max_tokens=9))
    engine.scheduler.add(request("by the model", [2] * 190, max_tokens=100))
    run(engine)
    for name, prompt, most in (("by tokens", [1] * 70, 9), ("by the model", [2] * 190, 10)):
        out = engine.out[name]
        assert out == expected(prompt, most)
        if STOP not in out:
            assert engine.finished[name] is FinishReason.LENGTH
            assert engine.computed[name] == len(prompt) + len(out) - 1  # the last token is not read


def test_a_stop_costs_one_token_and_leaves_nothing():
    prompt = stopping_prompt()
    kept = {}
    for ahead in (False, True):
        engine = make(ahead=ahead)
        engine.scheduler.add(request("a", prompt, max_tokens=200))
        engine.scheduler.add(request("b", [7] * 100, max_tokens=150))
        while "a" not in engine.finished:
            engine.step()
        assert engine.finished["a"] is FinishReason.STOP
        assert not engine.scheduler.holds("a")
        run(engine)
        assert engine.out["a"] == expected(prompt, 200)
        assert engine.out["b"] == expected([7] * 100, 150)
        assert engine.computed["a"] == len(prompt) + len(engine.out["a"]) - 1 + ahead
        assert engine.scheduler.pool.used == 0
        kept[ahead] = set(engine.scheduler.pool.keys())
    assert kept[True] == kept[False], "the cache holds something that was not sampled, or lacks something"


def test_blocks_of_a_step_in_flight_are_free_when_it_has_landed():
    engine = make(ahead=True)
    for name in ("stays", "goes"):
        engine.scheduler.add(request(name, [1] * 10, 50))
    engine.begin()
    engine.begin()
    blocks = engine.flying[1].sequences[1].blocks
    assert engine.flying[1].sequences[1].request_id == "goes"
    engine.scheduler.cancel("goes")
    assert [engine.scheduler.pool.holders(b) for b in blocks] == [1]
    engine.end()
    assert [engine.scheduler.pool.holders(b) for b in blocks] == [1], "the second step still computes it"
    engine.end()
    assert [engine.scheduler.pool.holders(b) for b in blocks] == [0]
    assert "goes" not in engine.out
    run(engine)


def test_an_id_that_comes_again_gets_nothing_of_its_former_incarnation():
    engine = make(ahead=True)
    engine.scheduler.add(request("a", [1] * 10, 20))
    engine.begin()
    engine.begin()
    engine.scheduler.cancel("a")
    engine.scheduler.add(request("a", [2] * 30, 20))
    engine.end()
    engine.end()
    assert engine.out == {}
    run(engine)
    assert engine.out["a"] == expected([2] * 30, 20)


def test_who_is_guided_by_its_tokens_is_scheduled_before_they_are_known():
    engine = make(ahead=True, budget=64)
    engine.scheduler.add(replace(request("guided", [1] * 100, 6), bad_words=((3, 4),)))
    plans = [engine.begin(), engine.begin()]
    while engine.flying:
        engine.end()
        plans.append(engine.begin())
    steps = [plan.sequences[0] for plan in plans if plan]
    assert [step.generated for step in steps[:2]] == [None, []], "what a prompt's chunks leave does not matter"
    out = engine.out["guided"]
    assert out == expected([1] * 100, 6)
    for step, before in zip(steps[2:], range(len(out)), strict=False):
        assert step.generated == [*out[:before], -1], "its last token is the runner's to fill in"
        assert step.bad_words == ((3, 4),)


def test_what_depends_on_how_many_tokens_there_are_is_known_beforehand():
    engine = make(ahead=True)
    least = request("a", [1] * 10, 9)
    engine.scheduler.add(replace(least, params=replace(least.params, min_tokens=3)))
    plans = [engine.begin()]
    for _ in range(4):
        plans.append(engine.begin())
        engine.scheduler.update(engine.flying.pop(0), StepResult([[5]], [None]))
    assert [plan.sequences[0].generated is not None for plan in plans] == [True, True, True, False, False]
    assert plans[0].sequences[0].stop_ids == {STOP}


def test_nobody_is_preempted_while_a_step_is_in_flight():
    engine = make(num_blocks=4, budget=300, sequences=2, ahead=True)
    engine.scheduler.add(request("low", [1] * 200, 40, priority=1))
    engine.begin()
    engine.begin()
    engine.scheduler.add(request("high", [2] * 100, 3))
    engine.end()
    assert engine.begin() is not None  # "low" goes on
    assert engine.scheduler.held_back
    engine.end()
    assert engine.begin() is None, "nothing more is scheduled ahead"
    engine.end()
    assert [s.request_id for s in engine.begin().sequences] == ["high"]
    assert engine.scheduler.counters.preemptions == 1
    run(engine)
    assert engine.out["low"] == expected([1] * 200, 40)
    assert engine.out["high"] == expected([2] * 100, 3)


def test_a_failed_runner_leaves_a_scheduler_that_goes_on():
    engine = make(ahead=True, budget=64)
    engine.scheduler.add(request("decodes", [1] * 20, 20))
    engine.step()
    engine.scheduler.add(request("reads", [2] * 150, 5))
    engine.begin()
    engine.scheduler.abandon()
    engine.flying.clear()
    engine.scheduler.check()
    assert engine.scheduler.pool.used == 0
    run(engine)
    assert engine.out["decodes"] == expected([1] * 20, 20)
    assert engine.out["reads"] == expected([2] * 150, 5)


def test_an_interrupted_step_costs_only_itself():
    """Of the two in flight the second goes on with what the first would have drawn."""
    engine = make(ahead=True, budget=64, num_blocks=24)
    prompt = [2] * 150
    for name, tokens in (("decodes", [1] * 60), ("reads", prompt)):
        engine.scheduler.add(request(name, tokens, 30, offline=True))
    while engine.scheduler.sequence("reads").computed < 100:
        engine.step()
    scheduler = engine.scheduler
    assert scheduler.look_ahead() == bool(engine.flying)
    while len(engine.flying) < 2:
        assert engine.begin()
    assert not scheduler.interrupts
    scheduler.add(request("online", [3] * 20, 3))
    assert scheduler.interrupts
    before = scheduler.counters.prompt_tokens, set(scheduler.pool.keys())
    held = {name: list(scheduler.sequence(name).blocks) for name in ("decodes", "reads")}
    engine.interrupt()
    scheduler.check()
    assert scheduler.counters.interruptions == 2
    assert scheduler.counters.preemptions == 0
    assert scheduler.counters.prompt_tokens < before[0]
    assert set(scheduler.pool.keys()) == before[1], "nothing of it is anybody's"
    assert all(scheduler.sequence(name).blocks == blocks for name, blocks in held.items())
    assert "online" in [s.request_id for s in engine.begin().sequences]
    assert not scheduler.interrupts
    run(engine)
    assert engine.out == {
        "decodes": expected([1] * 60, 30),
        "reads": expected(prompt, 30),
        "online": expected([3] * 20, 3),
    }


def test_offline_prompts_get_on_between_interruptions_and_faster_after_them():
    engine = make(ahead=True, budget=256, num_blocks=40, sequences=8)
    engine.scheduler.add(request("offline", [1] * 1500, 2, offline=True))

    def tokens():
        plan = engine.begin()
        return len(plan.sequences[0].tokens), len(plan.sequences)

    seen = []
    for _ in range(6):
        seen.append(tokens()[0])
        engine.interrupt()
    assert seen == [256, 128, 64, 32, 16, 16], "never none"
    for _ in range(3):
        seen.append(tokens()[0])
        engine.end()
    assert seen[6:] == [16, 32, 64]
    engine.scheduler.add(request("online", [2] * 40, 2))
    assert engine.begin().num_tokens == 40, "an online prompt takes no longer for an offline one"
    engine.end()
    assert engine.begin().num_tokens == 256, "beside online work nothing is interrupted, nor bounded"
    engine.end()
    run(engine)
    assert engine.out == {"offline": expected([1] * 1500, 2), "online": expected([2] * 40, 2)}


def test_at_the_end_of_a_block_the_next_one_is_set_aside_beforehand():
    engine = make()
    engine.scheduler.add(request("a", [1] * (BLOCK_TOKENS - 1), max_tokens=9))
    engine.step()
    engine.begin()
    (last,) = engine.flying[-1].sequences
    assert (last.start, len(last.blocks), len(last.ahead)) == (BLOCK_TOKENS - 1, 1, 1)
    engine.end()
    engine.begin()
    (first,) = engine.flying[-1].sequences
    assert list(first.blocks) == [*last.blocks, *last.ahead]


def test_no_block_is_set_aside_for_a_token_that_no_step_computes():
    engine = make()
    engine.scheduler.add(request("a", [1] * BLOCK_TOKENS, max_tokens=1))
    engine.begin()
    assert not engine.flying[-1].sequences[0].ahead
