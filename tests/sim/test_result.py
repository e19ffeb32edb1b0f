"""What is made of what clients saw."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.sim.frontend import SimRecord
from penstock.sim.result import (
    Account,
    by_second,
    joined_accounts,
    kept,
    offline_work,
    outcomes_of,
    request_rows,
    summarise,
    without_place,
)
from penstock.sim.slots import InstanceSlot, Sample, Use


def record(number=0, arrival=0.0, *, first=None, ended=None, received=1, **fields):
    """Of a request that got `received` tokens."""
    targets = {} if fields.get("offline") else {"ttft_target": 1.0, "tpot_target": 0.1}
    return SimRecord(
        number=number,
        arrival=arrival,
        prompt_tokens=100,
        output_tokens=received,
        received=received,
        first=first,
        ended=ended,
        launched=first,
        **targets | fields,
    )


def served(number, arrival, ttft, tpot, tokens=11, **fields):
    first = arrival + ttft
    return record(number, arrival, first=first, ended=first + tpot * (tokens - 1), received=tokens, **fields)


def account(records, end, samples=(), since=0.0):
    place = InstanceSlot("engine-0", SimpleNamespace(), 0, lifetimes=[(0.0, 4.0), (6.0, None)])
    return Account(
        outcomes_of(records, since),
        end=since + end,
        seconds=end,
        events=7,
        samples=list(samples),
        instances={"engine-0": Use(1, 10, end / 2)},
        instance_seconds=place.alive_seconds(0.0, end),
        changes=[],
        starts=[],
    )


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (served(0, 5.0, 1.0, 0.0625), True),
        (served(0, 5.0, 1.25, 0.0625), False),
        (served(0, 5.0, 1.0, 0.125), False),
        (served(0, 5.0, 1.25, 0.125, ttft_target=2.0, tpot_target=0.25), True),
        (served(0, 5.0, 1.0, 5.0, tokens=1), True),  # a single token has no pace
        (served(0, 5.0, 0.5, 0.05, error="lost"), False),
        (record(ended=3.0, error="no place"), False),
        (served(0, 5.0, 900.0, 900.0, offline=True), True),
    ],
)
def test_a_request_is_judged_by_its_own_targets(one, expected):
    assert kept(one) is expected


def test_only_online_requests_count_for_attainment_and_times():
    records = [
        served(0, 0.0, 0.5, 0.05, task="a"),
        served(1, 0.0, 2.0, 0.05, task="a"),
        served(2, 1.0, 0.5, 0.05, task="b"),
        record(3, 1.0, ended=2.0, error="no place", received=0, task="b"),
        served(4, 0.0, 5.0, 0.5, offline=True),
        record(5, 2.0, task="b"),
    ]
    result = summarise(account(records, 10.0))
    assert (result["requests"], result["failed"], result["errors"]) == (4, 1, {"no place": 1})
    assert (result["attainment"], result["ttft_attainment"], result["tpot_attainment"]) == (0.5, 0.5, 0.75)
    assert result["ttft_p50_ms"] == pytest.approx(500)
    assert result["ttft_mean_ms"] == pytest.approx(1000)
    assert result["latency_mean_s"] == pytest.approx(1.5)
    assert (result["output_tokens"], result["output_tokens_per_s"]) == (33, 3.3)
    assert result["instance_seconds"] == pytest.approx(8.0)
    tasks = result["tasks"]
    assert [(name, task["requests"], task["attainment"]) for name, task in tasks.items()] == [
        ("a", 2, 0.5),
        ("b", 2, 0.5),
    ]
    assert tasks["a"]["ttft_mean_ms"] == pytest.approx(1250)


def test_offline_work_is_what_was_over_while_there_were_online_requests():
    records = [
        served(0, 0.0, 1.0, 0.1, tokens=91),  # to 10 s
        served(1, 0.0, 1.0, 0.5, tokens=5, offline=True, cached_tokens=64),
        served(2, 0.0, 1.0, 5.0, tokens=5, offline=True),
        record(3, 0.0, offline=True),
        record(4, 0.0, ended=1.0, error="lost", offline=True),
    ]
    found = offline_work(outcomes_of(records), 30.0)
    assert (found["offline_requests"], found["offline_left"]) == (1, 3)
    assert found["offline_generated_tokens_per_s"] == pytest.approx(0.5)
    assert found["offline_prefill_tokens_per_s"] == pytest.approx(3.6)
    assert found["offline_tokens_per_s"] == pytest.approx(4.1)
    assert set(offline_work(outcomes_of(records[:1]), 30.0).values()) == {None}
    assert offline_work(outcomes_of(records[1:]), 30.0)["offline_requests"] == 2


def test_seconds_are_those_of_arrival():
    records = [served(0, 0.2, 0.5, 0.05), served(1, 0.9, 3.0, 0.05), served(2, 3.0, 0.5, 0.05)]
    assert by_second(outcomes_of(records)) == {"arrivals": [2, 0, 0, 1], "attained": [1, 0, 0, 1]}
    assert by_second(outcomes_of([])) == {"arrivals": [], "attained": []}


def test_what_waits_for_a_place_has_come_and_was_not_sent():
    records = [
        record(0, 0.0, first=2.0),
        record(1, 1.0, first=1.0),
        record(2, 1.0, ended=5.0, error="no place"),
        record(3, 4.0),
    ]
    these = outcomes_of(records)
    assert without_place(these, ~these.offline, [0.0, 0.5, 1.0, 2.0, 4.0, 5.0, 9.0]) == [1, 1, 2, 1, 2, 1, 1]


def test_the_timeline_counts_instances_by_role():
    samples = [
        (0.0, {"a": Sample("prefill", 1, 2, 3), "b": Sample("decode")}),
        (1.0, {"a": Sample("decode"), "b": Sample(None)}),
    ]
    timeline = summarise(account([], 2.0, samples))["timeline"]
    assert timeline["roles"] == {"decode": [1, 1], "prefill": [1, 0]}
    assert timeline["instances"]["a"] == {
        "role": ["prefill", "decode"],
        "running": [1, 0],
        "waiting": [2, 0],
        "used_blocks": [3, 0],
    }


def test_nothing_at_all_is_no_number():
    result = summarise(account([], 0.0))
    assert result["attainment"] is result["ttft_p95_ms"] is result["output_tokens_per_s"] is None
    assert result["requests"] == result["reused_tokens"] == 0


def test_slices_are_summarised_as_one():
    early = [
        served(0, 0.0, 0.5, 0.05, task="a", costs={"prefill": (3.0, 2.0)}, cached_tokens=8),
        record(1, 3.0, ended=4.0, error="lost", task="b"),
    ]
    late = [
        served(0, 1.0, 2.0, 0.05, task="c", prefill="p", decode="d", costs={"decode": (3.0, 1.0)}),
        record(1, 2.0, task="a"),
        served(2, 3.0, 0.25, 0.5, task="a", recoveries=1),
    ]
    everybody = [*early, *(moved(one, 10.0, number=number) for number, one in enumerate(late, 2))]
    samples = [(0.0, {"a": Sample("any", 1, 2, 3)}), (10.0, {"a": Sample("any", 4, 5, 6)})]
    parts = [account(early, 10.0, samples[:1]), account(late, 8.0, samples[1:], since=10.0)]
    together, whole = summarise(joined_accounts(parts)), summarise(account(everybody, 18.0, samples))
    assert together.pop("instance_seconds") == pytest.approx(8.0 + 6.0)
    assert together.pop("instances") == {"engine-0": {"steps": 20, "busy_share": 0.5, "lives": 2}}
    assert together.pop("events") == 14
    assert together == {name: whole[name] for name in together}
    assert len(together) == len(whole) - 3


def moved(one, by, **changes):
    times = {name: getattr(one, name) for name in ("arrival", "launched", "first", "ended")}
    return replace(one, **{name: at and at + by for name, at in times.items()}, **changes)


def test_rows_are_all_requests():
    rows = request_rows([served(0, 0.0, 0.5, 0.05, task="a"), record(1, 1.0, offline=True)])
    assert [(row["number"], row["task"], row["offline"], row["ended"]) for row in rows] == [
        (0, "a", False, pytest.approx(1.0)),
        (1, "", True, None),
    ]
