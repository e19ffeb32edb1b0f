"""What a device can do: measured, saved, and found again by its name."""

import json
from dataclasses import replace

import pytest

from penstock.cli import devices, doctor
from penstock.cli import engine as engine_process
from penstock.cli.devices import load_device, save_device, saved_file
from penstock.cli.main import main
from penstock.core.clock import SystemClock
from penstock.core.device import DeviceModel
from penstock.core.errors import ConfigError
from penstock.nn import ceilings, native
from penstock.nn.native.isa import sets_here
from penstock.sched.steptime import DEVICES, read_shape
from penstock.service.checkpoint import DEMO
from penstock.transfer.pool import memfd_pool

DEVICE = DeviceModel(peak_flops=1e12, bandwidth=5e10, memory=2 * 10**10)


needs_kernels = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "MEASURED_SECONDS", 0.02)
    monkeypatch.setattr(doctor, "KERNEL_SECONDS", 0.01)
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch):
    """What was measured, without measuring it."""
    monkeypatch.setattr(doctor, "measure", lambda device: (DEVICE, 3e11))
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda seconds: ceilings.Ceilings(5e10, 2e12, 1e12))
    monkeypatch.setattr(ceilings, "measure_kernels", lambda seconds: [ceilings.Speed("product", 4e10, 1e12)])


def test_doctor_shows_the_speed_and_writes_nothing(measured, cache, capsys):
    assert main(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "vector units" in shown
    assert "demo model" in shown
    assert "pillow" in shown
    assert "langchain" not in shown, "only tests need it"
    assert "1e+12 bfloat16 and 3e+11 float32 operations a second" in shown
    assert "50 GB/s, 20 GB" in shown
    assert not cache.exists()
    with pytest.raises(ConfigError, match="never measured; `penstock doctor --save` does"):
        load_device("this-machine")


@needs_kernels
def test_doctor_says_how_near_kernels_of_a_set_come_to_its_limits(measured, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    least = sets_here()[0].name
    assert main(["doctor", "--isa", least]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"kernels {least} ok" in shown
    assert "at most 2000 GFLOP/s of bfloat16, 1000 of float32, reads 50 GB/s" in shown
    assert "product ok 1000 GFLOP/s (50%), 40.0 GB/s (80% of reads)" in shown
    assert native.isa() == sets_here()[-1]
    assert main(["doctor", "--isa", "mmx"]) == 2
    assert f"isa: 'mmx', unknown, allowed are {least}" in capsys.readouterr().err


@needs_kernels
def test_kernels_stay_below_what_the_machine_can_do():
    """By far more than what neighbours of this test take."""
    most = ceilings.measure_ceilings(0.05)
    assert 1e9 < most.float32 < 1e14
    assert most.float32 < 4 * most.flops
    for kernel in ceilings.measure_kernels(0.01):
        assert 0 < kernel.bytes < 100 * most.bandwidth
        assert 0 < kernel.flops < 10 * most.flops


def test_doctor_names_the_extra_that_a_missing_package_is_for(measured, capsys, monkeypatch):
    def version(package):
        raise doctor.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 1
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["aetcd", "note", "only", "for", "penstock[etcd]"] in shown
    assert ["aiohttp", "note", "only", "for", "penstock[adopt],", "penstock[bench]"] in shown
    assert ["numpy", "missing", "pip", "install", "'numpy'"] in shown
    assert not any(line[:1] == ["pytest"] for line in shown)


def test_doctor_saves_where_this_machine_is_looked_for(cache, capsys):
    assert main(["doctor", "--save"]) == 0
    assert list(cache.rglob("*.json")) == [saved_file()]
    device = load_device("this-machine")
    assert device == load_device(str(saved_file()))
    assert 1e8 < device.peak_flops < 1e16
    assert 1e8 < device.bandwidth < 1e14
    assert device.memory > 1 << 28


def test_doctor_saves_to_a_file(measured, tmp_path, cache, capsys):
    file = tmp_path / "new" / "here.json"
    assert main(["doctor", "--save", str(file)]) == 0
    assert json.loads(file.read_text())["bandwidth"] == load_device(str(file)).bandwidth
    assert not cache.exists()
    (tmp_path / "taken").touch()
    assert main(["doctor", "--save", str(tmp_path / "taken" / "here.json")]) == 2
    assert "save: " in capsys.readouterr().err


def test_devices_by_name_and_from_files(tmp_path):
    assert load_device("h200") is DEVICES["h200"]
    file = tmp_path / "mine.yaml"
    file.write_text("peak_flops: 1e12\nbandwidth: 5e+10\nmemory: 20000000000\n")
    assert load_device(str(file)) == DEVICE
    save_device(DEVICE, tmp_path / "mine.json")
    assert load_device(str(tmp_path / "mine.json")) == DEVICE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peak_flops: 1e12\nbandwidth: 5e10\nmemory: -1\n", "memory is -1, allowed is a number above 0"),
        ("peak_flops: .inf\nbandwidth: 5e10\nmemory: 1\n", "peak_flops is inf"),
        ("peak_flops: fast\nbandwidth: 5e10\nmemory: 1\n", "peak_flops"),
        ("bandwidth: 5e10\nmemory: 1\n", "peak_flops"),
        ("peak_flops: 1\nbandwidth: 1\nmemory: 1\ncolour: red\n", "unknown is colour; allowed are peak_flops, "),
        ("[1, 2]", "must hold a device's values by name"),
        ("{", "mine.yaml"),
        (None, "No such file"),
    ],
)
def test_a_file_that_says_no_device(tmp_path, text, said):
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_device(str(file))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field == "device"


def test_a_name_that_is_no_device():
    with pytest.raises(ConfigError, match=r"device: 'h300', allowed are a100, .*, this-machine, or a \.json"):
        load_device("h300")


def introduce(device, **options):
    settings = {"name": "a", "options": {"model": str(DEMO), "device": device, "max_num_seqs": 8, **options}}
    built = engine_process.build(settings, SystemClock(), memfd_pool)
    try:
        return engine_process.introduce(settings, 1, built, None)
    finally:
        built.close()


def test_a_modelled_engine_says_what_it_models():
    ready = introduce("modelled:l4", slowdown=2.0, geometry="qwen2-7b", max_model_len=512)
    slower = replace(DEVICES["l4"].slowed(2.0), host_bandwidth=DEVICES["l4"].host_bandwidth / 2)
    assert ready.device_model == slower
    assert ready.shape.hidden == 3584
    assert ready.max_sequences == 8


def test_an_engine_on_a_cpu_measures_what_its_model_takes():
    config = json.loads((DEMO / "config.json").read_text())
    ready = introduce("cpu", max_num_batched_tokens=64, max_model_len=128, kv_cache_memory=1 << 24)
    assert ready.shape.layer_params == read_shape(config).layer_params
    assert ready.shape.bytes_per_value in (2, 4)
    assert 1e8 < ready.device_model.peak_flops < 1e16
    assert 1e7 < ready.device_model.bandwidth < 1e13
    assert ready.device_model.memory > 1 << 28
