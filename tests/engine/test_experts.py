"""Experts that move between real ranks: loads become even, no step waits, and tokens are those of one rank."""

import json
import logging
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

import penstock.engine.experts
from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError
from penstock.core.memory import PARTS
from penstock.core.parallel import Placement, Switch
from penstock.core.plan import StepPlan
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.experts import SwitchGate, expert_ranks
from penstock.engine.options import check_options
from penstock.nn import native
from penstock.nn.loader import read_architecture
from penstock.sched.parallel.micro_batches import MicroBatches
from tests.helpers.checkpoints import edit, write_checkpoint
from tests.helpers.engines import Collector, make_request

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
EXPERTS, INTERVAL = 12, 7
CONFIG = {"window_size": INTERVAL, "step_interval": INTERVAL, "num_redundant_experts": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """DeepSeek-V3 whose routers choose an expert the less often the greater its number is, about as Zipf says."""
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), "deepseek-v3", n_group=1, topk_group=1)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[:] = -0.15 * (1 + tensor.new_tensor(range(EXPERTS))).log()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def build(folder, config=None, **options):
    """Of two ranks with whole experts, which move where there is a config."""
    threads = native.threads()
    if config is not None:
        options |= {"enable_eplb": True, "eplb_config": json.dumps(config)}
    common = {"device": "cpu", "kv_cache_memory": 16 << 20, "max_num_batched_tokens": 640, "prefix_cache": False}
    try:
        return build_engine(EngineOptions(model=str(folder), max_num_seqs=8, **common, **options), SystemClock())
    finally:
        native.set_threads(threads)


RANKS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def requests(scored=False):
    """
    Args:
        scored: the last layer has all rows too, since something is asked about each.
    """
    prompts = [[(7 * i + k * (i + 1)) % 300 + 1 for k in range(600)] for i in range(6)]
    asked = {"prompt_logprobs": 1} if scored else {}
    return [make_request(f"{i}", prompt, max_tokens=2, **asked) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(folder):
    """Of one rank."""
    with closing(build(folder)) as one:
        return Collector(one.engine).run(*requests())


def run(built, expected, until, scored=False):
    """The same requests again and again until something holds; all tokens are those of one rank."""
    for _ in range(200):
        assert Collector(built.engine).run(*requests(scored)) == expected
        if until(built.engine.executor.expert_load):
            return built.engine.executor.expert_load
    raise AssertionError("it does not hold after 200 times")


def test_steps_go_on_while_experts_are_loaded_and_then_ranks_have_equally_much(folder, expected, monkeypatch):
    may, load = threading.Event(), penstock.engine.experts.load_expert

    def slow(*args):
        may.wait()
        return load(*args)

    monkeypatch.setattr(penstock.engine.experts, "load_expert", slow)
    with closing(build(folder, CONFIG, **RANKS)) as built:
        before = run(built, expected, lambda load: load.looks > 1)
        assert before.switches == 0
        assert before.busiest > 1.3
        may.set()
        after = run(built, expected, lambda load: load.switches)
        run(built, expected, lambda load: load.looks > after.looks + 1 and load.busiest < 1.1)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_in_micro_batches_are_of_the_same_tokens(folder, expected, monkeypatch, stages):
    """While experts move, too; every step that can be is split, whether that pays or not."""
    monkeypatch.setattr(MicroBatches, "choose", lambda _, parts: sum(part.rows for part in parts) // 3)
    with closing(build(folder, CONFIG, enable_dbo=True, **RANKS, pipeline_parallel_size=stages)) as built:
        assert run(built, expected, lambda load: load.switches).splits > 5


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_move_between_data_parallel_groups(folder, expected, tmp_path, tensor):
    """Which have requests of their own, and of which the last has none at last: all switch before the same step."""
    groups = [{"data_parallel_rank": i, "data_parallel_address": str(tmp_path / "door")} for i in range(2)]
    layout = {"data_parallel_size": 2, "enable_expert_parallel": True, "tensor_parallel_size": tensor}
    with ThreadPoolExecutor(2) as pool:
        config = CONFIG | {"window_size": 4 * INTERVAL, "step_interval": 4 * INTERVAL}  # steps of groups mix by chance
        first, second = pool.map(lambda group: build(folder, config, **layout, **group), groups)
        load = first.engine.executor

        def serve(built):
            return Collector(built.engine).run(*requests(scored=True))

        for _ in range(100):
            assert list(pool.map(serve, (first, second))) == [expected] * 2
            if load.expert_load.switches:
                break
        before = load.expert_load
        run(first, expected, lambda load: load.looks > before.looks and load.busiest < 1.1, scored=True)
        placed = [[e.placement for e in built.worker.experts._layers.values()] for built in (first, second)]
        assert placed[0] == placed[1]
        list(pool.map(lambda built: built.close(), (first, second)))
    assert before.switches


@pytest.mark.parametrize("groups", [2, 4])
def test_all_groups_switch_before_the_same_step(groups):
    """Whatever each begins beside the others: two steps of its own, and all that others have begun. Group 0 is slow."""
    for seed in range(100):
        rng, memory, plan = random.Random(seed), SimpleNamespace(switch_at=0, ahead=2 * groups), StepPlan(())
        gates = [SwitchGate(memory) for _ in range(groups)]
        begun, own = [0] * groups, [list[int]() for _ in range(groups)]
        for version in range(1, 6):
            switch, said, done = Switch(version, 0, Placement(((0,),))), False, set()
            waiting = set(range(groups))
            for gate in gates:
                gate.hold(switch)
            while waiting:
                which = rng.choice([*range(groups), *range(1, groups)])
                if begun[which] == max(begun):  # it begins a step, if not too many are on their way
                    if sum(step > min(begun) for step in own[which]) == 2:
                        continue
                    own[which].append(begun[which] + 1)
                if which == 0 and not said:
                    gates[0].announce()
                    said = True
                begun[which] += 1
                if gates[which].next(plan).switch is switch:
                    done.add(begun[which])
                    waiting.discard(which)
                assert min(begun) < memory.ahead * (version + 1) * 2, "some have missed it"
            assert len(done) == 1


@pytest.mark.slow
def test_stages_are_balanced_each(folder, expected):
    """Rank 0 has not all layers, and asks others for what they have counted."""
    with closing(build(folder, CONFIG, **RANKS, pipeline_parallel_size=2)) as built:
        after = run(built, expected, lambda load: load.switches > 1, scored=True)
        run(built, expected, lambda load: load.looks > after.looks + 1 and load.busiest < 1.1, scored=True)


@pytest.mark.slow
def test_experts_of_another_checkpoint_stay_where_they_are(folder, expected, caplog, tmp_path):
    """Which looks the same: of the same shapes and size, written at the same time."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    with closing(build(copy, CONFIG, **RANKS)) as built, caplog.at_level(logging.WARNING):
        edit(copy)
        load = run(built, expected, lambda _: caplog.text.count("stay where they are") > 4)
        assert "was changed" in caplog.text
        assert load.switches == 0


@pytest.mark.slow
def test_what_was_moved_is_moved_again_after_a_sleep(folder, expected):
    """Weights are read anew, at home; what was brought for a switch that is yet to come has to be brought again too."""
    with closing(build(folder, CONFIG, **RANKS)) as built:
        loader = built.worker.experts
        run(built, expected, lambda load: load.switches)
        placed = [experts.placement for experts in loader._layers.values()]
        assert placed[0] != Placement.even(EXPERTS, 2)
        built.memory.sleep(2, built.engine.clear_cache())
        built.memory.wake_up(PARTS)
        assert [experts.placement for experts in loader._layers.values()] == placed
        looks = built.engine.executor.expert_load.looks
        run(built, expected, lambda load: load.looks > looks + 1 and load.busiest < 1.1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 2}, "enable-eplb: true, allowed is false where enable-expert-parallel spreads no"),
        ({**RANKS, "eplb_config": '{"policy": "flat"}'}, 'eplb-config: .*, allowed is "policy": "default"'),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        check_options(EngineOptions(model="", enable_eplb=True, **options))


def test_more_replicas_than_ranks_have_room_for_are_refused_by_name(folder):
    asked = EngineOptions(model="", eplb_config='{"num_redundant_experts": 13}', **RANKS)
    with pytest.raises(ConfigError, match=r'eplb-config: "num_redundant_experts": 13, allowed is at most 12 for 12'):
        expert_ranks(asked, read_architecture(folder)[1])
