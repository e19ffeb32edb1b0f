"""Scenario files: what is read, and one clear line for each mistake."""

from pathlib import Path

import pytest

from penstock.cli.sim import make_tables
from penstock.core.errors import ConfigError
from penstock.sched.steptime import DEVICES, GEOMETRIES
from penstock.sim.bundles import BUNDLES
from penstock.sim.scenario import parse
from tests.sim.scenarios import COLOCATED, ONE_LINE, SPLIT, WORKLOAD, read

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_that_is_kept_can_be_read(path):
    scenario = parse(path.name, path.read_text(), make_tables())
    assert scenario.description
    for layout, groups in scenario.layouts.items():
        assert sum(group.count for group in groups) == 8, layout


def test_a_group_is_sized_by_its_device_and_its_own_options_go_first():
    text = """
        engine: {device: modelled:h100, geometry: qwen3-8b, max-num-seqs: 16, max-model-len: 4096}
        instances: [{pool: prefill, count: 2}, {pool: decode, max-num-seqs: 64, slowdown: 2, name: big}]
    """
    prefill, decode = read("workload: {trace: t.csv}\nslo: {ttft-ms: 1, tpot-ms: 1}\n", text).layouts[""]
    assert prefill.instances == ["prefill-0", "prefill-1"]
    assert decode.instances == ["big-0"]
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (16, 64)
    assert (prefill.num_blocks, decode.slowdown) == (16 * 64, 2.0)
    free = DEVICES["h100"].memory * 0.9 - GEOMETRIES["qwen3-8b"].weight_bytes
    assert decode.num_blocks == min(64 * 64, int(free // decode.block_bytes))
    assert decode.block_bytes == 2 * 36 * 8 * 128 * 2 * 64


def test_units_and_defaults():
    scenario = read(WORKLOAD, COLOCATED, "heartbeat: {delay-ms: 200}\ntransport: {gbps: 8}\n")
    assert (scenario.heartbeat, scenario.heartbeat_delay) == (0.05, 0.2)
    assert (scenario.transport.bandwidth, scenario.transport.kind) == (1e9, "copy")
    assert (scenario.slo.ttft, scenario.slo.tpot) == (0.4, 0.03)
    assert scenario.policy == "least_loaded"
    assert scenario.workload.duration is None


def test_layouts_are_chosen_with_the_policy():
    scenario = read(WORKLOAD, SPLIT, "layouts: {all: [{count: 4}]}\n")
    assert [g.pool for g in scenario.choose("round_robin")[1]] == ["prefill", "decode"]
    assert [g.pool for g in scenario.choose("round_robin@all")[1]] == ["any"]
    with pytest.raises(ConfigError, match=r"policy: 'best', allowed are round_robin, least_loaded"):
        scenario.choose("best")
    with pytest.raises(ConfigError, match=r"layout: 'none', test\.yaml has all"):
        scenario.choose("round_robin@none")


def test_what_is_to_fail_must_be_in_the_chosen_layout():
    scenario = read(WORKLOAD, SPLIT, "layouts: {all: [{}]}\nfailures: [{instance: decode-0, at: 1}]\n")
    assert scenario.choose("round_robin")
    with pytest.raises(ConfigError, match=r"layout: 'all' has no decode-0, which is to fail"):
        scenario.choose("round_robin@all")


def test_every_bundle_makes_a_fresh_policy():
    for bundle in BUNDLES.values():
        assert bundle.make_dispatch() is not bundle.make_dispatch()


BAD = {
    "instances: [{pool: any}]": [
        "t.yaml:1: workload: missing, and there is no default",
        "t.yaml:1: slo: missing, and there is no default",
    ],
    ONE_LINE + "policy: best": ["t.yaml:5: policy: 'best', allowed is round_robin, least_loaded"],
    ONE_LINE + "polcy: best": ["t.yaml:5: polcy: no such setting, did you mean policy?"],
    ONE_LINE + "seed: -1": ["t.yaml:5: seed: '-1', allowed is a whole number of at least 0"],
    ONE_LINE.replace("tpot-ms: 50", "tpot-ms: 0"): [
        "t.yaml:2: slo.tpot-ms: '0', allowed is a number above 0",
    ],
    ONE_LINE.replace(", tpot-ms: 50", ""): ["t.yaml:2: slo: tpot-ms is missing, and there is no default"],
    ONE_LINE.replace("{trace: t.csv}", "{max-tokens: 5}"): [
        "t.yaml:1: workload: either trace or synthetic is needed, and not both"
    ],
    ONE_LINE.replace("{trace: t.csv}", "{trace: t.csv, synthetic: {rate: 1}}"): [
        "t.yaml:1: workload: either trace or synthetic is needed, and not both"
    ],
    ONE_LINE.replace("h200", "h300"): [
        "t.yaml:3: engine.device: 'modelled:h300', allowed is " + ", ".join(f"modelled:{name}" for name in DEVICES)
    ],
    ONE_LINE.replace("[{count: 2}]", "[{pool: prefill}]"): [
        "t.yaml:4: instances[0]: pool 'prefill', allowed only beside instances of 'decode' or 'any'"
    ],
    ONE_LINE.replace("[{count: 2}]", "[{count: 1}, {count: 1}]"): [
        "t.yaml:4: instances[1]: a second group called 'engine', allowed is a name of its own"
    ],
    ONE_LINE.replace("[{count: 2}]", "[]"): ["t.yaml:4: instances: empty, allowed is a list of at least one group"],
    ONE_LINE.replace("[{count: 2}]", "[{geometry: qwen3-8b}, {name: b}]"): [
        "t.yaml:4: instances[1]: another geometry than the first group's, allowed is one for all"
    ],
    ONE_LINE.replace("[{count: 2}]", "[{kv-blocks: 10000000}]"): [
        "t.yaml:4: instances[0].kv-blocks: 10000000, allowed are up to 13213 beside the weights"
    ],
    ONE_LINE.replace("[{count: 2}]", "[{kv-blocks: 3}]"): [
        "t.yaml:4: instances[0]: 16384 tokens need more KV than the 3 blocks there"
    ],
    ONE_LINE.replace("[{count: 2}]", "[{max-num-batched-tokens: 64}]"): [
        "t.yaml:4: instances[0].max-num-batched-tokens: 64, allowed is at least max-num-seqs (128)"
    ],
    ONE_LINE + "failures: [{instance: engine-7, at: 1}, {instance: engine-0}]": [
        "t.yaml:5: failures[0].instance: 'engine-7', allowed are engine-0, engine-1",
        "t.yaml:5: failures[1]: at is missing, and there is no default",
    ],
    ONE_LINE + "layouts: [1]": ["t.yaml:5: layouts: a list, allowed are settings, one 'name: value' a line"],
    "a: [": ["t.yaml:1: this is no YAML: expected the node content, but found '<stream end>'"],
}


@pytest.mark.parametrize("text", BAD)
def test_each_mistake_is_one_line(text):
    with pytest.raises(ConfigError) as caught:
        parse("t.yaml", text, make_tables())
    assert str(caught.value).splitlines() == BAD[text]
