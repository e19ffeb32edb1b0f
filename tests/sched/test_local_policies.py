"""How steps are paced: whose prompt is read next, how much of it, and what is left for offline work."""

import random
import re
from dataclasses import replace
from math import inf
from statistics import mean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.plan import StepPlan, StepResult
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.kv.pool import BlockPool
from penstock.sched.local import LOCAL_POLICIES, Limits, Scheduler
from penstock.sched.local.policy.base import LEAST, StepLimit
from penstock.sched.local.policy.slack import PATIENCE, PATIENT_TTFT, SHARE, Slack
from penstock.sched.steptime import DEVICES, GEOMETRIES, MARGIN, StepTime

TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])
BUDGET = 2048
LIMIT = StepLimit.asked(None)


class Device:
    """A scheduler on a device whose steps take exactly what is predicted; its text never ends by itself."""

    def __init__(self, policy="slack", *, blocks=2000, sequences=64, budget=BUDGET):
        limits = Limits(token_budget=budget, max_sequences=sequences, max_model_len=blocks * 64)
        self.scheduler = Scheduler(limits, BlockPool(range(blocks)), policy=LOCAL_POLICIES[policy](TIMES, LIMIT))
        self.now = 0.0
        self.answered: dict[str, float] = {}
        self.waits: dict[str, str] = {}  # what each says that it waited for
        self.lateness: dict[str, float] = {}  # the worst of each request's tokens, in seconds

    def add(self, name, tokens, *, output=1, waited=0.0, **promise):
        prompt = [hash(name) & 0xFFFF] * tokens  # no two alike
        self.scheduler.add(
            Request(
                id=name, prompt=prompt, params=SamplingParams(), seed=0, stop_ids=frozenset(), max_tokens=output,
                waited=waited, **promise,
            ),
            now=self.now,
        )  # fmt: skip

    def plan(self) -> StepPlan:
        return self.scheduler.schedule(self.now)

    def run(self, plan: StepPlan) -> None:
        begun, self.now = self.now, self.now + milliseconds(plan) / 1e3
        assert self.now > begun
        for s in plan.sequences:
            sequence = self.scheduler.sequence(s.request_id)
            if s.sample:
                self.answered.setdefault(s.request_id, self.now)
                late = self.now - sequence.due
                self.lateness[s.request_id] = max(self.lateness.get(s.request_id, -inf), late)
        sampled = sum(s.sample for s in plan.sequences)
        outputs = self.scheduler.update(plan, StepResult([[1]] * sampled, [None] * sampled), begun, self.now)
        self.waits |= {output.request_id: output.timing.wait for output in outputs if output.timing is not None}

    def step(self) -> dict[str, int]:
        """Tokens of each request."""
        plan = self.plan()
        self.run(plan)
        return {s.request_id: len(s.tokens) for s in plan.sequences}

    def decoding(self, name, *, prompt=200, output=5000, **promise):
        """One that has begun to answer."""
        self.add(name, prompt, output=output, **promise)
        while name not in self.answered:
            self.step()


def milliseconds(plan: StepPlan, names=None) -> float:
    """Of a step, or of so much of it."""
    steps = [s for s in plan.sequences if names is None or s.request_id in names]
    prefills = [(len(s.tokens), s.start) for s in steps if len(s.tokens) > 1]
    decodes = [s.start + 1 for s in steps if len(s.tokens) == 1]
    return TIMES.step_ms(prefills, len(decodes), sum(decodes)) if steps else 0.0


# --- how much


def test_a_step_takes_no_longer_than_the_tightest_tpot_of_its_streams():
    device = Device()
    device.decoding("a", tpot_ms=20.0)
    device.decoding("b", tpot_ms=30.0)
    for _ in range(30):  # far quicker than they must: that pays for no longer step
        device.step()
    device.add("prompt", 50_000, ttft_ms=60_000)
    plan = device.plan()
    assert milliseconds(plan) <= MARGIN * 20.0 < milliseconds(plan) + 0.1
    assert 32 < len(plan.sequences[-1].tokens) < BUDGET
    while "prompt" not in device.answered:
        device.step()
    assert max(device.lateness[name] for name in "ab") < 0


def test_where_steps_differ_from_what_is_predicted_they_get_more_room():
    device = Device()
    device.decoding("a", tpot_ms=20.0)
    device.scheduler.predict_by(replace(TIMES, spread=0.5))
    device.add("prompt", 50_000)
    plan = device.plan()
    assert milliseconds(plan) <= 10.0 < milliseconds(plan) + 0.1


@pytest.mark.parametrize("policy", LOCAL_POLICIES)
@pytest.mark.parametrize("streams", [0, 5])
def test_the_limit_of_a_step_holds_at_any_depth(policy, streams):
    device = Device(policy, blocks=6000)
    for i in range(streams):
        device.decoding(f"stream{i}", prompt=20_000)
    device.add("prompt", 200_000)
    chunks = []
    while "prompt" not in device.answered:
        plan = device.plan()
        assert milliseconds(plan) <= MARGIN * LIMIT.most
        chunks.append(len(plan.sequences[-1].tokens))
        device.run(plan)
    assert chunks[0] == BUDGET - streams
    assert chunks == sorted(chunks, reverse=True) or chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert chunks[-2] < BUDGET / 2


def test_on_a_cpu_streams_are_slowed_down_by_a_bounded_factor_and_not_beyond_what_they_need():
    cpu = StepLimit.asked(None, cpu=True)
    assert cpu.beside(5.0) == LIMIT.most
    assert cpu.beside(50.0) == 150.0
    assert cpu.beside(200.0) == 500.0 == cpu.without(5.0)
    assert cpu.beside(900.0) == 1350.0  # prompts get a third of the time even where streams are as slow as that
    assert StepLimit.asked(70.0, cpu=True) == StepLimit(70.0, 70.0)


def test_who_is_late_already_loses_no_more_than_a_step_of_one_tpot():
    device = Device()
    device.decoding("a", tpot_ms=20.0)
    device.now += 3.0
    device.add("prompt", 50_000)
    plan = device.plan()
    assert milliseconds(plan) <= MARGIN * 20.0 < milliseconds(plan) + 0.1


def test_a_prompt_is_prefilled_however_much_decodes_ask_for():
    device = Device()
    device.decoding("a", tpot_ms=0.001)
    device.add("prompt", 5000)
    plan = device.plan()
    alone = milliseconds(plan, {"a"})
    assert 1.1 * alone < milliseconds(plan) <= LEAST * alone


def test_several_prompts_share_what_is_paid_for():
    device = Device()
    device.decoding("a", tpot_ms=20.0)
    for i in range(20):
        device.add(f"p{i}", 150, ttft_ms=1000.0 + i)
    plan = device.plan()
    limit = MARGIN * 20.0
    assert [s.request_id for s in plan.sequences] == ["a", *(f"p{i}" for i in range(len(plan.sequences) - 1))]
    assert 3 < len(plan.sequences) < 20
    assert milliseconds(plan) <= limit < milliseconds(plan) + 1.0


def test_without_decodes_or_their_targets_the_budget_is_the_limits():
    device = Device()
    device.add("first", 5000, ttft_ms=1000.0)
    assert device.step() == {"first": BUDGET}
    device = Device()
    device.decoding("a", ttft_ms=1000.0)
    device.add("prompt", 5000, ttft_ms=10.0)
    assert device.step() == {"a": 1, "prompt": BUDGET - 1}


def test_the_urgency_of_a_prompt_does_not_break_what_was_promised_to_decodes():
    device = Device()
    device.decoding("a", tpot_ms=12.0)
    device.add("urgent", 4000, ttft_ms=50.0)
    while "urgent" not in device.answered:
        device.step()
    assert device.lateness["a"] < 0 < device.lateness["urgent"]


def test_who_came_by_hand_off_has_one_tpot_for_its_next_token():
    device = Device()
    request = Request(
        id="a", prompt=[1] * 100, params=SamplingParams(), seed=0, stop_ids=frozenset(), max_tokens=50, tpot_ms=20.0
    )
    reservation = device.scheduler.reserve(request)
    device.now = 5.0
    assert device.scheduler.reservations.complete(reservation, [7])
    sequence = device.scheduler.resume(reservation, 0, device.now)
    device.plan()
    assert sequence.due == pytest.approx(5.020)


# --- in which order


def order(device: Device) -> list[str]:
    while device.scheduler.has_work:
        device.step()
    return sorted(device.answered, key=device.answered.__getitem__)


def test_prompts_are_prefilled_in_order_of_deadline():
    device = Device()
    device.add("none", 3000)
    device.add("later", 3000, ttft_ms=3000.0)
    device.add("sooner", 3000, ttft_ms=1000.0)
    device.add("sooner still: it has waited", 3000, ttft_ms=4000.0, waited=3.5)
    assert order(device) == ["sooner still: it has waited", "sooner", "later", "none"]


def test_a_prompt_that_is_in_time_is_not_made_late_by_one_behind_it():
    device = Device()
    device.add("long", 40_000)
    device.step()
    device.add("soon", 200, ttft_ms=20.0)
    assert milliseconds(device.plan()) <= 20.0
    device.scheduler.cancel("soon")
    assert milliseconds(device.plan()) > 25.0


def test_what_came_before_there_was_a_step_time_model_is_prefilled():
    device = Device()
    scheduler = device.scheduler = Scheduler(
        Limits(token_budget=100, max_sequences=8, max_model_len=6400), BlockPool(range(100)), policy=Slack()
    )
    device.add("early", 3000)
    device.add("waiting", 2000, ttft_ms=5000.0)
    device.step()
    scheduler.predict_by(TIMES)
    device.add("later", 50)
    assert set(order(device)) == {"early", "waiting", "later"}
    scheduler.check()


def test_where_not_all_can_be_in_time_the_longest_is_late():
    device = Device()
    device.add("long", 20_000, ttft_ms=400.0)
    for i in range(5):
        device.add(f"short{i}", 2000, ttft_ms=500.0)
    assert order(device)[-1] == "long"
    assert [name for name, late in device.lateness.items() if late > 0] == ["long"]
    fcfs = Device("fcfs")
    fcfs.add("long", 20_000, ttft_ms=400.0)
    for i in range(5):
        fcfs.add(f"short{i}", 2000, ttft_ms=500.0)
    order(fcfs)
    assert sum(late > 0 for late in fcfs.lateness.values()) > 1


def test_where_not_all_can_be_in_time_lower_priority_is_late_first():
    device = Device()
    device.add("low", 4000, ttft_ms=300.0, priority=1)
    device.add("high", 20_000, ttft_ms=1.05 * TIMES.prefill_ms(20_000, budget=BUDGET))
    assert order(device) == ["high", "low"]


def test_who_is_too_late_waits_for_those_who_are_not():
    device = Device()
    device.add("hopeless", 3000, ttft_ms=500.0, waited=1.0)
    device.add("fine", 3000, ttft_ms=500.0)
    assert order(device) == ["fine", "hopeless"]


def test_who_becomes_too_late_on_a_slow_device_makes_way_for_those_who_are_not():
    """Nobody comes or goes, so that only the time says that it must be looked at again."""
    device = Device()
    device.add("long", 20_000, ttft_ms=2.0 * TIMES.prefill_ms(20_000, budget=BUDGET))
    device.add("short", 6000, ttft_ms=2.5 * TIMES.prefill_ms(20_000, budget=BUDGET))
    assert device.step() == {"long": BUDGET}
    device.now += 1.5e-3 * TIMES.prefill_ms(20_000, budget=BUDGET)
    assert device.step() == {"short": BUDGET}


@pytest.mark.parametrize("lost", [{"ttft_ms": 500.0, "waited": 0.6}, {}])
def test_nobody_starves_behind_those_who_can_be_in_time(lost):
    """More comes than can be read, and all of it could be in time by itself."""
    device, rng = Device(), random.Random(0)
    device.add("lost", 10_000, **lost)
    came = 0
    while "lost" not in device.answered:
        while device.scheduler.num_waiting < 20:
            device.add(f"r{came}", rng.randint(500, 3000), ttft_ms=500.0)
            came += 1
        device.step()
        assert device.now < PATIENCE * 2.0 + 10
    assert device.now > PATIENCE * 0.5 - 1
    in_time = [late < 0 for name, late in device.lateness.items() if name != "lost"]
    assert sum(in_time) > 0.8 * len(in_time)


def test_more_are_in_time_than_first_come_first_served():
    kept = {}
    for policy in LOCAL_POLICIES:
        device, rng = Device(policy), random.Random(1)
        for i in range(150):
            while device.scheduler.num_waiting > 12:
                device.step()
            device.add(f"r{i}", rng.choice([300, 1000, 8000]), output=30, ttft_ms=600.0, tpot_ms=25.0)
        order(device)
        kept[policy] = sum(late <= 0 for late in device.lateness.values())
    assert kept["slack"] > 1.3 * kept["fcfs"]


@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_a_long_prompt_that_is_favoured_leaves_room_for_short_ones_and_gets_what_they_leave(tokens):
    device = Device(blocks=9000)
    streams = [f"stream{i}" for i in range(8)]
    for name in streams:
        device.decoding(name, prompt=2000, tpot_ms=15.0)
    device.add("long", 250_000)
    while device.now < PATIENCE * PATIENT_TTFT + 0.5:
        device.step()
    for i in range(20):
        left = min(device.scheduler.sequence(name).due for name in streams) - device.now
        plan = device.plan()
        assert plan.num_tokens == BUDGET or milliseconds(plan) > 0.9 * MARGIN * min(15.0, 1e3 * left)
        device.run(plan)
        device.add(f"short{i}", tokens)
        began = device.now
        while f"short{i}" not in device.answered:
            device.step()
        assert device.now - began < 2 * 15e-3


@pytest.mark.parametrize("streams", [0, 8])
def test_a_favoured_prompt_gets_its_share_of_time_from_long_ones(streams):
    """Also where reading the KV before it takes more than that share of any step."""
    device = Device(blocks=9000)
    names = [f"stream{i}" for i in range(streams)]
    for name in names:
        device.decoding(name, prompt=2000, tpot_ms=15.0)
    device.add("long", 250_000)
    while device.now < PATIENCE * PATIENT_TTFT + 0.5:
        device.step()
    device.add("other", 100_000)
    long = both = 0.0
    for _ in range(40):
        plan = device.plan()
        whole = milliseconds(plan)
        long += whole - milliseconds(plan, {s.request_id for s in plan.sequences} - {"long"})
        both += whole - milliseconds(plan, names)
        device.run(plan)
    assert long / both == pytest.approx(SHARE, rel=0.3)


def test_a_favoured_prompt_that_is_alone_gets_on_however_long_one_token_takes():
    """As on a host that gives the engine next to no time."""
    device = Device()
    device.add("long", 6000)
    device.step()
    device.now += PATIENCE * PATIENT_TTFT + 0.5
    device.scheduler.predict_by(replace(TIMES, factors={"prefill_attention": 1e6}))
    for _ in range(40):
        assert device.step() == {"long": 1}


def test_what_a_wait_went_by_is_told():
    device = Device(blocks=60, sequences=64)
    device.add("large", 3000, output=400)
    device.step()
    device.step()
    device.add("next", 3000)
    device.add("offline", 100, offline=True)
    device.add("promised", 400, ttft_ms=1000.0)
    order(device)
    told = device.waits
    assert told["promised"].endswith("by its deadline")
    assert "in which others had 0 prompt tokens computed" in told["promised"]
    assert "others had 400 prompt tokens computed; after those that could be in time, the least work" in told["next"]
    assert re.search(r"; \d\.\d{3} s without room for it$", told["next"])


# --- offline work


def test_offline_work_is_last_and_is_preempted_first():
    for policy in LOCAL_POLICIES:
        device = Device(policy, sequences=1)
        device.add("offline", 600, output=200, offline=True, priority=-5)
        device.step()
        device.add("online", 900, output=2)
        assert [list(device.step()) for _ in range(2)] == [["online"]] * 2
        assert device.scheduler.counters.preemptions == 1
        plan = device.plan()
        assert [(s.request_id, s.start) for s in plan.sequences] == [("offline", 600)]  # what it had read was kept
        assert device.scheduler.sequence("offline").preemptions == 1  # as its `Timing` will say


def test_offline_work_waits_for_gaps():
    device = Device()
    for i in range(40):
        device.decoding(f"off{i}", prompt=2000, offline=True)
    device.decoding("online", tpot_ms=5.0)
    plan = device.plan()
    limit = MARGIN * (device.scheduler.sequence("online").due - device.now) * 1e3
    running = [s.request_id for s in plan.sequences]
    assert running[0] == "online"
    assert 1 < len(running) < 41
    assert milliseconds(plan) <= limit
    device.scheduler.cancel("online")
    assert len(device.step()) == 40


def test_offline_work_makes_most_of_a_step_and_its_oldest_comes_to_an_end():
    device = Device(sequences=128, blocks=20_000)
    lengths = {"old": 20_000} | {f"long{i}": 12_000 for i in range(8)} | {f"short{i}": 500 + i for i in range(40)}
    for name, tokens in lengths.items():
        device.decoding(name, prompt=tokens, output=60_000, offline=True)
    device.decoding("online", tpot_ms=6.0)
    plan = device.plan()
    running = [s.request_id for s in plan.sequences]
    assert running[:2] == ["online", "old"]
    others = running[2:]
    assert [lengths[name] for name in others] == sorted(lengths[name] for name in others)
    assert 40 <= len(others) < 48, "all short ones, and not all long ones"
    # no other choice beside the oldest would have been more: one more of the next shortest is too much
    contexts = [device.scheduler.sequence(name).computed + 1 for name in running]
    limit = MARGIN * min(6e-3, device.scheduler.sequence("online").due - device.now) * 1e3
    assert TIMES.step_ms((), len(running), sum(contexts)) <= limit
    assert TIMES.step_ms((), len(running) + 1, sum(contexts) + 12_000) > limit
    # even the shortest make way for streams, and what never fits stops nobody else
    device.scheduler.cancel("online")
    device.decoding("tight", tpot_ms=4.2)
    running = [s.request_id for s in device.plan().sequences]
    assert running[0] == "tight"
    assert all(name.startswith("short") for name in running[1:])
    assert len(running) > 5


def test_an_online_hand_off_takes_the_room_of_offline_work():
    device = Device(blocks=20)
    device.add("offline", 1200, output=20, offline=True)
    device.step()
    online = Request(id="x", prompt=[1] * 200, params=SamplingParams(), seed=0, stop_ids=frozenset(), max_tokens=2)
    assert device.scheduler.reserve(online) is not None
    assert (device.scheduler.num_running, device.scheduler.num_waiting) == (0, 1)
    device.scheduler.check()


WORK = st.lists(
    st.tuples(
        st.integers(1, 3000),
        st.integers(1, 60),
        st.sampled_from([None, 30.0, 200.0, 2000.0]),
        st.sampled_from([None, 6.0, 12.0, 40.0]),
        st.booleans(),
        st.integers(0, 1),
        st.integers(0, 15),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=120)
@example(
    work=[(1, 1, None, None, False, 0, 0)] * 8
    + [(1, 1, 30.0, None, False, 1, 0), (392, 1, None, None, False, 0, 0), (1384, 1, None, None, True, 0, 0)],
    blocks=70,
    sequences=6,
)
@given(work=WORK, blocks=st.sampled_from([70, 200, 2000]), sequences=st.sampled_from([2, 6, 64]))
def test_offline_tokens_make_nothing_late_that_is_online(work, blocks, sequences):
    device = Device(blocks=blocks, sequences=sequences)
    offline, pending = set(), sorted(enumerate(work), key=lambda item: item[1][-1])
    steps = 0
    while pending or device.scheduler.has_work:
        while pending and (pending[0][1][-1] <= steps or not device.scheduler.has_work):
            i, (tokens, output, ttft, tpot, gap, priority, _) = pending.pop(0)
            device.add(str(i), tokens, output=output, ttft_ms=ttft, tpot_ms=tpot, offline=gap, priority=priority)
            offline |= {str(i)} if gap else set()
        plan = device.plan()
        online = {s.request_id for s in plan.sequences} - offline
        alone, together = milliseconds(plan, online) / 1e3, milliseconds(plan) / 1e3
        for s in plan.sequences:
            due = device.scheduler.sequence(s.request_id).due
            if s.sample and s.request_id in online and device.now + alone <= due:
                assert device.now + together <= due, "in time without offline work, and late with it"
        device.run(plan)
        device.scheduler.check()
        steps += 1
        assert steps < 10_000, "somebody starves"
    assert len(device.answered) == len(work)


def waits(policy: str, rate: float, seed: int = 0) -> list[float]:
    """Seconds until the first token, of chats among long prompts; without any hints."""
    device, rng = Device(policy, blocks=8000, sequences=256), random.Random(seed)
    at, came, arrived = 0.0, 0, {}
    while came < 600 or device.scheduler.has_work:
        while came < 600 and (at <= device.now or not device.scheduler.has_work):
            device.now = max(device.now, at)
            name = str(came)
            tokens = rng.randint(8000, 40_000) if rng.random() < 0.1 else rng.randint(50, 2000)
            arrived[name] = at
            device.add(name, tokens, output=rng.randint(1, 200), waited=device.now - at)
            at, came = at + rng.expovariate(rate), came + 1
        device.step()
    return sorted(device.answered[name] - came for name, came in arrived.items())


def test_without_hints_the_least_work_first_has_the_lower_mean_at_an_equal_tail():
    first, slack = waits("fcfs", 8.0), waits("slack", 8.0)
    assert mean(slack) < 0.5 * mean(first)
    assert slack[-7] < first[-7], "the 99th percentile"
    assert slack[-1] < 2 * first[-1], "the longest wait"
