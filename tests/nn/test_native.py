"""Kernels are compiled once, by whoever needs them first, and nothing breaks where that fails."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.nn import native
from penstock.nn.native import build as builder

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
    first = builder.build_library(tmp_path)
    assert builder.build_library(tmp_path) == first
    written = first.stat().st_mtime_ns
    (tiny / "one.cpp").write_text('extern "C" int penstock_one() { return 2; }')
    assert builder.build_library(tmp_path) != first
    assert first.stat().st_mtime_ns == written
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_file()) == [".so", ".so"]


@needs_kernels
def test_sources_that_do_not_compile_are_told_in_a_line_and_leave_nothing(tiny, tmp_path):
    (tiny / "two.cpp").write_text("int x = ;")
    with pytest.raises(builder.BuildError, match="error: expected primary-expression") as told:
        builder.build_library(tmp_path)
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


ELSEWHERE = """
import sys
from pathlib import Path
import torch
from penstock.nn.native import build
build._for_this_machine = lambda: "-march=" + sys.argv[1]
build.cache_folder = lambda: Path(sys.argv[2])
from penstock.nn import native, ops
from penstock.nn.ops import OPS
from penstock.nn.packed import PackedWeight
assert native.missing() is None, native.missing()
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
@pytest.mark.parametrize("instructions", ["x86-64", "haswell", "skylake-avx512"])
def test_other_processors_compute_as_well(instructions, tmp_path):
    """What this one can run of what others have: none of these has instructions for bfloat16."""
    flags = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
    if (
        not {"x86-64": {"lm"}, "haswell": {"avx2", "fma"}, "skylake-avx512": {"avx512bw", "avx512vl"}}[instructions]
        <= flags
    ):
        pytest.skip(f"not a processor that runs what is compiled for {instructions}")
    command = [sys.executable, "-c", ELSEWHERE, instructions, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "fine", done.stderr
