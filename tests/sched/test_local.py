"""What surrounds the local scheduler and is the same in a process and in a simulator: intake, measurements, sizes, and
steps that are taken together."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import FinishReason, Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import Cancel, Drain, Enqueue, Leg, Peer, SetRole
from penstock.kv.pool import BlockPool
from penstock.sched.local import LOCAL_POLICIES, Limits, Scheduler, make_local_policy
from penstock.sched.local.intake import Intake
from penstock.sched.local.limits import fitting_blocks, sized
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.local.steps import LEARN_EVERY, WEIGHT
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.repeat import again, repeat, repeatable

DEVICE, SHAPE = DEVICES["h200"], GEOMETRIES["llama-3.1-8b"]
TIMES = StepTime(DEVICE, SHAPE)
LIFE = Peer("engine", 7, "")


def request(name="r", prompt=(1, 2, 3), output=5, **fields) -> Request:
    return Request(
        id=name, prompt=list(prompt), params=SamplingParams(), seed=0, stop_ids=frozenset(), max_tokens=output, **fields
    )


def make_scheduler(policy="fcfs", blocks=40, sequences=8) -> Scheduler:
    limits = Limits(token_budget=256, max_sequences=sequences, max_model_len=blocks * 64)
    return Scheduler(limits, BlockPool(range(blocks)), policy=make_local_policy(policy, TIMES, StepLimit.asked(None)))


def run(scheduler: Scheduler, plan: StepPlan, began=0.0, ended=0.0) -> list[TokenOutput]:
    sampled = sum(s.sample for s in plan.sequences)
    return scheduler.update(plan, StepResult([[1]] * sampled, [None] * sampled), began, ended)


def test_a_policy_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="scheduling-policy: 'best', allowed are fcfs, priority, slack"):
        make_local_policy("best", TIMES, StepLimit.asked(None))


# --- intake


@pytest.fixture
def intake():
    return Intake(LIFE, "any", make_scheduler(), vocab_size=100)


def enqueue(intake, frontend, asked, generation=0, to=7, **more):
    refused = intake.enqueue(1.0, frontend, Enqueue(to, asked, generation, **more))
    intake.check()
    return refused and (refused.why, refused.message)


def test_what_cannot_run_is_refused_with_its_reason(intake):
    assert enqueue(intake, "a", request(), to=6) == ("stale", "meant for incarnation 6 of engine, this is 7")
    assert enqueue(intake, "a", request(prompt=[1, 100])) == ("invalid", "prompt: token id 100, allowed are 0 to 99")
    assert enqueue(intake, "a", request(prompt=[-1])) == ("invalid", "prompt: token id -1, allowed are 0 to 99")
    assert enqueue(intake, "a", request(prompt=[1] * 5000))[0] == "invalid"
    assert enqueue(intake, "a", request()) is None
    assert enqueue(intake, "b", request(), 1)[1] == "request id 'r' is in use"  # another's
    intake.obey("master", Drain(6))
    assert not intake.draining
    intake.obey("master", Drain(7))
    assert enqueue(intake, "a", request("late")) == ("draining", "this instance takes nothing new")
    assert intake.refuses(request("handed over"), "a") == "this instance takes nothing new"


def test_requests_are_their_owners_to_cancel_and_to_ask_for_anew(intake):
    enqueue(intake, "a", request())
    intake.obey("b", Cancel(7, ["r"]))
    intake.obey("a", Cancel(6, ["r"]))
    assert intake.scheduler.holds("r")
    assert enqueue(intake, "a", request(output=9), 1) is None
    assert intake.scheduler.sequence("r").request.max_tokens == 9
    intake.obey("a", Cancel(7, ["r", "unknown"]))
    assert not intake.scheduler.holds("r")
    enqueue(intake, "a", request("one"))
    enqueue(intake, "b", request("two"))
    intake.drop_client("a")
    intake.check()
    assert (intake.scheduler.holds("one"), intake.scheduler.holds("two"), len(intake)) == (False, True, 1)


def test_outputs_go_to_owners_with_their_attempt(intake):
    enqueue(intake, "a", request("one"), generation=3)
    enqueue(intake, "b", request("two"))
    ends = TokenOutput("one", [1], finish=FinishReason.STOP)
    theirs = intake.address([ends, TokenOutput("two", [2])])
    assert {frontend: [(o.request_id, o.generation) for o in own] for frontend, own in theirs.items()} == {
        "a": [("one", 3)],
        "b": [("two", 0)],
    }
    assert len(intake) == 1


def test_a_cancellation_of_an_earlier_attempt_spares_a_later_one(intake):
    for name, generation in (("one", 1), ("two", 2)):
        assert intake.enqueue(0.0, "a", Enqueue(7, request(name), generation)) is None
    intake.obey("a", Cancel(7, ["one", "two"], 1))
    assert [name for name, _ in intake.owners()] == ["two"]
    intake.obey("a", Cancel(7, ["two"]))
    assert len(intake) == 0


def test_tokens_that_were_generated_elsewhere_have_to_be_known_too(intake):
    refused = intake.enqueue(0.0, "a", Enqueue(7, replace(request(output=9), generated=[3, 100])))
    assert refused.message == "prompt: token id 100, allowed are 0 to 99"


def test_only_newer_decisions_about_the_role_count(intake):
    for role, generation, after in (("decode", 2, "decode"), ("prefill", 1, "decode"), ("prefill", 3, "prefill")):
        intake.obey("master", SetRole(7, role, generation))
        assert intake.role == after
    assert (intake.snapshot().role, intake.snapshot().role_generation) == ("prefill", 3)


def test_who_takes_a_request_over_must_have_its_frontend(intake):
    intake.frontends = {"a": 0}.keys()
    assert intake.refuses(request(), "a") == ""
    assert intake.refuses(request(), "b") == "the frontend b is not connected"
    assert intake.refuses(request(prompt=[500]), "a") == "prompt: token id 500, allowed are 0 to 99"


def test_what_hand_offs_tell_is_kept(intake):
    reservation = intake.scheduler.reserve(request())
    assert intake.scheduler.reservations.complete(reservation, [4])
    sequence = intake.scheduler.resume(reservation, 0, 10.0, (1.0, 0.5, "waited"))
    intake.joined(request(), "a", 2)
    intake.check()
    assert sequence.spent == (1.0, 0.5, "waited")
    intake.scheduler.cancel("r")
    intake.failed(TokenOutput("r", [], finish=FinishReason.ERROR, start=sequence.generated))
    intake.check()
    failed = intake.take_failed()
    assert [list(intake.address(failed)), intake.take_failed(), len(intake)] == [["a"], [], 0]
    intake.check()


# --- measurements


def test_the_times_of_a_request_and_their_means():
    scheduler = make_scheduler()
    for name, arrival in (("one", 0.0), ("two", 1.0)):
        scheduler.add(request(name, output=3), now=arrival)
        plan = scheduler.schedule(arrival + 0.25)
        began = arrival + 0.25
        for i, end in enumerate((1.0, 1.5, 2.0)):
            if i:
                plan = scheduler.schedule(began := arrival + end - 0.5)
            (output,) = run(scheduler, plan, began, arrival + end * (1 if name == "one" else 2))
            if not i:
                assert scheduler.sequence(name).spent[:2] == (0.25, 0.75 if name == "one" else 1.75)
        assert output.timing.decode == (1.0 if name == "one" else 2.0)
        assert output.timing.queue == 0.25
    assert scheduler.measurements.ttft_ms == pytest.approx(1000 + WEIGHT * 1000)
    assert scheduler.measurements.tpot_ms == pytest.approx(500 + WEIGHT * 500)


def decoding(count=4) -> Scheduler:
    """All that it has decodes."""
    scheduler = make_scheduler()
    for i in range(count):
        scheduler.add(request(f"r{i}", prompt=[i] * 40, output=500))
    run(scheduler, scheduler.schedule())
    return scheduler


def test_steps_taken_together_are_measured_like_steps_taken_one_by_one():
    schedulers = decoding(), decoding()
    together, alone = (scheduler.measurements for scheduler in schedulers)
    for measured in (together, alone):
        measured.learn(DEVICE, SHAPE)
    now, rng = 0.0, random.Random(0)
    for _ in range(20):
        began = now
        ends = [now := now + rng.uniform(0.004, 0.02) for _ in range(9)]
        plan = schedulers[0].schedule()
        together.ran(plan, began, ends)
        run(schedulers[0], plan)
        repeat(schedulers[0], plan, len(ends) - 1)
        for end in ends:
            plan = schedulers[1].schedule()
            alone.ran(plan, began, [end])
            run(schedulers[1], plan)
            began = end
    assert together.interval_ms == alone.interval_ms
    assert together.factors == alone.factors != {}


def test_factors_follow_what_steps_take():
    scheduler = decoding()
    measured = scheduler.measurements
    assert not measured.ran(scheduler.schedule(), 0.0, [0.1])  # nothing to hold it against
    assert measured.learn(None, SHAPE) is None
    assert measured.learn(DEVICE, SHAPE) == TIMES
    now = 1.0
    for _ in range(400):
        plan = scheduler.schedule()
        kv_tokens = sum(s.start + 1 for s in plan.sequences)
        began = now + LEARN_EVERY
        now = began + 2 * TIMES.step_ms([], len(plan.sequences), kv_tokens) / 1e3
        measured.ran(plan, began, [now])
        run(scheduler, plan)
    assert measured.times.step_ms([], 4, 2000) == pytest.approx(2 * TIMES.step_ms([], 4, 2000), rel=0.1)
    assert measured.interval_ms == pytest.approx(4 * TIMES.step_ms([], 4, 2000), rel=0.2)  # what a pause counts at most


# --- steps taken together


@settings(max_examples=60)
@given(
    work=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 150)), min_size=1, max_size=6),
    policy=st.sampled_from(sorted(LOCAL_POLICIES)),
    share=st.floats(0, 1),
    targets=st.booleans(),
    offline=st.booleans(),
)
def test_steps_that_repeat_are_those_that_would_have_been_planned(work, policy, share, targets, offline):
    promise = {"ttft_ms": 50.0, "tpot_ms": 9.0} if targets else {}
    together, alone = make_scheduler(policy), make_scheduler(policy)
    lengths = {}
    for i, (tokens, output) in enumerate(work):
        fields = {"offline": True} if offline and not i else promise
        for scheduler in (together, alone):
            scheduler.add(request(str(i), [i] * tokens, output, **fields))
        lengths[str(i)] = output
    now, saved = 0.0, 0
    while together.has_work:
        plan = together.schedule(now)
        most, ending = repeatable(together, plan, lengths)
        steps = int(share * most)
        saved += steps
        seen = [(s.request_id, s.start, list(s.tokens)) for s in plan.sequences]
        for k in range(steps + 1):
            other = alone.schedule(now)
            moved = [(name, start + k, tokens) for name, start, tokens in seen]
            assert [(s.request_id, s.start, list(s.tokens)) for s in other.sequences] == moved
            assert k in (0, steps) or alone.num_running == len(moved)
            run(alone, other)
            now += 0.008
        run(together, plan)
        ends = ending and steps == most
        if steps:
            repeat(together, plan, steps - ends)
        if ends:
            before = together.num_running
            run(together, again(together, plan))
            assert together.num_running < before
        together.check()
    assert not alone.has_work
    assert set(alone.pool.keys()) == set(together.pool.keys())
    if share == 1 and not offline and min(output for _, output in work) > 10:
        assert saved


# --- sizes


def test_sizes_are_what_was_asked_or_what_fits():
    asked = {"max_model_len": 4096, "max_num_seqs": 32, "step_time_limit_ms": 50.0}
    free = {"kv_blocks": None, "max_num_batched_tokens": None}
    sizes = sized(DEVICE, SHAPE, **asked, **free)
    assert sizes.num_blocks == 32 * 64  # more could not be used
    assert TIMES.step_ms([(sizes.token_budget, 0)]) <= 50.0 < TIMES.step_ms([(sizes.token_budget + 64, 0)])
    assert sized(DEVICE, SHAPE, **asked | {"max_num_seqs": 1000}, **free).num_blocks == fitting_blocks(DEVICE, SHAPE)
    given = sized(DEVICE, SHAPE, **asked, kv_blocks=100, max_num_batched_tokens=77)
    assert (given.num_blocks, given.token_budget) == (100, 77)
    least = sized(DEVICE, SHAPE, **asked, kv_blocks=64, max_num_batched_tokens=32)
    assert (least.num_blocks, least.token_budget) == (64, 32), "one request of the model's length, a token for each"


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"kv_blocks": 10**7}, "kv-blocks", r"10000000, allowed are up to \d+ beside the weights"),
        ({"kv_blocks": 0}, "max-model-len", "4096 tokens need more KV than the 0 blocks there"),
        ({"kv_blocks": 63}, "max-model-len", "4096 tokens need more KV than the 63 blocks there"),
        ({"max_num_batched_tokens": 31}, "max-num-batched-tokens", r"31, allowed is at least max-num-seqs \(32\)"),
    ],
)
def test_sizes_that_cannot_be_are_named(change, field, message):
    asked = {"max_model_len": 4096, "max_num_seqs": 32, "kv_blocks": None, "max_num_batched_tokens": None}
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        sized(DEVICE, SHAPE, **asked | change, step_time_limit_ms=50.0)
    assert caught.value.field == field


def test_weights_that_do_not_fit_leave_no_blocks():
    assert fitting_blocks(DEVICES["l40s"], GEOMETRIES["qwen3-32b"]) == 0


@pytest.mark.parametrize("then", ["again", "cancelled", "client lost"])
def test_what_failed_here_ends_no_later_attempt(intake, then):
    enqueue(intake, "a", request())
    intake.scheduler.cancel("r")
    intake.failed(TokenOutput("r", [], finish=FinishReason.ABORT))  # its hand-off; told after this turn
    if then == "again":
        assert enqueue(intake, "a", request(), 1) is None
    elif then == "cancelled":
        intake.obey("a", Cancel(7, ["r"]))
    else:
        intake.drop_client("a")
    assert intake.address(intake.take_failed()) == {}
    assert len(intake) == (then == "again")
    intake.check()


def test_a_beam_search_is_not_handed_over(intake):
    intake.hand_off(None, 1.0)  # a carrier that would be missed
    asked = replace(request(), params=SamplingParams(n=2, use_beam_search=True))
    assert enqueue(intake, "a", asked, route=[Leg("decode", Peer("other", 1, ""))]) is None
    assert not intake.scheduler.sequence("r").migrates
    assert not intake.handoffs.busy
    assert not intake.owner("r").migrates


def test_where_nothing_searches_a_beam_search_is_refused(intake):
    intake.scheduler.limits = replace(intake.scheduler.limits, searches=False)
    asked = replace(request(), params=SamplingParams(n=2, use_beam_search=True))
    why, message = enqueue(intake, "a", asked)
    assert (why, message.partition(":")[0]) == ("invalid", "use_beam_search")
