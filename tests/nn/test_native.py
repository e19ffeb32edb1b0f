"""Kernels are compiled once, by whoever needs them first, and nothing breaks where that fails."""

import logging
import subprocess
import sys
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
    assert builder.build_library(BEST, tmp_path) != first
    assert first.stat().st_mtime_ns == written
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_file()) == [".so", ".so"]


@needs_kernels
def test_sources_that_do_not_compile_are_told_in_a_line_and_leave_nothing(tiny, tmp_path):
    (tiny / "two.cpp").write_text("int x = ;")
    with pytest.raises(builder.BuildError, match="error: expected primary-expression") as told:
        builder.build_library(BEST, tmp_path)
    assert "\n" not in str(told.value)
    assert [path for path in tmp_path.iterdir() if path != tiny] == []


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
