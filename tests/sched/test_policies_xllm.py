"""xLLM: dispatch under predicted latency, roles that change, and offline work beside online."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster import ClusterView, InstanceLoad, Later, Rates, Resident, fitting
from penstock.sched.cluster.colocation import (
    AHEAD,
    PASSED,
    Colocated,
    ColocatedRoles,
    LatencyRoles,
)
from penstock.sched.cluster.elastic_roles import DWELL, ElasticRoles, turning
from penstock.sched.cluster.xllm import Xllm, make_xllm
from penstock.sim.baselines.colocation import OnlineFirst, Separate
from tests.helpers.policies import Subject, ToyMaster, clusters, demand, instance, workloads

NOW = 100.0
RNG = random.Random(0)
ONLINE = {"ttft": 1.0, "tpot": 0.05}
BUSY = {"requests": 20, "decoding": 20, "held_tokens": 20_000, **ONLINE}


def online(key="r", prompt_tokens=2000, **values):
    return demand(key, prompt_tokens, **({"arrived": NOW} | ONLINE | values))


def prefilling(seconds, **values):
    """It has prompts to prefill for so long."""
    tokens = int(seconds * 65_000)
    ahead = {"free_at": NOW + seconds, "idle_at": NOW + seconds, "prefilling": 1, "pending_tokens": tokens}
    return ahead | ONLINE | values


def cluster(**loads):
    """By name; "p..." are of role prefill, "d..." decode, "a..." any. All are linked with all."""
    roles = {"p": "prefill", "d": "decode", "a": "any"}
    peers = {name: frozenset(loads) - {name} for name in loads}
    return [
        instance(name, roles[name[0]], peers=peers[name], num_blocks=8192, **({"free_blocks": 8192} | load))
        for name, load in loads.items()
    ]


def view(instances, queue=(), offline=(), now=NOW):
    return ClusterView(now=now, instances=instances, queue=queue, offline=offline, rates=Rates(output_tokens=30.0))


def decide(instances, *queue, policy=None):
    return (policy or make_xllm()[0]).decide(view(instances, queue), RNG)


def settle(instances, one, at, policy=None):
    """Where one decodes whose prompt has ended at an instance, of which that is counted."""
    there = [
        replace(i, requests=i.requests + 1, decoding=i.decoding + 1, held_tokens=i.held_tokens + one.prompt_tokens)
        if i.name == at
        else i
        for i in instances
    ]
    resident = Resident(demand=one, at=at, since=NOW)
    return (policy or make_xllm()[0]).migrate(view(there), [resident])


def moved(instances, moves):
    roles = {move.name: move.role for move in moves}
    return [replace(i, role=roles.get(i.name, i.role)) for i in instances]


class ElasticMaster(ToyMaster):
    """Pools may change, and a decoder may prefill a prompt that it keeps."""

    @property
    def _migration(self):
        return getattr(self.policy, "_dispatch", self.policy)

    def _apply(self, now, decision):
        self._change_roles(decision.moves)
        super()._apply(now, decision)

    def _change_roles(self, moves):
        for move in moves:
            machine = self.machines[move.name]
            machine.load, machine.seen = replace(machine.load, role=move.role), None

    def _check(self, one, decision, prefiller, home):
        super()._check(one, decision, replace(prefiller, role="any") if decision.decode is None else prefiller, home)


def run(make, data) -> ElasticMaster:
    """Place a random workload on random instances, each linked with all; decide all of it once more."""
    instances = data.draw(clusters())
    names = frozenset(i.name for i in instances)
    instances = [replace(i, peers=names - {i.name}) for i in instances]
    demands = [one for one in data.draw(workloads(sorted(names))) if fitting(view(instances), one)]
    master = ElasticMaster(instances, Subject(make, minds_memory=False))
    assert master.run(demands).keys() == {one.key for one in demands}
    again, rng = make(), random.Random(0)
    assert [again.decide(seen, rng) for seen, _ in master.asked] == [answer for _, answer in master.asked]
    return master


# --- dispatch


@settings(max_examples=60)
@given(data=st.data())
def test_places_everything_once_and_keeps_decoders(data):
    master = run(lambda: make_xllm()[0], data)
    for seen, answer in master.asked:
        before = sum(i.role == "decode" for i in seen.instances)
        after = sum(i.role == "decode" for i in moved(seen.instances, answer.moves))
        assert after >= min(before, 2 if len(seen.instances) > 3 else 1)


def test_the_prefiller_with_the_earliest_first_token_gets_it():
    decision = decide(cluster(p0=prefilling(0.15), p1=prefilling(0.05), d0={}, d1={}), online())
    assert decision.prefill == "p1"
    assert decision.costs["prefill"]["p1"] < decision.costs["prefill"]["p0"]
    assert not decision.moves


def test_hit_load_and_queue_are_weighed_within_a_pool():
    one = online(prompt_tokens=20_000, hits={"p1": 19_200, "d0": 19_200})
    d = {"d0": {}, "d1": {}}
    assert decide(cluster(p0={}, p1={}, **d), one).prefill == "p1"
    assert decide(cluster(p0={}, p1=prefilling(0.1), **d), one).prefill == "p1", "it waits less than it saves"
    assert decide(cluster(p0={}, p1=prefilling(0.9), **d), one).prefill == "p0"
    slow = replace(one, loads={"p1": {"host": 19_200}})
    (holder,) = (i for i in cluster(p1={}) if i.name == "p1")
    gain = holder.prefill_seconds(20_000) - holder.prefill_seconds(800, 19_200) - holder.load_seconds(slow)
    assert (decide(cluster(p0={}, p1={}, **d), slow).prefill == "p1") == (gain > 0)
    assert gain > 0, "this device loads faster than it computes"
    assert decide(cluster(p0={}, p1={}, **d), replace(one, hits={"d0": 19_200})).prefill == "p0", "pools go before hits"


def test_who_has_the_prompt_is_compared_however_many_wait_less():
    others = {f"p{k}": {} for k in range(1, 40)}
    loads = cluster(p0=prefilling(0.05), **others, d0={}, d1={})
    assert decide(loads, online(prompt_tokens=20_000, hits={"p0": 19_200})).prefill == "p0"


def test_prefillers_that_still_decode_are_asked_only_when_the_others_are_late():
    turned = {"p1": BUSY, "d0": {}, "d1": {}}
    assert decide(cluster(p0=prefilling(0.1), **turned), online()).prefill == "p0"
    assert decide(cluster(p0=prefilling(0.5), **turned), online()).prefill == "p0"
    assert decide(cluster(p0=prefilling(1.1), **turned), online()).prefill == "p1"
    # nor is it believed that it will be in time, where others were not
    assert decide(cluster(p0=prefilling(0.5, ttft_measured=1.2), **turned), online()).prefill == "p1"
    assert decide(cluster(p0={"ttft_measured": 1.2}, **turned), online()).prefill == "p0"


def test_the_lightest_decoder_becomes_a_prefiller_when_prefillers_are_late():
    loads = {"d0": BUSY, "d1": BUSY | {"held_tokens": 10_000}, "d2": BUSY}
    decision = decide(cluster(p0=prefilling(1.1), **loads), online())
    assert decision.prefill == "d1"
    assert [(move.name, move.role) for move in decision.moves] == [("d1", "prefill")]
    assert decision.reason == "converted"
    # but not for who has no target
    assert decide(cluster(p0=prefilling(1.1), **loads), online(ttft=inf)).prefill == "p0"


def test_decoders_that_still_prefill_leave_first():
    loads = {"d0": BUSY, "d1": BUSY | prefilling(0.05, held_tokens=30_000), "d2": BUSY}
    decision = decide(cluster(p0=prefilling(1.1), **loads), online())
    assert [move.name for move in decision.moves] == ["d1"]


@pytest.mark.parametrize(("decoders", "stay"), [(5, 2), (2, 1)])
def test_a_burst_turns_all_but_the_last_decoders_at_once(decoders, stay):
    policy = make_xllm()[0]
    instances = cluster(p0=prefilling(3.0), **{f"d{k}": {} for k in range(decoders)})
    for number in range(20):
        decision = decide(instances, online(str(number)), policy=policy)
        instances = [
            replace(i, **prefilling(max(0.0, i.free_at - NOW) + 0.3)) if i.name == decision.prefill else i
            for i in moved(instances, decision.moves)
        ]
    assert sum(i.role == "decode" for i in instances) == stay


def test_nobody_leaves_decoders_that_cannot_do_without():
    strained = BUSY | {"interval": 0.08}
    instances = cluster(p0=prefilling(1.1), d0=strained, d1=strained, d2=strained)
    assert not decide(instances, online(prompt_tokens=6000)).moves
    at_ease = [replace(i, interval=0.01) if i.name == "d2" else i for i in instances]
    assert [move.name for move in decide(at_ease, online(prompt_tokens=6000)).moves] == ["d0"]


def test_the_last_decoders_prefill_what_fits_into_a_step():
    instances = cluster(p0=prefilling(1.1), p1=prefilling(1.1), d0=BUSY, d1=BUSY | prefilling(0.04))
    decision = decide(instances, online())
    assert (decision.prefill, decision.decode, decision.moves) == ("d0", None, [])
    assert decision.reason == "spare-decoder"
    assert decide(instances, online(prompt_tokens=6000)).prefill == "p0"  # its step would be too long


def test_when_nobody_is_in_time_it_is_prefilled_where_that_is_soonest():
    instances = cluster(p0=prefilling(5.0), p1=prefilling(4.0), d0=BUSY | prefilling(6.0), d1=BUSY | prefilling(7.0))
    decision = decide(instances, online())
    assert decision.prefill == "p1"
    assert decision.reason.startswith("late")
    assert decision.predicted_ttft > 4.0


def test_it_decodes_where_it_was_prefilled_while_that_keeps_its_pace():
    idle = cluster(p0={}, p1=prefilling(0.3), d0={}, d1={})
    decision = decide(idle, online(prompt_tokens=500))
    assert (decision.prefill, decision.decode, decision.open) == ("p0", None, True)
    assert settle(idle, online(prompt_tokens=500), "p0").to == "p0"
    assert settle(idle, online(prompt_tokens=500, tpot=0.01), "p0").to == "d0"
    # with as much again it would not
    assert settle(idle, online(prompt_tokens=4000), "p0").to == "d0"


def test_it_decodes_where_the_fewest_tokens_are_and_its_pace_is_kept():
    one = online(prompt_tokens=4000)
    light, heavy = BUSY | {"held_tokens": 5_000}, BUSY | {"held_tokens": 9_000}
    assert settle(cluster(p0={}, d0=heavy, d1=light), one, "p0").to == "d1"
    assert settle(cluster(p0={}, d0=heavy, d1=light | {"interval": 0.06}), one, "p0").to == "d0"
    crowded = light | {"requests": 250, "held_tokens": 5_000}
    assert settle(cluster(p0={}, d0=heavy, d1=crowded), one, "p0").to == "d0"


def test_memory_counts_what_comes_and_not_what_offline_work_holds():
    one, capacity = online(prompt_tokens=4000), 8192 * BLOCK_TOKENS
    full = BUSY | {"held_tokens": int(capacity * 0.9)}
    instances = cluster(p0={}, d0=full, d1=BUSY | {"held_tokens": capacity // 2, "tpot": inf, "interval": 0.06})
    assert settle(instances, one, "p0").to == "d1"
    offline = {"offline_tokens": capacity // 2, "offline_requests": 10, "tpot": inf}
    assert settle(cluster(p0={}, d0=full | offline, d1=full), replace(one, tpot=0.1), "p0").to == "d0"


def test_a_prefiller_becomes_a_decoder_when_no_decoder_keeps_the_pace():
    slow = BUSY | {"interval": 0.08}
    loads = cluster(p0=prefilling(0.02), p1=BUSY | {"pending_tokens": 0}, d0=slow)
    migration = settle(loads, online(prompt_tokens=4000), "p0")
    assert migration.to == "p1"
    assert [(move.name, move.role) for move in migration.moves] == [("p1", "decode")]
    # unless the prefillers that stay would be late
    assert not settle(cluster(p0=prefilling(3.0), p1=BUSY, d0=slow), online(prompt_tokens=4000), "p0").moves


def test_whose_instance_has_gone_waits():
    assert make_xllm()[0].migrate(view(cluster(d0={})), [Resident(demand=online(), at="p0", since=NOW)]) == Later()


def test_without_roles_pools_stay_as_they_are():
    instances = cluster(p0=prefilling(1.1), d0={}, d1={}, d2={})
    assert not decide(instances, online(), policy=Xllm()).moves


def test_instances_of_any_do_both():
    decision = decide(cluster(a0=prefilling(0.1), a1={}), online())
    assert (decision.prefill, decision.decode) == ("a1", None)


# --- roles


def names(moves):
    return [(move.name, move.role) for move in moves]


def test_turning_is_having_work_of_the_other_pool():
    turned = {i.name for i in cluster(p0=BUSY, p1=prefilling(1.0), d0=BUSY, d1=prefilling(1.0), a0=BUSY) if turning(i)}
    assert turned == {"p0", "d1"}
    (offline,) = cluster(p0={"requests": 3, "decoding": 3, "offline_requests": 3})
    assert not turning(offline)


@pytest.mark.parametrize(
    "trouble",
    [{"interval": 0.06}, {"held_tokens": int(0.95 * 8192 * BLOCK_TOKENS), "tpot": 9.0}, {"requests": 250}],
)
def test_a_prefiller_helps_decoders_in_trouble(trouble):
    loads = {"d0": BUSY | trouble, "d1": BUSY | trouble}
    # first one that decodes already
    assert names(ElasticRoles().decide(view(cluster(p0={}, p1=BUSY, **loads)))) == [("p1", "decode")]
    assert names(ElasticRoles().decide(view(cluster(p0=prefilling(0.1), p1={}, **loads)))) == [("p1", "decode")]
    # the last prefiller stays, and those that are needed
    assert not ElasticRoles().decide(view(cluster(p0={}, **loads)))
    assert not ElasticRoles().decide(view(cluster(p0=prefilling(2.0), p1=prefilling(2.0), **loads)))
    assert not ElasticRoles().decide(view(cluster(p0={}, p1={}, d0=BUSY, d1=BUSY | trouble)))


def test_an_idle_prefiller_helps_busy_decoders_after_a_while():
    half = BUSY | {"held_tokens": int(0.6 * 8192 * BLOCK_TOKENS), "tpot": 1.0}
    instances, roles = cluster(p0={}, p1={}, d0=half, d1=half), ElasticRoles()
    assert not roles.decide(view(instances))
    assert names(roles.decide(view(instances, now=NOW + DWELL))) == [("p0", "decode")]
    easy, roles = cluster(p0={}, p1={}, d0=BUSY, d1=BUSY), ElasticRoles()
    assert not roles.decide(view(easy))
    assert not roles.decide(view(easy, now=NOW + DWELL))


def test_late_prefillers_get_a_decoder_by_the_clock_as_well():
    assert names(ElasticRoles().decide(view(cluster(p0=prefilling(1.5), d0={}, d1=BUSY, d2=BUSY)))) == [
        ("d0", "prefill")
    ]


def test_who_has_moved_stays_a_while_unless_a_target_is_missed():
    half = BUSY | {"held_tokens": int(0.6 * 8192 * BLOCK_TOKENS), "tpot": 1.0}
    policy, roles = make_xllm()
    # the dispatch policy has moved d0
    first = decide(cluster(p0=prefilling(1.1), d0={}, d1=half, d2=half), online(), policy=policy)
    assert names(first.moves) == [("d0", "prefill")]
    instances = moved(cluster(p0={"pending_tokens": 100}, d0={}, d1=half, d2=half), first.moves)
    at = NOW + 0.01
    assert not roles.decide(view(instances, now=at))
    assert not roles.decide(view(instances, now=at + DWELL / 2))
    missed = [replace(i, interval=2.0) if i.role == "decode" else i for i in instances]
    assert names(roles.decide(view(missed, now=at + DWELL / 2))) == [("d0", "decode")]


def test_a_decoder_with_nothing_online_prefills_offline_prompts():
    offline = [demand("o", 2000, offline=True)]
    quiet = {"requests": 5, "offline_requests": 5, "decoding": 5, "held_tokens": 9_000, "offline_tokens": 9_000}
    instances = cluster(p0={}, d0=BUSY, d1=quiet, d2=BUSY)
    assert names(ElasticRoles().decide(view(instances, offline=offline))) == [("d1", "prefill")]
    assert not ElasticRoles().decide(view(instances))
    assert not ElasticRoles().decide(view(instances[:1] + instances[2:], [online()], offline))


# --- offline beside online

COLOCATIONS = {"separate": Separate, "online-first": OnlineFirst, "xllm": LatencyRoles}


def offline_work(*lengths):
    return [demand(f"o{k}", tokens, 200, offline=True) for k, tokens in enumerate(lengths)]


@pytest.mark.parametrize("name", COLOCATIONS)
@settings(max_examples=40)
@given(data=st.data())
def test_online_and_offline_are_both_placed(name, data):
    run(lambda: Colocated(make_xllm()[0], COLOCATIONS[name]()), data)


def flood(colocation, instances, lengths) -> list[InstanceLoad]:
    """Ask again and again with everything counted, as a master with an endless backlog does."""
    for _ in range(10_000):
        decision = colocation.decide(view(instances, offline=offline_work(*lengths)))
        if isinstance(decision, Later):
            assert NOW < decision.at < inf
            return instances
        tokens = lengths[int(decision.key[1][1:])]
        home = decision.decode or decision.prefill

        def after(i, decision=decision, home=home, tokens=tokens):
            if i.name == decision.prefill:
                seconds = max(0.0, i.idle_at - NOW) + i.prefill_seconds(tokens)
                i = replace(
                    i, idle_at=NOW + seconds, pending_tokens=i.pending_tokens + tokens, prefilling=i.prefilling + 1
                )
            if i.name == home:
                counted = {"offline_requests": i.offline_requests + 1, "offline_tokens": i.offline_tokens + tokens}
                i = replace(i, requests=i.requests + 1, held_tokens=i.held_tokens + tokens, **counted)
            return i

        instances = [after(i) for i in instances]
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("name", COLOCATIONS)
def test_a_backlog_does_not_flood_the_engines(name):
    after = flood(COLOCATIONS[name](), cluster(p0={}, p1={}, d0=BUSY, d1={}), [2000])
    assert any(i.offline_requests for i in after)
    for i in after:
        assert i.idle_at - NOW < 2 * AHEAD + 0.2
        assert i.held_tokens < i.num_blocks * BLOCK_TOKENS
        assert i.requests < i.max_sequences


def test_a_share_of_the_instances_is_apart():
    instances = cluster(**{f"p{k}": {} for k in range(4)}, **{f"d{k}": {} for k in range(4)})
    colocation = Separate(0.25)
    granted = {i.name for i in colocation.online(view(instances))}
    assert len(granted) == 6
    assert len([name for name in granted if name[0] == "p"]) == 3
    assert colocation.decide(view(instances, offline=offline_work(2000))).decode is None
    after = flood(colocation, instances, [2000])
    assert {i.name for i in after if i.offline_requests} == {i.name for i in instances} - granted


def test_online_work_never_goes_to_those_apart():
    instances = cluster(a0={}, a1={}, a2={}, a3={})
    policy, apart = Colocated(make_xllm()[0], Separate(0.5)), {"a1", "a3"}
    for number in range(10):
        assert decide(instances, online(str(number)), policy=policy).prefill not in apart
    roles = ColocatedRoles(ElasticRoles(), Separate(0.5))
    loads = cluster(p0=prefilling(5.0), p1={}, p2=prefilling(5.0), d0={}, d1={}, d2={}, d3=BUSY, d4=BUSY)
    granted = {i.name for i in Separate(0.5).online(view(loads))}
    assert {move.name for move in roles.decide(view(loads))} <= granted


def test_online_first_leaves_the_gaps_to_offline_work():
    policy = Colocated(make_xllm()[0], OnlineFirst())
    instances = cluster(p0={}, d0=BUSY, d1={})
    both = view(instances, [online()], offline_work(2000))
    assert policy.decide(both, RNG).key == ("f", "r")
    assert policy.decide(replace(both, queue=()), RNG).key == ("f", "o0")
    assert isinstance(OnlineFirst().decide(both), Later)


def test_offline_prompts_are_prefilled_by_relaxed_instances_in_gaps():
    work = offline_work(2000)
    decision = LatencyRoles().decide(view(cluster(p0=prefilling(0.1), p1=BUSY, d0={}), offline=work))
    assert decision.prefill == "p1"
    later = LatencyRoles().decide(view(cluster(p0=prefilling(0.1), p1=prefilling(0.1), d0={}), offline=work))
    assert isinstance(later, Later)
    assert isinstance(LatencyRoles().decide(view(cluster(p0={}, d0={}), [online()], work)), Later)


def test_a_strict_instance_pulls_while_it_keeps_the_strictest_target():
    work, roomy = offline_work(2000), BUSY
    decision = LatencyRoles().decide(view(cluster(p0={}, d0=roomy, d1=BUSY | {"held_tokens": 90_000}), offline=work))
    assert (decision.prefill, decision.decode, decision.reason) == ("p0", "d0", "offline-pulled")
    tight = BUSY | {"tpot": 0.004}
    decision = LatencyRoles().decide(view(cluster(p0={}, d0=tight, d1=tight), offline=work))
    assert (decision.prefill, decision.decode, decision.reason) == ("p0", None, "offline-relaxed")


def test_a_target_is_remembered_after_its_sequences_have_gone():
    colocation, tight = LatencyRoles(), cluster(p0={}, d0=BUSY | {"tpot": 0.004})
    colocation.decide(view(tight, offline=offline_work(2000)))
    later = cluster(p0={}, d0={"requests": 20, "offline_requests": 20, "held_tokens": 20_000})
    assert colocation.decide(view(later, offline=offline_work(2000), now=NOW + 1)).decode is None
    assert colocation.decide(view(later, offline=offline_work(2000), now=NOW + 99)).decode == "d0"


@pytest.mark.parametrize(("held_per_sequence", "chosen"), [(2_000, "o1"), (1, "o2")])
def test_offline_sequences_move_a_batch_toward_the_balance(held_per_sequence, chosen):
    # hundreds of short sequences keep the arithmetic busier than the memory
    strict = {"requests": 450, "decoding": 450, "held_tokens": 450 * held_per_sequence, "tpot": 1.0}
    large = {"max_sequences": 1024, "num_blocks": 100_000, "free_blocks": 100_000}
    instances = [replace(i, **large) for i in cluster(p0={}, d0=strict)]
    decision = LatencyRoles().decide(view(instances, offline=offline_work(3000, 300, 9000)))
    assert decision.key == ("f", chosen)


def test_the_oldest_is_not_passed_over_for_ever():
    colocation, instances = LatencyRoles(), cluster(p0={}, d0=BUSY)
    taken = []
    for number in range(PASSED + 1):
        work = [demand("long", 20_000, offline=True), demand(f"short{number}", 100, offline=True)]
        taken.append(colocation.decide(view(instances, offline=work)).key[1])
    assert taken == [*(f"short{k}" for k in range(PASSED)), "long"]
