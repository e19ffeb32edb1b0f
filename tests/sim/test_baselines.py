"""What holds for every dispatch policy that makes sequences wait; and SCORPIO, Aladdin and annealing each by itself."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.plan import StepResult
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.kv.pool import BlockPool
from penstock.sched.cluster import ClusterView, Later, Rates, fitting
from penstock.sched.local import Limits, Scheduler
from penstock.sim.baselines.aladdin import Aladdin
from penstock.sim.baselines.annealing import Annealing
from penstock.sim.baselines.scorpio import Scorpio
from penstock.sim.baselines.unchunked import Unchunked
from tests.helpers.policies import SUBJECTS, ToyMaster, clusters, demand, drain, instance, linked, workloads

every_policy = pytest.mark.parametrize("name", SUBJECTS)


@every_policy
@settings(max_examples=40)
@given(data=st.data())
def test_everything_is_placed_once_where_it_fits_and_again_the_same_way(name, data):
    instances = data.draw(clusters())
    demands = [
        d
        for d in data.draw(workloads([i.name for i in instances]))
        if fitting(ClusterView(now=0.0, instances=instances), d)
    ]
    master = ToyMaster(instances, SUBJECTS[name])
    assert master.run(demands).keys() == {d.key for d in demands}
    again, rng = SUBJECTS[name].make(), random.Random(0)
    for view, verdict in master.asked:
        # of lists that know nothing of earlier views, as a replay has them
        plain = replace(view, instances=tuple(view.instances), queue=tuple(view.queue), offline=tuple(view.offline))
        assert again.decide(plain, rng) == verdict


RATES = Rates(output_tokens=32.0)
BUSY = {"requests": 40, "decoding": 40, "held_tokens": 20_000, "ttft": 1.0}


def view(instances, *queue, now=0.0):
    return ClusterView(now=now, instances=instances, queue=queue, rates=RATES)


def placed(policy, instances, *queue):
    """(request, prefill, decode) of every decision of one moment."""
    return [(d.key[1], d.prefill, d.decode) for d in drain(policy, instances, *queue)[0]]


def test_scorpio_goes_round_and_orders_what_waits_for_an_instance_by_deadline():
    loads = [instance("a"), instance("b")]
    queue = [demand(f"r{i}", ttft=9.0 - i) for i in range(4)]
    assert placed(Scorpio(), loads, *queue) == [
        ("r3", "b", None),
        ("r2", "a", None),
        ("r1", "b", None),
        ("r0", "a", None),
    ]
    late = demand("late", arrived=-9.0, ttft=1.0)
    assert [key for key, _, _ in placed(Scorpio(), loads, late, *queue)][-1] == "late"


def test_scorpio_keeps_to_the_instance_of_the_round_and_to_its_strictest_tpot():
    slow = instance("slow", tpot=0.004, **BUSY)
    assert slow.decode_seconds > slow.tpot
    queue = [demand(f"r{i}", ttft=9.0, tpot=0.1) for i in range(4)]
    assert placed(Scorpio(), [slow, instance("idle")], *queue) == [("r1", "idle", None), ("r3", "idle", None)]


def test_scorpio_holds_back_what_its_instance_could_not_begin_within_a_step():
    prefilling = instance("a", free_at=0.5, pending_tokens=8000)
    assert placed(Scorpio(), [prefilling], demand("r", 500, ttft=9.0)) == []
    assert Scorpio().decide(view([prefilling], demand("r", 500, ttft=9.0)), random.Random(0)) == Later(0.5)
    assert placed(Scorpio(), [prefilling], demand("r", 100, ttft=9.0)) == [("r", "a", None)]


def test_scorpio_goes_round_the_decoders_too():
    loads = linked(instance("p", "prefill"), *(instance(f"d{i}", "decode") for i in range(3)))
    found = placed(Scorpio(), loads, *(demand(f"r{i}", ttft=9.0) for i in range(4)))
    assert [decode for _, _, decode in found] == ["d0", "d1", "d2", "d0"]


def test_aladdin_fills_the_fullest_that_keeps_every_target():
    half = instance("half", tpot=0.05, **BUSY)
    slow = instance("slow", requests=60, decoding=60, held_tokens=40_000, tpot=0.004)
    queued = instance("queued", requests=60, held_tokens=40_000, free_at=2.0, tpot=0.05)
    loads = [instance("idle"), half, slow, queued]
    assert placed(Aladdin(), loads, demand("r", ttft=1.0, tpot=0.05)) == [("r", "half", None)]
    assert placed(Aladdin(), loads, demand("r", ttft=5.0, tpot=0.05)) == [("r", "queued", None)], "it has the time"
    assert placed(Aladdin(), loads, demand("r", ttft=1.0, tpot=half.decode_seconds)) == [("r", "idle", None)]
    # as much to prefill as the running ones have not saved
    assert placed(Aladdin(), loads, demand("r", 40_000, ttft=9.0, tpot=0.05)) == [("r", "idle", None)]


def test_aladdin_packs_decoders():
    fuller, emptier = (
        instance(n, "decode", requests=r, held_tokens=r * 500, tpot=0.05) for n, r in [("f", 40), ("e", 4)]
    )
    loads = linked(instance("p", "prefill"), emptier, fuller)
    assert placed(Aladdin(), loads, demand("r", ttft=1.0, tpot=0.05)) == [("r", "p", "f")]


def test_annealing_finds_an_order_that_keeps_more_targets_than_either_it_begins_with():
    load = instance("a", token_budget=512)
    prefill = load.prefill_seconds(20_000)
    # by arrival the short ones are late; by deadline the first two long ones are prefilled for nothing
    long = [demand(f"long{i}", 20_000, ttft=0.5 * prefill + i * 1e-3) for i in range(2)]
    short = [demand(f"short{i}", 500, ttft=0.7 * prefill + i * 1e-3) for i in range(4)]
    rng = random.Random(0)
    decision = Annealing(iterations=400).decide(view([load], *long, *short), rng)
    assert decision.key[1].startswith("short")


def test_annealing_spreads_over_instances_and_sends_no_more_than_a_step_ahead():
    loads = [instance(f"a{i}") for i in range(4)]
    found = placed(Annealing(), loads, *(demand(f"r{i}", 8000, ttft=1.0) for i in range(4)))
    assert {name for _, name, _ in found} == {"a0", "a1", "a2", "a3"}
    prefilling = instance("a", free_at=0.3, pending_tokens=8000)
    assert Annealing().decide(view([prefilling], demand("r", 500, ttft=9.0)), random.Random(0)) == Later(0.3)


# --- engines


def test_unchunked_engines_prefill_whole_prompts_in_order_of_arrival_and_decode_in_other_steps():
    limits = Limits(token_budget=1000, max_sequences=8, max_model_len=4000)
    scheduler = Scheduler(limits, BlockPool(range(400)), policy=Unchunked())

    def step(*, takes):
        plan = scheduler.schedule()
        assert {s.request_id: len(s.tokens) for s in plan.sequences} == takes
        sampled = sum(s.sample for s in plan.sequences)
        scheduler.update(plan, StepResult([[1]] * sampled, [None] * sampled), 0.0, 0.0)

    def add(name, prompt, **more):
        tokens, params = [prompt] * prompt, SamplingParams()
        request = Request(id=name, prompt=tokens, params=params, seed=0, stop_ids=frozenset(), max_tokens=3, **more)
        scheduler.add(request)

    add("first", 300, priority=3)
    add("whole", 600, offline=True)
    add("no-room", 200, priority=-1)
    step(takes={"first": 300, "whole": 600})
    step(takes={"no-room": 200})
    add("long", 1800)
    step(takes={"long": 1000})
    step(takes={"long": 800})
    step(takes={"first": 1, "whole": 1, "no-room": 1, "long": 1})
