"""Steps that were measured, in the step-time model's terms, and where scenarios find them."""

import json
import random
from dataclasses import asdict, replace

import pytest

from penstock.cli import devices, steps
from penstock.cli.devices import MeasuredSteps, load_device, load_factors, load_geometry, save_device
from penstock.cli.main import main
from penstock.cli.scenario_file import make_tables
from penstock.cli.steps import fit
from penstock.core.device import DeviceModel
from penstock.core.errors import ConfigError
from penstock.core.plan import StepWork
from penstock.sched.steptime import GEOMETRIES, StepTime
from penstock.service.checkpoint import DEMO
from penstock.sim.scenario import parse

DEVICE = DeviceModel(peak_flops=4e11, bandwidth=4e10, memory=2 * 10**10)
SLOW = replace(DEVICE, overhead_ms=1.7)
SHAPE = load_geometry("demo")
TRUTH = {
    "gemm:compute": 4.0,
    "gemm:memory": 0.0,
    "lm_head:compute": 50.0,
    "lm_head:memory": 0.0,
    "prefill_attention:compute": 7.0,
    "prefill_attention:memory": 0.0,
    "decode_attention:memory": 3.0,
    "decode_attention:compute": 0.0,
}


def drawn_work(rng):
    decodes = rng.choice([0, 1, 2, 4, 8, 16, 32])
    prefills = [(rng.randint(2, 500), rng.choice([0, 0, 512])) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    if not decodes and not prefills:
        decodes = 1
    return StepWork(prefills, decodes, decodes * rng.randint(10, 2000), decodes + len(prefills))


def drawn_steps(count=600, noise=0.0, accidents=0.0):
    """Of a machine that is exactly as `TRUTH` says, but for luck; and an overhead of 1.7 ms."""
    rng = random.Random(1)
    times = StepTime(SLOW, SHAPE, TRUTH)
    found = []
    for _ in range(count):
        work = drawn_work(rng)
        luck = rng.lognormvariate(-(noise**2) / 2, noise) * (rng.uniform(2, 9) if rng.random() < accidents else 1)
        found.append((work, times.step_ms(*work) * luck))
    return found


def test_a_machine_is_found_again():
    device, measured = fit(DEVICE, drawn_steps(), SHAPE)
    assert device.overhead_ms == pytest.approx(1.7)
    assert measured.factors == pytest.approx(TRUTH)
    assert measured.noise == pytest.approx(0, abs=1e-6)
    assert (device.peak_flops, device.bandwidth) == (DEVICE.peak_flops, DEVICE.bandwidth)


@pytest.mark.parametrize("accidents", [0.0, 0.2])
def test_through_noise_and_accidents(accidents):
    device, measured = fit(DEVICE, drawn_steps(2000, noise=0.1, accidents=accidents), SHAPE)
    assert measured.noise == pytest.approx(0.1, rel=0.2)
    found, truth = StepTime(device, SHAPE, measured.factors), StepTime(SLOW, SHAPE, TRUTH)
    rng = random.Random(2)
    for _ in range(50):
        work = drawn_work(rng)
        assert found.step_ms(*work) == pytest.approx(truth.step_ms(*work), rel=0.06)


def test_a_term_that_would_be_negative_is_left_out():
    taken = [(StepWork([], n, 1000 * n, n), 5.0 - 0.1 * n) for n in range(1, 9)]
    device, measured = fit(DEVICE, taken, SHAPE)
    assert all(factor >= 0 for factor in measured.factors.values())
    assert 4 < device.overhead_ms < 5


SCENARIO = """\
workload: {trace: t.csv}
slo: {ttft-ms: 1000, tpot-ms: 50}
engine: {device: modelled:FILE, geometry: GEOMETRY, max-model-len: 2048}
instances: [{count: 1}]
"""


def test_a_scenario_takes_steps_as_long_as_measured_and_tells_nobody(tmp_path):
    file = tmp_path / "here.json"
    save_device(DEVICE, file, MeasuredSteps(shape=SHAPE, factors=TRUTH, noise=0.1, count=9))
    assert load_device(str(file)) == DEVICE
    assert load_factors(str(file), SHAPE) == TRUTH
    assert load_factors(str(file), GEOMETRIES["qwen3-8b"]) == {}
    assert load_factors("h200", SHAPE) == {}
    text = SCENARIO.replace("FILE", str(file))
    for geometry in ("demo", str(DEMO)):
        (group,) = parse("t.yaml", text.replace("GEOMETRY", geometry), make_tables()).layouts[""]
        assert group.times.factors == TRUTH
        assert group.times.shape == SHAPE
        assert group.believed == DEVICE
    (other,) = parse("t.yaml", text.replace("GEOMETRY", "qwen3-0.6b"), make_tables()).layouts[""]
    assert other.times.factors == {}


def test_a_geometry_that_is_none(tmp_path):
    text = SCENARIO.replace("FILE", "h200").replace("GEOMETRY", "gpt-9")
    with pytest.raises(ConfigError) as caught:
        parse("t.yaml", text, make_tables())
    known = ", ".join(GEOMETRIES)
    assert str(caught.value) == (
        f"t.yaml:3: engine.geometry: 'gpt-9', allowed are {known}, demo, demo-vl, or a folder with a config.json"
    )
    for content, said in (("{", "is no JSON"), ("[1]", "holds no JSON object"), ("{}", "hidden_size is missing")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=said):
            load_geometry(str(tmp_path))


@pytest.mark.parametrize(
    ("value", "said"), [(-1, "steps.factors.gemm is -1"), (float("nan"), "gemm is nan"), ("fast", "Expected `float`")]
)
def test_a_file_with_a_factor_that_is_none(tmp_path, value, said):
    file = tmp_path / "here.json"
    measured = {"shape": asdict(SHAPE), "factors": {"gemm": value}, "noise": 0.1, "count": 9}
    file.write_text(json.dumps(asdict(DEVICE) | {"steps": measured}).replace("NaN", ".nan"))
    with pytest.raises(ConfigError) as caught:
        load_device(str(file))
    assert said in str(caught.value)


@pytest.mark.slow
def test_doctor_measures_steps_of_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(devices, "MEASURED_SECONDS", 0.02)
    monkeypatch.setattr(steps, "CONCURRENCY", (1, 4))
    monkeypatch.setattr(steps, "TURNS", 1)
    monkeypatch.setattr(steps, "LONGEST", 256)
    assert main(["doctor", "--save", "--model", "demo"]) == 0
    assert "steps of demo" in capsys.readouterr().out
    device = load_device("this-machine")
    times = StepTime(device, SHAPE, load_factors("this-machine", SHAPE))
    assert 0.1 < times.step_ms(decodes=1, kv_tokens=64) < times.step_ms([(256, 0)], 4, 256) < 10_000
    assert main(["doctor", "--model", str(tmp_path)]) == 2
