"""Simulated tiers: how long copies take, and what a simulation makes of them."""

from dataclasses import replace

import pytest

from penstock.cli.scenario_file import make_tables
from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.connector import Move
from penstock.sched.local.offload import Load, Store
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.scenario import parse
from penstock.sim.wires import TierWay
from tests.sim.scenarios import WORKLOAD, read, run

TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])
BLOCK = TIMES.load_ms(BLOCK_TOKENS) / 1e3


def moves(count: int) -> tuple[Move, ...]:
    return tuple(Move(i, i, bytes([i])) for i in range(count))


def tiered(memory: str | None, blocks: int = 70) -> str:
    tier = f", host-cache-memory: {memory}" if memory else ""
    return f"instances: [{{count: 2, kv-blocks: {blocks}{tier}}}]\n"


def test_either_direction_is_a_way_of_its_own():
    way = TierWay(2 * BLOCK)
    first = way.send(1.0, [Store(1, "host", moves(4)), Load(2, "host", moves(3), 0.0), Load(3, "host", moves(1), 0.0)])
    assert [(a.number, a.blocks) for a in first] == [(2, 3), (3, 1)]
    assert [a.at for a in first] == pytest.approx([1 + 6 * BLOCK, 1 + 8 * BLOCK])
    assert [a.seconds for a in first] == pytest.approx([6 * BLOCK, 2 * BLOCK])
    assert way.next_store == pytest.approx(1 + 8 * BLOCK)
    assert way.stored(1.0) == []
    assert way.stored(2.0) == [1]
    (later,) = way.send(5.0, [Load(4, "host", moves(1), 0.0)])
    assert later.at == pytest.approx(5 + 2 * BLOCK)


def test_a_tier_finds_what_the_device_has_forgotten():
    scenario = read(WORKLOAD, tiered(None)), read(WORKLOAD, tiered("4G"))
    without, with_it = (run(one, "unified", scale=0.3)[0] for one in scenario)
    assert with_it["loaded_tokens"] > 0.02 * with_it["prompt_tokens"]
    assert with_it["reused_tokens"] >= without["reused_tokens"] + with_it["loaded_tokens"] / 2
    assert without["loaded_tokens"] == 0


def test_who_has_it_below_its_device_is_found_by_policies():
    """Prompts of one beginning after many others: the one instance that had it still has it, in its host's memory."""
    result, cluster = run(read(WORKLOAD, tiered("4G")), "unified", scale=0.3)
    index = cluster.master.fleet.index
    for name, place in cluster.places.items():
        keys = set(place.instance.scheduler.offload.lanes[0].tier.keys())
        assert index.count(name, "host") == pytest.approx(len(keys), abs=40)  # what was told since the last report
        assert index.count(name, "host") > index.count(name)
    assert result["failed"] == 0


def test_an_incarnation_that_ends_takes_its_tier_with_it():
    failure = "failures: [{instance: engine-1, at: 2.0, restart-after: 1.0}]\n"
    result, cluster = run(read(WORKLOAD, tiered("4G"), failure), "unified", scale=0.3)
    assert result["failed"] == 0
    assert result["loaded_tokens"] > 0
    assert cluster.places["engine-1"].lives == 2


DISK = "disk-cache-size: 1T, disk-cache-gbps: 3000"
REMOTE = "remote-cache-size: 1T, remote-cache-gbps: 3000"


@pytest.mark.parametrize("tier", [DISK, REMOTE])
def test_other_tiers_find_it_too(tier):
    scenario = read(WORKLOAD, f"instances: [{{count: 2, kv-blocks: 70, {tier}}}]\n")
    without, with_it = (run(one, "unified", scale=0.3)[0] for one in (read(WORKLOAD, tiered(None)), scenario))
    assert with_it["loaded_tokens"] > 0.02 * with_it["prompt_tokens"]
    assert with_it["reused_tokens"] > without["reused_tokens"]
    assert (
        with_it["share_of_ideal"] == with_it["reused_tokens"] / with_it["reusable_tokens"] > without["share_of_ideal"]
    )


def test_what_one_has_put_in_a_store_all_find_and_it_outlives_its_instance():
    failure = "failures: [{instance: engine-1, at: 2.0, restart-after: 1.0}]\n"
    scenario = read(WORKLOAD, f"instances: [{{count: 2, kv-blocks: 70, {REMOTE}}}]\n", failure)
    result, cluster = run(scenario, "round_robin", scale=0.3)
    tier = cluster._store
    tier.check()
    assert result["failed"] == 0
    assert tier.used > 500, "also of what was there before one has failed"
    # in turn, and yet nearly everything is found: whoever has computed it
    assert result["share_of_ideal"] > 0.8
    result, cluster = run(scenario, "unified", scale=0.3)
    known = cluster.master.fleet.index._stores["remote"].keys
    assert len(known) == pytest.approx(len(cluster._store.keys()), abs=40)
    assert set(known.values()) == {1}, "one tells of each"
    cluster.master.fleet.index.check()


def test_loads_come_late_where_the_way_is_slow():
    """And then nothing is loaded: computing is quicker."""
    slow = replace(DEVICES["h200"], host_bandwidth=1e8)
    tables = replace(make_tables(), load_device=lambda name: slow)
    result, _ = run(parse("test.yaml", WORKLOAD + tiered("4G"), tables), "unified", scale=0.3)
    assert result["loaded_tokens"] == 0
    assert result["failed"] == 0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("host-cache-memory: 1M", "host-cache-memory: 1.0 MiB, at least one block of 64 tokens is needed, 8.0 MiB"),
        ("host-cache-memory: -1", "host-cache-memory: '-1', allowed is a size"),
        (
            "host-cache-memory: 4G, enable-prefix-caching: false",
            "host-cache-memory: 4.0 GiB without prefix caching, allowed only with enable-prefix-caching",
        ),
    ],
)
def test_what_is_wrong_about_a_tier_is_said_in_a_line(engine, message):
    with pytest.raises(ConfigError) as caught:
        read(WORKLOAD.replace("noise: 0.1", f"noise: 0.1, {engine}"), "instances: [{count: 1}]\n")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
