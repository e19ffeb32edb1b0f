"""HFX's dispatch: maturity, budgets, urgency, and both stages of a disaggregated cluster."""

import random
from math import inf

import pytest
from msgspec.structs import replace

from penstock.sched.cluster import ClusterView, Decision, Later, Rates, Resident
from penstock.sched.cluster.foresight import prefill_seconds_alone
from penstock.sched.cluster.hfx import HFX
from penstock.sched.steptime import StepTime
from tests.helpers.policies import OUTPUT, SUBJECTS, TIMES, ToyMaster, demand, drain, instance, linked

RATES = Rates(output_tokens=float(OUTPUT))
RNG = random.Random(0)
BUSY = {"requests": 40, "decoding": 40, "held_tokens": 20_000, "ttft": 1.0}


def view(instances, *queue, now=0.0):
    return ClusterView(now=now, instances=instances, queue=queue, rates=RATES)


def names(decisions):
    return [d.key[1] for d in decisions]


def test_a_batch_is_paid_for_within_half_of_the_strictest_ttft():
    load = instance("a", tpot=0.02, num_blocks=8192, **BUSY)
    queue = [demand(f"r{i}", 1000, ttft=1.0, tpot=0.1) for i in range(60)]
    decisions, mature_at = drain(HFX(), [load], *queue)
    share = 1 - load.decode_seconds / 0.02
    assert 0 < share < 1

    def paid_for(count):
        return prefill_seconds_alone(load, 1000 * count) / share

    assert paid_for(len(decisions)) <= 0.5 < paid_for(len(decisions) + 1)
    assert mature_at == pytest.approx(paid_for(len(decisions)))
    assert decisions[-1].predicted_ttft == pytest.approx(mature_at)


def test_what_is_dispatched_counts_among_the_tpots_that_are_to_be_kept():
    load = instance("a", tpot=inf, num_blocks=8192, **BUSY)
    loose = [demand(f"r{i}", 1000, ttft=1.0) for i in range(60)]
    strict = [replace(d, tpot=1.5 * load.decode_seconds) for d in loose]
    many, few = (len(drain(HFX(), [load], *queue)[0]) for queue in (loose, strict))
    assert few == pytest.approx(many / 3, abs=2)


def test_nothing_goes_where_the_strictest_tpot_is_used_up_and_an_idle_one_takes_it():
    full = instance("full", tpot=0.004, **BUSY)
    assert full.decode_seconds > full.tpot
    late_at = 1.0 - prefill_seconds_alone(full, 256)
    verdict = HFX().decide(view([full], demand("r", ttft=1.0, tpot=0.1)), RNG)
    assert verdict == Later(pytest.approx(late_at))
    assert HFX().decide(view([full, instance("idle")], demand("r", ttft=1.0, tpot=0.1)), RNG).prefill == "idle"


def test_a_tpot_that_nobody_could_keep_holds_nobody_back():
    hopeless = instance("a", tpot=1e-6, **BUSY)
    assert isinstance(HFX().decide(view([hopeless], demand("r", ttft=1.0, tpot=0.1)), RNG), Decision)
    assert isinstance(HFX().decide(view([hopeless], demand("r", ttft=1.0, tpot=1e-6)), RNG), Decision)


def test_nothing_more_until_maturity_and_then_whoever_matured_first():
    policy, both = HFX(), [instance("a"), instance("b")]
    first = policy.decide(view(both, demand("r0", 4000, ttft=1.0)), RNG)
    second = policy.decide(view(both, demand("r1", 2000, ttft=1.0), now=0.001), RNG)
    assert (first.prefill, second.prefill) == ("a", "b")
    later = policy.decide(view(both, demand("r2", 100, ttft=1.0), now=0.002), RNG)
    b_at = 0.001 + prefill_seconds_alone(both[1], 2000)
    assert later == Later(pytest.approx(b_at))
    a_at = prefill_seconds_alone(both[0], 4000)
    assert b_at < a_at
    assert policy.decide(view(both, demand("r2", 100, ttft=1.0), now=later.at), RNG).prefill == "b"
    assert policy.decide(view(both, demand("r3", 100, ttft=1.0), now=a_at + 1), RNG).prefill == "b", "it matured before"
    assert policy.decide(view(both, demand("r4", 100, ttft=1.0), now=a_at + 1.001), RNG).prefill == "a"


def test_an_instance_that_this_policy_never_saw_is_mature_when_its_prompts_are_prefilled():
    busy = instance("a", free_at=3.0)
    assert HFX().decide(view([busy], demand("r", ttft=1.0)), RNG) == Later(3.0)
    assert HFX().decide(view([busy], demand("r", ttft=9.0)), RNG) == Later(3.0)


def test_the_most_urgent_first_then_what_is_late_or_has_no_target_as_it_came():
    queue = [
        demand("none", 500),
        demand("late", 500, arrived=-5.0, ttft=1.0),
        demand("calm", 500, ttft=9.0),
        demand("long", 30_000, ttft=9.1),  # its prefill makes it more urgent than the one before
        demand("urgent", 500, ttft=1.0),
    ]
    decisions, _ = drain(HFX(), [instance(f"a{i}") for i in range(5)], *queue)
    assert names(decisions) == ["urgent", "long", "calm", "none", "late"]


def test_one_that_is_larger_than_any_budget_goes_by_itself():
    loads = [instance("a", tpot=0.02, **BUSY), instance("b"), instance("c")]
    small = [demand(f"s{i}", 300, ttft=0.2) for i in range(3)]
    large = demand("large", 50_000, ttft=20.0)
    decisions, _ = drain(HFX(), loads, *small, large)
    placed = {d.key[1]: d.prefill for d in decisions}
    assert placed.keys() == {"s0", "s1", "s2", "large"}
    assert placed["large"] not in {placed[f"s{i}"] for i in range(3)} | {"a"}, "alone, and where no decodes slow it"


@pytest.mark.parametrize("role", ["any", "prefill"])
def test_an_idle_instance_takes_a_prompt_of_any_length_whatever_the_first_one_is(role):
    """Prompts are ranked by what they take on the first instance, which may be slower or faster."""
    slow = StepTime(TIMES.device.slowed(2), TIMES.shape)
    loads = linked(instance("a", times=slow), instance("b", role), instance("c", times=slow))
    for tokens in range(100, 60_000, 500):
        asked = demand("r", tokens, ttft=1.0, exclude=frozenset("a"))
        for order in (loads, loads[::-1]):
            assert names(drain(HFX(), order, asked)[0]) == ["r"], tokens


def test_without_any_target_a_batch_is_what_one_step_prefills():
    decisions, _ = drain(HFX(), [instance("a", token_budget=1000)], *(demand(f"r{i}", 300) for i in range(9)))
    assert len(decisions) == 3


def test_a_prefill_batch_keeps_the_first_deadline_and_ends_before_the_next():
    pair = linked(instance("p", "prefill", num_blocks=8192), instance("d", "decode", num_blocks=8192))
    queue = [demand(f"r{i}", 2000, ttft=5.0) for i in range(40)] + [demand("soon", 2000, arrived=-0.5, ttft=1.0)]
    policy = HFX()
    decisions, _ = drain(policy, pair, *queue)
    assert decisions[0].key[1] == "soon"
    assert {(d.prefill, d.decode, d.open) for d in decisions} == {("p", None, True)}
    assert len(decisions) == 41, "with the most urgent one gone the rest has the time"
    ends_at = prefill_seconds_alone(pair[0], 2000 * 41)
    assert policy.decide(view(pair, demand("next", ttft=9.0), now=0.001), RNG) == Later(pytest.approx(ends_at))
    soon = [replace(d, key=("f", f"s{i}")) for i, d in enumerate([queue[-1]] * 60)]
    decisions, _ = drain(HFX(), pair, *soon)
    assert (
        prefill_seconds_alone(pair[0], 2000 * len(decisions))
        <= 0.5
        < prefill_seconds_alone(pair[0], 2000 * (len(decisions) + 1))
    )


def test_the_decoder_is_the_one_that_keeps_its_tempo_and_has_room():
    prefill = instance("p", "prefill")
    slow = instance("slow", "decode", tpot=0.004, **BUSY)
    full = instance("full", "decode", requests=2, held_tokens=65_400, tpot=0.1)
    fine = instance("fine", "decode", requests=60, held_tokens=30_000, tpot=0.1)
    one = demand("r", ttft=1.0, tpot=0.1)
    decision = HFX().decide(view(linked(prefill, slow, full, fine), one), RNG)
    assert (decision.prefill, decision.decode, decision.reason, decision.open) == ("p", None, "open", True)
    waits = [Resident(demand=one, at="p", since=0.0)]
    assert HFX().migrate(view(linked(prefill, slow, full, fine)), waits).to == "fine"
    assert isinstance(HFX().migrate(view(linked(prefill, slow, full)), waits), Later)
    unlinked = replace(prefill, unlinked={"fine": "no route"})
    assert HFX().decide(view([unlinked], demand("r", ttft=1.0)), RNG).reason == "no-decode: fine: no route"


def test_a_decoder_takes_the_most_urgent_and_is_mature_again_after_an_iteration():
    pair = linked(instance("p", "prefill"), instance("d", "decode", requests=10, held_tokens=20_000, tpot=0.1))
    calm, urgent = (demand(name, ttft=1.0, tpot=tpot) for name, tpot in (("calm", 0.5), ("urgent", 0.1)))
    waits = [Resident(demand=one, at="p", since=0.0) for one in (calm, urgent)]
    policy = HFX()
    assert policy.migrate(view(pair), waits).key == urgent.key
    assert policy.migrate(view(pair), waits[:1]).key == calm.key, "at the same moment"
    later = policy.migrate(view(pair, now=0.001), waits[:1])
    assert later == Later(pytest.approx(pair[1].decode_seconds))
    assert policy.migrate(view(pair, now=later.at), waits[:1]).key == calm.key


def test_one_that_only_decodes_is_asked_to_prefill_when_nobody_else_may():
    pair = linked(instance("p", "prefill", max_model_len=2048), instance("d", "decode", max_model_len=8192))
    plain, _ = drain(HFX(), pair, demand("a", 500, ttft=9.0), demand("b", 500, ttft=9.0))
    assert [set(d.costs["prefill"]) for d in plain] == [{"p"}, {"p"}], "no regret about who may not prefill"
    for queue in ([demand("long", 4000)], [replace(demand("barred", 500), exclude=frozenset({"p"}))]):
        decisions, _ = drain(HFX(), pair, *queue, demand("short", 500))
        assert {d.key[1]: d.prefill for d in decisions} == {queue[0].key[1]: "d", "short": "p"}


def test_offline_work_waits_until_nothing_is_to_be_prefilled_and_goes_to_whoever_has_least_to_do():
    offline = [demand("batch", offline=True)]
    prefilling = instance("a", idle_at=2.0, requests=1)
    busy = instance("b", requests=5, tpot=0.1)
    look = ClusterView(now=0.0, instances=[prefilling], offline=offline, rates=RATES)
    assert HFX().decide(look, RNG) == Later(2.0)
    look = replace(look, instances=[prefilling, busy, instance("c", requests=3, tpot=0.1)])
    assert HFX().decide(look, RNG).prefill == "c"
    assert HFX().decide(replace(look, queue=[demand("online", ttft=1.0)]), RNG).key[1] == "online"


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize(
    ("roles", "tokens", "blocks"), [(["any", "any"], 300, 32), (["prefill", "decode"], 1500, 128)], ids=["any", "apart"]
)
def test_no_class_starves_while_more_arrives_than_can_be_served(name, roles, tokens, blocks):
    loads = linked(*(instance(f"{role[0]}{i}", role, num_blocks=blocks) for i, role in enumerate(roles)))
    both = roles == ["any", "any"] or not SUBJECTS[name].minds_roles
    # an instance holds five or six at once, each for a quarter of a second
    between = 0.015 if both else 0.03
    count = int((SUBJECTS[name].patience + 1) / between)
    stream = [demand(f"s{i}", tokens, 20, arrived=i * between, ttft=0.4, tpot=0.05) for i in range(count)]
    odd = [
        demand("no target", 1500, 20, arrived=0.1),
        demand("late", 1500, 20, arrived=0.1, ttft=0.0001),
        demand("out of reach", 1500, 20, arrived=0.1, ttft=0.4, tpot=1e-6),
        demand("large", 7000, 20, arrived=0.1, ttft=0.4),
        demand("calm", 1500, 20, arrived=0.1, ttft=8.0, tpot=1.0),
    ]
    placed = ToyMaster(loads, SUBJECTS[name]).run(sorted(stream + odd, key=lambda d: d.arrived))
    last = stream[-1].arrived
    assert max(when for when, _ in placed.values()) > last + 0.3, "there was more than could be served"
    assert all(placed[d.key][0] < last for d in odd)
