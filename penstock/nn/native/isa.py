"""Instruction sets that kernels are compiled for, each into a library of its own, and which of them a processor has."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError

MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # other names of them


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """
    Attributes:
        name: for --isa, and in the names of libraries and of packed weights.
        machine: as `platform.machine` has it.
        flags: of the compiler.
        needs: what the processor must have, as Linux calls it in /proc/cpuinfo.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _of(name: str, machine: str, flags: str, needs: str) -> InstructionSet:
    return InstructionSet(name, machine, tuple(flags.split()), frozenset(needs.split()))


AVX2 = "avx2 bmi1 bmi2 f16c fma movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
AMX = "amx_tile amx_int8 amx_bf16"
V4 = "-march=x86-64-v4"
BF16 = f"{V4} -mavx512vnni -mavx512bf16"

# of each machine the least first
SETS = (
    _of("avx2", "x86_64", "-march=x86-64-v3", AVX2),
    _of("avx512", "x86_64", V4, AVX512),
    _of("avx512_vnni", "x86_64", f"{V4} -mavx512vnni", f"{AVX512} avx512_vnni"),
    _of("avx512_bf16", "x86_64", BF16, f"{AVX512} avx512_vnni avx512_bf16"),
    _of("amx", "x86_64", f"{BF16} -mamx-tile -mamx-int8 -mamx-bf16", f"{AVX512} avx512_vnni avx512_bf16 {AMX}"),
    _of("neon", "aarch64", "-march=armv8-a", ""),
    _of("neon_bf16", "aarch64", "-march=armv8.2-a+dotprod+i8mm+bf16", "asimddp bf16 i8mm"),
)  # fmt: skip


@functools.cache
def processor_features() -> frozenset[str]:
    """What the processor has and the system lets programs use, as far as that is known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    features = frozenset(found.partition(":")[2].split())
    return features if tiles_granted() else features - set(AMX.split())


def tiles_granted() -> bool:
    """Asks Linux for the registers of tiles, which a process gets only so; its threads and forks have them too."""
    if machine_name(platform.machine()) != "x86_64":
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM of asm/prctl.h, XFEATURE_XTILE_DATA
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def machine_name(machine: str) -> str:
    """As sets have it."""
    return MACHINES.get(machine, machine)


def sets_of(machine: str, features: Iterable[str]) -> tuple[InstructionSet, ...]:
    """Those that such a processor has, the best one last."""
    features = frozenset(features)
    return tuple(one for one in SETS if one.machine == machine_name(machine) and one.needs <= features)


def sets_here() -> tuple[InstructionSet, ...]:
    """Those of this processor, the best one last; none where there are no kernels for it."""
    return sets_of(platform.machine(), processor_features())


def find_set(name: str) -> InstructionSet:
    """Raises ConfigError on one that is unknown, or that this processor does not have."""
    here = {one.name: one for one in sets_here()}
    if name not in here:
        why = "this processor does not have it" if name in {one.name for one in SETS} else "unknown"
        raise ConfigError(f"isa: {name!r}, {why}, allowed are {', '.join(here) or 'none on this processor'}", "isa")
    return here[name]
