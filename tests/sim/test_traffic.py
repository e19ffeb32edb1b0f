"""The requests of a scenario, and that every scenario that is kept has some without any file."""

from collections import Counter
from math import inf

import numpy as np
import pytest

from penstock.cli.scenario_file import make_tables
from penstock.core.errors import ConfigError
from penstock.sim.scenario import parse
from penstock.sim.traffic import make_traffic
from penstock.sim.workload import SLO, WHOLE, Offline, Task, Workload, cut
from tests.sim.scenarios import SCENARIOS, work
from tests.sim.stand_in import stand_in


def workload(**changes):
    values = {"trace": "t", "slo": SLO(ttft=1.0, tpot=0.1), "rate_scale": 1.0, "start": 0.0, "duration": None}
    return Workload(**values | {"spread": 0.0, "max_tokens": 100} | changes)


def task(name, rate, **changes):
    values = {"prompt": 50.0, "prompt_sd": 20.0, "output": 30.0, "output_sd": 40.0, "slo": SLO(ttft=2.0, tpot=0.2)}
    rest = {"priority": 0, "priority_only": False, "start": 0.0, "duration": None}
    return Task(name=name, rate=rate, **values | rest | changes)


def offline(**changes):
    lengths = {"prompt": 400.0, "prompt_sd": 100.0, "output": 40.0, "output_sd": 10.0}
    return Offline(**{"rate": None, "backlog": None, "like_online": False} | lengths | changes)


def traffic(trace, scale=1.0, model_len=1000, seed=0, part=WHOLE, **changes):
    rng = np.random.default_rng(seed)
    return make_traffic(workload(**changes), trace, rng, scale=scale, max_model_len=model_len, part=part)


TRACE = [work(i, at=float(i), prefix=(i,), block=4) for i in range(5)]
MIX = (task("short", 3.0), task("long", 1.0, prompt=300.0, priority=2, priority_only=True))


def test_the_rate_is_scaled_and_the_start_left_out():
    made = traffic(TRACE, scale=2.0, start=1.0)
    assert [r.at for r in made.requests] == [0.0, 0.5, 1.0, 1.5]
    assert [r.number for r in made.requests] == [0, 1, 2, 3]
    assert made.native_rate == 1.0


def test_a_trace_is_repeated_for_the_duration_with_other_prefixes():
    made = traffic(TRACE, scale=2.0, duration=6.0)
    assert [r.at for r in made.requests] == [i / 2 for i in range(12)]
    assert [r.number for r in made.requests] == list(range(12))
    assert len({r.prefix for r in made.requests}) == 12
    assert [r.number for r in traffic(TRACE, duration=2.5).requests] == [0, 1, 2]


def test_what_does_not_fit_the_model_is_cut_and_counted():
    made = traffic([work(0), work(1, prompt=900, output=300)])
    assert made.cut == 1
    assert made.requests[1].prompt_tokens + made.requests[1].output_tokens == 1000


def test_traffic_that_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match=r"workload.start: 10 s, no request comes after that"):
        traffic(TRACE, start=10.0)
    with pytest.raises(ConfigError, match=r"workload.duration: given, and all requests come at once"):
        traffic([work(0), work(1)], duration=10.0)


def test_requests_without_a_task_have_the_targets_of_the_workload():
    assert {(r.ttft, r.tpot, r.task, r.offline) for r in traffic(TRACE).requests} == {(1.0, 0.1, "", False)}


# --- tasks


def test_tasks_come_at_their_rates_with_what_they_are_worth():
    made = traffic(None, scale=5.0, duration=200.0, tasks=MIX)
    assert made.native_rate == 4.0
    assert [r.number for r in made.requests] == list(range(len(made.requests)))
    times = [r.at for r in made.requests]
    assert times == sorted(times)
    assert times[-1] < 200.0
    count = Counter(r.task for r in made.requests)
    assert count["short"] == pytest.approx(3000, rel=0.06)
    assert count["long"] == pytest.approx(1000, rel=0.1)
    short = [r for r in made.requests if r.task == "short"]
    assert {(r.ttft, r.tpot, r.priority, r.priority_only) for r in short} == {(2.0, 0.2, 0, False)}
    assert {(r.priority, r.priority_only) for r in made.requests if r.task == "long"} == {(2, True)}
    gaps = np.diff([r.at for r in short])
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.06)
    prompts, outputs = (np.array([getattr(r, f"{name}_tokens") for r in short]) for name in ("prompt", "output"))
    assert (prompts.mean(), prompts.std()) == (pytest.approx(50, rel=0.03), pytest.approx(20, rel=0.06))
    assert (outputs.mean(), outputs.std()) == (pytest.approx(30, rel=0.06), pytest.approx(40, rel=0.25))
    assert outputs.min() >= 1


def test_tasks_begin_and_end_when_they_are_said_to():
    late = task("late", 5.0, start=20.0, duration=10.0)
    made = traffic(None, duration=60.0, tasks=(task("always", 5.0), late))
    times = [r.at for r in made.requests if r.task == "late"]
    assert 20 <= times[0] < 22
    assert 28 < times[-1] < 30
    assert max(r.at for r in made.requests) > 58


def test_another_rate_has_the_same_requests_and_more_of_them():
    slow, fast = (
        [r for r in traffic(None, scale=scale, duration=100.0, tasks=MIX).requests if r.task == "short"]
        for scale in (1.0, 2.0)
    )
    assert len(fast) > len(slow) > 200
    for one, other in zip(slow, fast, strict=False):
        assert one.at == pytest.approx(2 * other.at)
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)


def test_a_trace_in_place_of_tasks_comes_at_their_rate_and_becomes_them():
    trace = [work(i, at=i * 2.0, prompt=10 + i) for i in range(4000)]
    made = traffic(trace, scale=2.0, duration=400.0, tasks=MIX, model_len=10_000)
    assert made.native_rate == 4.0
    assert [r.prompt_tokens for r in made.requests] == [10 + i for i in range(3200)]
    assert made.requests[1].at == pytest.approx(1 / 8)
    count = Counter((r.task, r.ttft, r.priority) for r in made.requests)
    assert count["short", 2.0, 0] == pytest.approx(2400, rel=0.05)
    assert sum(count.values()) == count["short", 2.0, 0] + count["long", 2.0, 2] == 3200


# --- tides, offline work, chats


def test_a_tide_moves_requests_and_keeps_them_all():
    trace = [work(i, at=i / 100) for i in range(10_000)]
    made = traffic(trace, duration=100.0, tide=4.0)
    hours = np.bincount([int(r.at) for r in made.requests], minlength=100)
    assert hours.sum() == 10_000
    assert hours[45:55].sum() / (hours[:5].sum() + hours[-5:].sum()) == pytest.approx(4.0, rel=0.05)
    assert hours[20:30].mean() == pytest.approx(100, rel=0.1)


def test_offline_requests_come_beside_the_others_and_have_no_targets():
    trace = [work(i, at=i / 10) for i in range(1000)]
    made = traffic(trace, offline=offline(rate=5.0), scale=2.0)
    extra = [r for r in made.requests if r.offline]
    assert len(made.requests) - len(extra) == 1000
    assert [r.number for r in made.requests] == list(range(len(made.requests)))
    assert {(r.ttft, r.tpot) for r in extra} == {(inf, inf)}
    assert len(extra) == pytest.approx(250, rel=0.2)  # half the time at the same rate
    assert np.mean([r.prompt_tokens for r in extra]) == pytest.approx(400, rel=0.1)
    assert made.native_rate == pytest.approx(10.0)


def test_the_offline_rate_can_be_what_varies():
    trace = [work(i, at=i / 10) for i in range(1000)]
    made = traffic(trace, offline=offline(rate=5.0), vary="offline", rate_scale=2.0, scale=4.0)
    assert made.native_rate == 5.0
    online = [r for r in made.requests if not r.offline]
    assert online[-1].at == pytest.approx(99.9 / 2)
    assert len(made.requests) - 1000 == pytest.approx(1000, rel=0.1)


def test_a_backlog_is_there_from_the_start_with_lengths_of_online_requests():
    trace = [work(i, at=1.0 + i, prompt=100 + i, output=1 + i) for i in range(10)]
    made = traffic(trace, offline=offline(backlog=500, like_online=True))
    backlog = [r for r in made.requests if r.offline]
    assert len(backlog) == 500
    assert {r.at for r in backlog} == {0.0}
    assert {(r.prompt_tokens, r.output_tokens) for r in backlog} == {(100 + i, 1 + i) for i in range(10)}


def test_chats_are_found_in_prefixes():
    turns = [(9, 1, 2), (9, 4, 5), (9, 1, 3, 6), (9, 4, 5, 7), (9, 1, 3, 6, 8)]
    trace = [work(i, at=float(i), prompt=10 * len(p), prefix=p, block=10) for i, p in enumerate(turns)]
    chats = [r.chat for r in traffic(trace, chats=True).requests]
    assert chats[0] == chats[2] == chats[4]
    assert chats[1] == chats[3] != chats[0]
    assert {r.chat for r in traffic(trace).requests} == {""}


# --- slices

SLICED = {
    "once": {"duration": None},
    "repeated": {"duration": 33.0},
    "later": {"duration": 33.0, "start": 2.0},
    "tidal": {"duration": 33.0, "tide": 5.0},
    "spread": {"duration": 33.0, "spread": 1.0},
    "tasks": {"duration": 33.0, "tasks": (*MIX, task("late", 2.0, start=20.0, duration=5.0))},
    "tidal tasks": {"duration": 33.0, "tasks": MIX, "tide": 3.0},
}


def as_in_the_whole(request, since):
    """But for its number, and rounding of its time."""
    return (round(request.at + since, 9), *(getattr(request, f) for f in request.__struct_fields__[2:]))


@pytest.mark.parametrize("warm_up", [0.0, 0.5, 7.0, 100.0])
@pytest.mark.parametrize(
    ("name", "recorded"), [*((name, True) for name in SLICED), ("tasks", False), ("tidal tasks", False)]
)
def test_slices_are_about_the_requests_of_the_whole(name, recorded, warm_up):
    changes = SLICED[name]
    trace = [work(i, at=i**2 / 10, prompt=10 + i, output=995 if i % 3 else 5) for i in range(15)] if recorded else None
    whole = traffic(trace, scale=1.7, **changes)
    everybody = [as_in_the_whole(request, 0.0) for request in whole.requests]
    seen, cut_short = [], 0
    for part in cut(changes["duration"] or whole.requests[-1].at, 6, warm_up):
        made = traffic(trace, scale=1.7, part=part, **changes)
        assert made.native_rate == whole.native_rate
        assert [r.number for r in made.requests] == list(range(len(made.requests)))
        rows = [as_in_the_whole(request, part.since) for request in made.requests]
        seen += rows[made.judged.start : made.judged.stop]
        cut_short += made.cut
        around = [row for row in everybody if part.since <= row[0] < part.until]
        assert rows == around
    assert seen == everybody
    assert cut_short == whole.cut
    assert whole.judged == range(len(whole.requests))


# --- the scenarios that are kept


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_has_ten_minutes_of_requests_without_any_file(path):
    scenario = parse(path.name, path.read_text(), make_tables())
    given = scenario.workload
    made = make_traffic(given, stand_in(given), np.random.default_rng(0), scale=given.scale, max_model_len=131_072)
    online = [r for r in made.requests if not r.offline]
    assert given.duration >= 600
    # the load is there to the end, apart from the evening of a tidal day
    busy = np.bincount([int(r.at / 60) for r in online])
    assert len(busy) == given.duration // 60
    assert busy.min() > (0.2 if given.tide or any(t.start for t in given.tasks) else 0.6) * busy.mean()
    assert all(r.ttft < inf and r.tpot < inf for r in online)
    assert any(r.offline for r in made.requests) == (given.offline is not None)
    longest = max(g.max_model_len for groups in scenario.layouts.values() for g in groups)
    assert max(r.prompt_tokens for r in online) < longest
