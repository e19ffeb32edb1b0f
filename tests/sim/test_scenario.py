"""Scenario files: what is read, and one clear line for each mistake."""

import pytest

from penstock.cli.scenario_file import make_tables
from penstock.core.errors import ConfigError
from penstock.sched.cluster.startup import Surroundings
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service.policies import Circumstances
from penstock.sim.baselines import ENGINE_POLICIES, POLICIES
from penstock.sim.scenario import parse
from penstock.sim.workload import SLO
from tests.sim.scenarios import COLOCATED, ONE_LINE, SCENARIOS, SPLIT, WORKLOAD, read


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_that_is_kept_can_be_read(path):
    scenario = parse(path.name, path.read_text(), make_tables())
    assert scenario.description
    assert scenario.choose(scenario.policy)
    for layout, groups in scenario.layouts.items():
        count = sum(group.count for group in groups)
        if path.stem.startswith(("hfx", "scaling")):
            assert count <= (8 if scenario.scaling is None else scenario.scaling.most)
        elif not layout.startswith("prefill-"):
            assert count == (1000 if path.stem.startswith("thousand") else 8), layout


def test_a_group_is_sized_by_its_device_and_its_own_options_go_first():
    text = """
        engine: {device: modelled:h100, geometry: qwen3-8b, max-num-seqs: 16, max-model-len: 4096}
        instances:
          - {role: prefill, count: 2}
          - {role: decode, max-num-seqs: 64, slowdown: 2, name: big}
          - {role: decode, max-num-seqs: 64, kv-cache-dtype: int8, name: packed}
    """
    prefill, decode, packed = read("workload: {trace: t.csv}\nslo: {ttft-ms: 1, tpot-ms: 1}\n", text).layouts[""]
    assert prefill.instances == ["prefill-0", "prefill-1"]
    assert decode.instances == ["big-0"]
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (16, 64)
    assert prefill.num_blocks == 16 * 64
    assert decode.times.step_ms([(512, 0)]) == pytest.approx(2 * prefill.times.step_ms([(512, 0)]))
    assert decode.times.load_blocks_ms(1) == pytest.approx(2 * prefill.times.load_blocks_ms(1))
    assert decode.limit == prefill.limit.slowed(2)
    assert decode.believed == decode.times.device
    free = DEVICES["h100"].memory * 0.9 - GEOMETRIES["qwen3-8b"].weight_bytes
    assert decode.num_blocks == min(64 * 64, int(free // decode.block_bytes))
    assert decode.block_bytes == 2 * 36 * 8 * 128 * 2 * 64
    assert packed.block_bytes == 2 * 36 * 8 * (128 + 4) * 64


def test_units_and_defaults():
    scenario = read(WORKLOAD, COLOCATED, "status-reports: {delay-ms: 200}\ntransport: {gbps: 8}\n")
    assert (scenario.report_interval, scenario.report_delay) == (0.05, 0.2)
    assert (scenario.transport.bandwidth, scenario.transport.kind) == (1e9, "copy")
    assert (scenario.slo.ttft, scenario.slo.tpot) == (0.4, 0.03)
    assert (scenario.policy, scenario.live_roles) == ("least_loaded", False)
    assert scenario.workload.duration is None
    assert (scenario.target, scenario.scaling, scenario.workload.scale) == (0.9, None, 1.0)


def test_a_device_is_what_its_data_sheet_says_and_several_of_them_and_what_they_reach():
    text = "workload: {trace: t.csv}\nslo: {ttft-ms: 1, tpot-ms: 1}\n"
    engine = "engine: {device: modelled:ascend-910b, geometry: qwen2.5-32b, tensor-parallel-size: 2, efficiency: 0.5}\n"
    more = "instances: [{}, {name: b, step-time-error: 1.25, scheduling-policy: slack}]"
    plain, mistaken = read(text, engine, more).layouts[""]
    sheet = DEVICES["ascend-910b"]
    assert plain.times.device.peak_flops == sheet.peak_flops
    assert (plain.times.device.memory, plain.times.device.tensor_parallel) == (2 * sheet.memory, 2)
    assert plain.believed == plain.times.device
    assert (plain.scheduling_policy, mistaken.scheduling_policy) == (None, "slack")
    assert mistaken.times == plain.times
    ms = [StepTime(group.believed, group.times.shape).step_ms([(300, 0)], 20, 5000) for group in (plain, mistaken)]
    assert ms[1] == pytest.approx(1.25 * ms[0])
    assert mistaken.token_budget < plain.token_budget


TASKS = """
workload:
  duration: 600
  rate-scale: 20
  tasks:
    - {name: a, rate: 0.5, prompt: 30.5, prompt-sd: 9, output: 40, ttft-ms: 700, priority: 1, priority-only: true}
    - {name: b, rate: 0.5, prompt: 30, output: 40, output-sd: 50, start: 20, duration: 60}
"""


def test_tasks_have_targets_of_their_own():
    first, second = read(TASKS, "slo: {ttft-ms: 1000, tpot-ms: 50}\n", COLOCATED).workload.tasks
    assert (first.name, first.rate, first.prompt, first.prompt_sd, first.output_sd) == ("a", 0.5, 30.5, 9.0, 0.0)
    assert (first.slo, second.slo) == (SLO(ttft=0.7, tpot=0.05), SLO(ttft=1.0, tpot=0.05))
    assert (first.priority, first.priority_only, second.priority, second.priority_only) == (1, True, 0, False)
    assert (first.start, first.duration, second.start, second.duration) == (0.0, None, 20.0, 60.0)


def test_offline_work_and_what_varies():
    text = "slo: {ttft-ms: 1000, tpot-ms: 50}\ntarget: 0.95\n"
    work = (
        "workload: {trace: t.csv, rate-scale: 4, vary: offline, tide: 6, duration: 60, offline: {rate: 8, output: 9}}\n"
    )
    scenario = read(text, work, COLOCATED)
    offline = scenario.workload.offline
    assert (offline.rate, offline.backlog, offline.output, offline.like_online) == (8.0, None, 9.0, False)
    assert (scenario.workload.scale, scenario.workload.tide, scenario.target) == (1.0, 6.0, 0.95)
    other = read(text, work.replace("vary: offline, ", ""), COLOCATED)
    assert other.workload.scale == 4.0


def test_scaling():
    scaling = read(WORKLOAD, COLOCATED, "scaling: {least: 2, most: 8, start-seconds: 28.84, interval: 0.5}\n").scaling
    assert (scaling.least, scaling.most, scaling.start.disk, scaling.interval) == (2, 8, 28.84, 0.5)
    assert {path: scaling.start.of(path) for path in ("warm", "disk")} == {"warm": 28.84, "disk": 28.84}
    more = "scaling: {least: 2, most: 8, start-seconds: 9, start-paths: {tcp: 2, warm: 1}, warm-pool: 1}\n"
    start = read(WORKLOAD, COLOCATED, more).scaling.start
    assert [start.of(path) for path in ("warm", "map", "tcp", "host", "disk")] == [1, 2, 2, 9, 9]
    told = [
        Surroundings(warm=True, peer=True),
        Surroundings(warm=True, copy=True),
        Surroundings(neighbour=True, peer=True),
        Surroundings(peer=True, copy=True),
        Surroundings(),
    ]
    assert [around.path for around in told] == ["warm", "host", "map", "tcp", "disk"]


def test_layouts_are_chosen_with_the_policy():
    scenario = read(WORKLOAD, SPLIT, "layouts: {all: [{count: 4}]}\n")
    assert [g.role for g in scenario.choose("round_robin")[1]] == ["prefill", "decode"]
    assert [g.role for g in scenario.choose("round_robin@all")[1]] == ["any"]
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
    for bundle in POLICIES.values():
        one, other = (bundle.make(Circumstances()) for _ in range(2))
        assert one.dispatch is not other.dispatch


A_TASK = "{name: a, rate: 1, prompt: 9, output: 9}"
BAD = {
    "instances: [{role: any}]": [
        "t.yaml:1: workload: missing, and there is no default",
        "t.yaml:1: slo: missing, and there is no default",
    ],
    ONE_LINE + "policy: best": ["t.yaml:5: policy: 'best', allowed is " + ", ".join(POLICIES)],
    ONE_LINE + "polcy: best": ["t.yaml:5: polcy: no such setting, did you mean policy?"],
    ONE_LINE + "seed: -1": ["t.yaml:5: seed: '-1', allowed is a whole number of at least 0"],
    ONE_LINE.replace("tpot-ms: 50", "tpot-ms: 0"): [
        "t.yaml:2: slo.tpot-ms: '0', allowed is a number above 0",
    ],
    ONE_LINE.replace(", tpot-ms: 50", ""): ["t.yaml:2: slo: tpot-ms is missing, and there is no default"],
    ONE_LINE.replace("{trace: t.csv}", "{max-tokens: 5}"): [
        "t.yaml:1: workload: exactly one of trace, synthetic, tasks is needed"
    ],
    ONE_LINE.replace("{trace: t.csv}", "{trace: t.csv, synthetic: {rate: 1}}"): [
        "t.yaml:1: workload: exactly one of trace, synthetic, tasks is needed"
    ],
    ONE_LINE.replace("h200", "h300"): [
        f"t.yaml:3: engine.device: 'h300', allowed are {', '.join(DEVICES)}, this-machine, or a .json or .yaml file"
    ],
    ONE_LINE.replace("[{count: 2}]", "[{role: prefill}]"): [
        "t.yaml:4: instances[0]: role 'prefill', allowed only beside instances of 'decode' or 'any'"
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
    ONE_LINE.replace("t.csv", "t.csv, offline: {}"): [
        "t.yaml:1: workload.offline: either rate or backlog is needed, and not both"
    ],
    ONE_LINE.replace("t.csv", "t.csv, offline: {rate: 1, backlog: 5}"): [
        "t.yaml:1: workload.offline: either rate or backlog is needed, and not both"
    ],
    ONE_LINE.replace("t.csv", "t.csv, offline: {rate: 0}"): [
        "t.yaml:1: workload.offline.rate: '0', allowed is a number above 0 and at most 1e+06"
    ],
    ONE_LINE.replace("t.csv", "t.csv, offline: {backlog: 9, like-online: true, output-sd: 5}"): [
        "t.yaml:1: workload.offline.output-sd: given, allowed only without like-online"
    ],
    ONE_LINE.replace("t.csv", "t.csv, vary: offline"): [
        "t.yaml:1: workload.vary: 'offline', allowed only with workload.offline.rate"
    ],
    ONE_LINE.replace("t.csv", "t.csv, vary: offline, offline: {backlog: 9}"): [
        "t.yaml:1: workload.vary: 'offline', allowed only with workload.offline.rate"
    ],
    ONE_LINE.replace("t.csv", "t.csv, tide: 4"): [
        "t.yaml:1: workload.tide: given, and workload.duration is not: when would it end?"
    ],
    ONE_LINE.replace("t.csv", "t.csv, tide: 0.5, duration: 9"): [
        "t.yaml:1: workload.tide: '0.5', allowed is a number from 1 to 1e+06"
    ],
    ONE_LINE.replace("trace: t.csv", "synthetic: {rate: 1}, spread: 3, chats: true"): [
        "t.yaml:1: workload.spread: '3', allowed only with a trace",
        "t.yaml:1: workload.chats: 'true', allowed only with a trace",
    ],
    ONE_LINE.replace("trace: t.csv", "tasks: [{name: a, rate: 1, prompt: 9, output: 9}]"): [
        "t.yaml:1: workload.tasks: given, and workload.duration is not: when would it end?"
    ],
    ONE_LINE.replace("trace: t.csv", "tasks: [], duration: 9"): [
        "t.yaml:1: workload.tasks: empty, allowed is a list of at least one task"
    ],
    ONE_LINE.replace("trace: t.csv", "tasks: [{rate: 1, output: 9, ttft-ms: -5}], duration: 9"): [
        "t.yaml:1: workload.tasks[0]: name is missing, and there is no default",
        "t.yaml:1: workload.tasks[0]: prompt is missing, and there is no default",
        "t.yaml:1: workload.tasks[0].ttft-ms: '-5', allowed is a number above 0",
    ],
    ONE_LINE.replace("trace: t.csv", f"tasks: [{A_TASK}, {A_TASK}], duration: 9"): [
        "t.yaml:1: workload.tasks[1].name: a second task called 'a', allowed is a name of its own"
    ],
    ONE_LINE.replace("trace: t.csv", f"tasks: [{A_TASK[:-1]}, start: 9}}], duration: 9"): [
        "t.yaml:1: workload.tasks[0].start: 9, allowed is less than the workload's duration of 9"
    ],
    ONE_LINE.replace("trace: t.csv", f"tasks: [{A_TASK}], duration: 9").replace("slo:", "#"): [
        "t.yaml:1: workload.tasks[0]: ttft-ms is missing, and there is no default",
        "t.yaml:1: workload.tasks[0]: tpot-ms is missing, and there is no default",
    ],
    ONE_LINE + "scaling: {least: 1}": ["t.yaml:5: scaling: most is missing, and there is no default"],
    ONE_LINE + "scaling: {least: 5, most: 4}": ["t.yaml:5: scaling.most: 4, allowed is at least least (5)"],
    ONE_LINE + "scaling: {least: 1, most: 1}": [
        "t.yaml:5: scaling.most: 1, allowed is at least the 2 that serve from the start"
    ],
    ONE_LINE + "layouts: {big: [{count: 9}]}\nscaling: {least: 1, most: 8}": [
        "t.yaml:6: scaling.most: 8, allowed is at least the 9 that serve from the start in layout big"
    ],
    ONE_LINE + "target: 1.5": ["t.yaml:5: target: '1.5', allowed is a number above 0 and at most 1"],
    ONE_LINE.replace("h200", "h200, efficiency: 2"): [
        "t.yaml:3: engine.efficiency: '2', allowed is a number above 0 and at most 1"
    ],
    ONE_LINE.replace("h200", "h200, scheduling-policy: best"): [
        "t.yaml:3: engine.scheduling-policy: 'best', allowed is " + ", ".join(ENGINE_POLICIES)
    ],
    ONE_LINE.replace("h200", "l4, geometry: llama-2-70b, tensor-parallel-size: 4"): [
        "t.yaml:4: instances[0]: 16384 tokens need more KV than the 0 blocks there"
    ],
    ONE_LINE + "layouts: [1]": ["t.yaml:5: layouts: a list, allowed are settings, one 'name: value' a line"],
    "a: [": ["t.yaml:1: this is no YAML: expected the node content, but found '<stream end>'"],
}


@pytest.mark.parametrize("text", BAD)
def test_each_mistake_is_one_line(text):
    with pytest.raises(ConfigError) as caught:
        parse("t.yaml", text, make_tables())
    assert str(caught.value).splitlines() == BAD[text]
