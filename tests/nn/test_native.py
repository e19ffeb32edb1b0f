"""Kernels are compiled once, by whoever needs them first, and nothing breaks where that fails."""

import logging
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.nn import native
from penstock.nn.native import build as builder
from penstock.nn.native.isa import SETS, find_set, sets_here, sets_of

HERE = sets_here()
BEST = next(reversed(HERE), None)
needs_kernels = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Sources that compile at once."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int penstock_one() { return 1; }')
    monkeypatch.setattr(builder, "SOURCES", sources)
    return sources


@needs_kernels
def test_a_library_is_kept_and_made_again_when_its_sources_change(tiny, tmp_path):
    first = builder.build_library(BEST, tmp_path)
    assert builder.build_library(BEST, tmp_path) == first
    written = first.stat().st_mtime_ns
    (tiny / "one.cpp").write_text('extern "C" int penstock_one() { return 2; }')
    for number in range(builder.KEPT):
        (tmp_path / f"penstock-old-{number}.so").touch()
        os.utime(tmp_path / f"penstock-old-{number}.so", (number, number))
    second = builder.build_library(BEST, tmp_path)
    assert second != first
    kept = {path.name for path in tmp_path.glob("*.so")}
    assert kept >= {first.name, second.name, f"penstock-old-{builder.KEPT - 1}.so"}
    assert len(kept) == builder.KEPT
    assert first.stat().st_mtime_ns == written
    assert {path.suffix for path in tmp_path.iterdir() if path.is_file()} == {".so"}


@needs_kernels
def test_sources_that_do_not_compile_are_told_in_a_line_and_leave_nothing(tiny, tmp_path):
    (tiny / "two.cpp").write_text("int x = ;")
    with pytest.raises(builder.BuildError, match="error: expected primary-expression") as told:
        builder.build_library(BEST, tmp_path)
    assert "\n" not in str(told.value)
    assert [path for path in tmp_path.iterdir() if path != tiny] == []


@needs_kernels
def test_a_wheels_library_is_taken_without_a_compiler(tiny, tmp_path, monkeypatch):
    one = builder.build_library(BEST, tmp_path).read_bytes()
    (tiny / "one.cpp").write_text('extern "C" int penstock_two() { return 2; }')
    two = builder.build_library(BEST, tmp_path).read_bytes()
    monkeypatch.setattr(builder, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(builder, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(builder, "IN_WHEEL", tmp_path)
    other = tmp_path / f"penstock-not_{BEST.name}-1.so.xz"
    other.touch()
    assert builder.find_library(BEST) is None
    with pytest.raises(builder.BuildError, match=r"no C\+\+ compiler"):
        builder.build_library(BEST)
    library = tmp_path / f"penstock-{BEST.name}-1.so.xz"
    library.write_bytes(lzma.compress(one))
    assert builder.find_library(BEST) == builder.build_library(BEST) == library
    assert builder.load_library(library).penstock_one() == 1
    library.write_bytes(lzma.compress(two))
    assert builder.load_library(library).penstock_two() == 2
    library.write_bytes(library.read_bytes()[:1000])
    with pytest.raises(OSError, match="is damaged"):
        builder.load_library(library)


def test_without_a_compiler_everything_runs_as_plain_torch(monkeypatch, caplog):
    monkeypatch.setattr(builder, "COMPILERS", ("no-such-compiler",))
    native._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.missing() == native.missing() == "no C++ compiler (no-such-compiler)"
        assert len(caplog.records) == 1
        assert native.threads() == 1
    finally:
        native._load.cache_clear()


@pytest.mark.skipif(native.missing() is not None or len(HERE) < 2, reason="needs two instruction sets")
def test_where_the_best_set_does_not_compile_the_next_is_used(monkeypatch, caplog):
    build = native.build_library

    def old_compiler(isa):
        if isa == BEST:
            raise builder.BuildError("c++ failed: -mnew")
        return build(isa)

    monkeypatch.setattr(native, "build_library", old_compiler)
    native._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.isa() == HERE[-2]
        assert caplog.messages == [f"kernels for {HERE[-2].name} instead of {BEST.name}: c++ failed: -mnew"]
    finally:
        native._load.cache_clear()


@needs_kernels
def test_the_command_says_where_the_library_is():
    command = [sys.executable, "-m", "penstock.nn.native"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert Path(done.stdout.removeprefix("kernels: ").strip()).suffix == ".so"


def test_a_processor_gets_the_best_set_that_it_has():
    haswell = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "sse2"}
    skylake = haswell | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    for machine, features, best in (
        ("x86_64", {"sse2", "avx"}, None),
        ("x86_64", haswell, "avx2"),
        ("AMD64", haswell | {"avx512f"}, "avx2"),
        ("x86_64", skylake, "avx512"),
        ("x86_64", skylake | {"avx512_vnni"}, "avx512_vnni"),
        ("x86_64", skylake | {"avx512_bf16"}, "avx512"),
        ("x86_64", skylake | {"avx512_vnni", "avx512_bf16"}, "avx512_bf16"),
        ("x86_64", skylake | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}, "amx"),
        ("arm64", set(), "neon"),
        ("aarch64", {"asimd", "asimddp", "i8mm", "bf16"}, "neon_bf16"),
        ("riscv64", haswell, None),
    ):
        assert next((one.name for one in reversed(sets_of(machine, features))), None) == best


def test_what_a_processor_does_not_have_is_refused_by_name():
    have = ", ".join(one.name for one in HERE) or "none on this processor"
    with pytest.raises(ConfigError, match=rf"isa: 'mmx', unknown, allowed are {have}$") as told:
        native.use("mmx")
    assert told.value.field == "isa"
    absent = next(one.name for one in SETS if one not in HERE)
    with pytest.raises(ConfigError, match=f"isa: '{absent}', this processor does not have it, allowed are {have}$"):
        find_set(absent)


ELSEWHERE = """
import sys
from pathlib import Path
import torch
from penstock.nn import native, ops
from penstock.nn.packed import PackedWeight
native.use(sys.argv[1])
assert native.missing() is None, native.missing()
assert native.made_from().startswith(f"penstock-{sys.argv[1]}-")
for dtype in (torch.float32, torch.bfloat16):
    weight, x = torch.randn(130, 333).to(dtype), torch.randn(40, 333).to(dtype)
    packed = PackedWeight.of(weight)
    assert torch.equal(packed.unpacked(), weight)
    whole = ops.packed_linear(x, packed, None, torch.float32)
    assert torch.allclose(whole.double(), x.double() @ weight.double().T, atol=1e-3)
    for rows in range(1, 40):
        assert torch.equal(ops.packed_linear(x[:rows], packed, None, torch.float32), whole[:rows])
print("fine")
"""


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("isa", [one.name for one in HERE])
def test_every_instruction_set_computes_as_well(isa):
    command = [sys.executable, "-c", ELSEWHERE, isa]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "fine", done.stderr


ROOT = Path(__file__).parents[2]
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@pytest.mark.slow
@pytest.mark.skipif(not CROSS or not EMULATOR, reason="needs Debian's g++-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize("isa", [one for one in SETS if one.machine == "aarch64"], ids=lambda one: one.name)
def test_kernels_of_arm_compute_as_well_in_an_emulator(isa, tmp_path):
    sources = [*builder.SOURCES.glob("*.cpp"), Path(__file__).parent / "kernels.cpp"]
    program, running = tmp_path / "kernels", []
    for source in sources:
        command = [CROSS, *builder.FLAGS, *isa.flags, "-w", f"-I{builder.SOURCES}", "-c", source]
        running.append(subprocess.Popen([*command, "-o", tmp_path / f"{source.stem}.o"]))
    assert [process.wait(timeout=600) for process in running] == [0] * len(sources)
    subprocess.run([CROSS, "-static", "-pthread", *tmp_path.glob("*.o"), "-o", program], check=True)
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "fine", done.stdout + done.stderr


IN_WHEEL = """
from pathlib import Path
import penstock
from penstock import LLM, SamplingParams
from penstock.nn import native
from penstock.nn.native.build import IN_WHEEL
from penstock.nn.native.isa import sets_here
assert Path(penstock.__file__).is_relative_to(Path.cwd()), penstock.__file__
for isa in sets_here():
    native.use(isa.name)
    assert native.missing() is None, native.missing()
    assert (IN_WHEEL / f"{native.made_from()}.so.xz").exists(), native.made_from()
(found,) = LLM("demo", weight_cache=False).generate(["import os"], SamplingParams(max_tokens=8, temperature=0))
assert len(found.outputs[0].token_ids) == 8
print("fine")
"""


@pytest.mark.slow
@needs_kernels
def test_a_wheel_serves_without_a_compiler(tmp_path):
    """In a bare environment, to which only what penstock needs is lent."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=ignored)
    archive = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('..')"]
    subprocess.run(archive, cwd=source, check=True, timeout=300, stdout=subprocess.DEVNULL)  # as python -m build does
    building = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, *tmp_path.glob("*.tar.gz")]
    subprocess.run(building, check=True, timeout=1800)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"penstock-.*-py3-none-manylinux_2_\d+_{platform.machine()}.whl", wheel.name)
    assert wheel.stat().st_size < 10_000_000
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    python, (packages,) = bare / "bin" / "python", bare.glob("lib/python*/site-packages")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    environment = {"PATH": str(bare / "bin"), "HOME": str(tmp_path)}
    run = [python, "-I", "-c", IN_WHEEL]
    done = subprocess.run(run, env=environment, cwd=bare, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "fine", done.stderr
