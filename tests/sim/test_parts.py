"""StepTimer, wires and prompts, each by itself."""

import numpy as np
import pytest

from penstock.core.plan import BLOCK_TOKENS, SequenceStep, StepPlan
from penstock.core.wire.handoff import Commit, Lease, Push, Reserved
from penstock.kv.keys import extend_keys
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.frontend import PARAMS
from penstock.sim.steps import DRAWN_AT_ONCE, StepTimer, Stride
from penstock.sim.traffic import FIRST_OWN, prompt_of
from penstock.sim.wires import TransportModel, Wires
from tests.sim.scenarios import work

TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])


def pace(noise=0.2, seed=0):
    return StepTimer(TIMES, noise, np.random.default_rng(seed))


def plan(*parts):
    """(first position, tokens) of each sequence, all of which draw."""
    steps = [SequenceStep(str(i), start, [1] * count, (), True, PARAMS, 0) for i, (start, count) in enumerate(parts)]
    return StepPlan(tuple(steps))


# --- pace


def decode(pace: StepTimer, sequences: int, kv_tokens: int) -> float:
    """Seconds of one step."""
    (end,) = pace.decodes(0.0, 60.0, sequences, kv_tokens - sequences, 1)
    return end


def test_a_step_takes_what_the_step_time_model_says():
    assert pace(noise=0).step(plan((0, 500), (100, 1))) == pytest.approx(TIMES.step_ms([(500, 0)], 1, 101, 2) / 1e3)
    assert pace(noise=0).step(plan((100, 1), (200, 1))) == pytest.approx(TIMES.step_ms([], 2, 302) / 1e3)
    assert decode(pace(noise=0), 2, 302) == pytest.approx(TIMES.step_ms([], 2, 302) / 1e3)


def test_decode_steps_follow_each_other_as_far_as_is_asked():
    one = [decode(pace(noise=0), 2, 300 + 2 * number) for number in range(1, 6)]
    assert pace(noise=0).decodes(1.0, 60.0, 2, 300, 5) == pytest.approx([1.0 + sum(one[:n]) for n in range(1, 6)])
    assert len(pace(noise=0).decodes(1.0, 1.0 + sum(one[:3]) - 1e-6, 2, 300, 5)) == 3
    assert pace(noise=0).decodes(1.0, 1.0, 2, 300, 5) == []


def test_noise_has_the_mean_and_deviation_that_were_asked_for():
    p, ms = pace(noise=0.2), TIMES.step_ms([], 4, 4000)
    factors = np.array([decode(p, 4, 4000) for _ in range(20_000)]) / (ms / 1e3)
    assert factors.mean() == pytest.approx(1.0, abs=0.01)
    assert factors.std() == pytest.approx(0.2, abs=0.02)
    assert factors.min() > 0


def test_steps_that_were_not_taken_give_their_noise_back():
    straight, returning = pace(), pace()
    expected = [decode(straight, 1, 100) for _ in range(3 * DRAWN_AT_ONCE)]
    found = [decode(returning, 1, 100) for _ in range(DRAWN_AT_ONCE + 5)]
    returning.give_back(20)
    del found[-20:]
    found += [decode(returning, 1, 100) for _ in range(3 * DRAWN_AT_ONCE - len(found))]
    assert found == expected


def test_a_stride_is_cut_after_the_step_that_is_running():
    stride = Stride(plan((0, 1)), 0.0, [1.0, 2.0, 3.0, 4.0])
    assert stride.done(2.0) == 2
    assert stride.cut(1.5) == 2
    assert stride.ends == [1.0, 2.0]
    assert stride.cut(2.0) == 0
    assert stride.end == 2.0


def ending_stride(more=0):
    return Stride(plan((0, 1)), 0.0, [1.0, 2.0, 3.0], quiet=True, more=more, ending=True)


def test_the_step_in_which_somebody_ends_is_not_recorded_with_the_quiet_ones():
    stride = ending_stride()
    assert stride.ends_somebody
    assert stride.record() == (0.0, [1.0, 2.0])
    assert stride.began == 2.0
    assert not ending_stride(more=1).ends_somebody
    assert ending_stride(more=1).record() == (0.0, [1.0, 2.0, 3.0])


def test_a_stride_that_is_cut_ends_somebody_only_in_the_step_that_is_running():
    running, before, early = ending_stride(), ending_stride(), ending_stride(more=1)
    assert (running.cut(2.5), before.cut(1.5), early.cut(2.5)) == (0, 1, 0)
    assert (running.ends_somebody, before.ends_somebody, early.ends_somebody) == (True, False, False)
    assert before.record() == (0.0, [1.0, 2.0])


# --- wires


def transport(kind="copy"):
    return TransportModel(kind=kind, bandwidth=1000.0, latency=0.5, lease=5.0)


PUSH = Push(Lease("r", 0), 0, b"", 0, 0, 0)
COMMIT = Commit(Lease("r", 0), 1, [1], 0, 0.0, 0.0)


def test_blocks_that_are_copied_wait_for_the_way_out_and_the_way_in():
    wires = Wires(transport())
    assert wires.arrival(0.0, "p0", "d0", PUSH, 100) == pytest.approx(0.6)
    assert wires.arrival(0.0, "p0", "d1", PUSH, 100) == pytest.approx(0.7)  # the same way out
    assert wires.arrival(0.0, "p1", "d1", PUSH, 100) == pytest.approx(0.8)  # the same way in
    assert wires.arrival(5.0, "p1", "d1", PUSH, 100) == pytest.approx(5.6)
    assert wires.arrival(0.0, "d1", "p0", Reserved(Lease("r", 0), 0), 100) == 0.5  # a message waits for nobody


def test_a_commit_does_not_overtake_its_blocks():
    wires = Wires(transport())
    last = [wires.arrival(0.0, "p0", "d0", PUSH, 1000) for _ in range(3)][-1]
    assert wires.arrival(0.0, "p0", "d0", COMMIT, 1000) == last
    assert wires.arrival(0.0, "p1", "d0", COMMIT, 1000) == 0.5


def test_shared_blocks_take_no_longer_than_a_message():
    wires = Wires(transport("shared"))
    assert [wires.arrival(0.0, "p0", "d0", PUSH, 1000) for _ in range(3)] == [0.5] * 3


# --- prompts


def keys(request):
    found = []
    extend_keys(found, b"root", prompt_of(request), request.prompt_tokens // BLOCK_TOKENS)
    return found


def test_prompts_are_alike_exactly_as_far_as_their_blocks_are():
    one = keys(work(0, prompt=600, prefix=(7, 8), block=256))
    two = keys(work(1, prompt=600, prefix=(7, 9), block=256))
    three = keys(work(2, prompt=256, prefix=(7,), block=256))
    assert one[:4] == two[:4] == three
    assert not set(one[4:]) & set(two[4:])
    assert len(keys(work(3, prompt=640))) == 10
    assert not set(keys(work(3, prompt=640))) & set(keys(work(4, prompt=640)))


def test_blocks_are_cut_at_the_end_of_the_prompt():
    assert prompt_of(work(5, prompt=5, prefix=(1, 2), block=4)) == [1, 1, 1, 1, 2]
    assert prompt_of(work(5, prompt=6, prefix=(1,), block=4)) == [1, 1, 1, 1, FIRST_OWN + 5, FIRST_OWN + 5]
