"""Compiles the kernels for an instruction set, once; the library is kept in the user's cache."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path

from penstock.nn.native.isa import InstructionSet

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# one arithmetic everywhere: a multiplication and an addition become one operation only where the source says so
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi", "-pthread")
SECONDS = 300  # that a compiler may take

log = logging.getLogger("penstock.native")


class BuildError(Exception):
    """Why there is no library."""


def cache_folder() -> Path:
    return Path.home() / ".cache" / "penstock" / "native"


def build_library(isa: InstructionSet, folder: Path | None = None) -> Path:
    """The library for these sources, this compiler and an instruction set, compiled unless the folder has it.

    Args:
        folder: where libraries are kept; by default the user's cache, or a new temporary one where that cannot be
            written.

    Raises:
        BuildError: no compiler, or one that fails.
    """
    compiler = next((found for found in map(shutil.which, COMPILERS) if found), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)})")
    name = f"penstock-{isa.name}-{_digest(Path(compiler), isa)}.so"
    if folder is None:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            folder = Path(tempfile.mkdtemp(prefix="penstock-native-"))
    library = folder / name
    if not library.exists():
        log.info("compiling kernels for %s, which takes a moment and is done once", isa.name)
        try:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                # concurrent builds are harmless: the last one replaces an equal library
                _compile(compiler, isa, Path(scratch)).replace(library)
        except OSError as error:
            raise BuildError(f"{folder} cannot be written ({error})") from None
    return library


def _compile(compiler: str, isa: InstructionSet, scratch: Path) -> Path:
    """All sources at once, each by its own process."""
    flags = (*FLAGS, *isa.flags)
    objects, running = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(scratch / f"{source.stem}.o")
        command = [compiler, *flags, "-c", str(source), "-o", str(objects[-1])]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    failed = None
    for process in running:
        try:
            _, said = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
        if process.returncode:
            failed = failed or said
    if failed is None:
        library = scratch / "library.so"
        command = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode == 0:
            return library
        failed = done.stderr
    lines = failed.strip().splitlines()
    raise BuildError(f"{compiler} failed: {next((line for line in lines if 'error' in line), 'without a word')}")


def _digest(compiler: Path, isa: InstructionSet) -> str:
    """Names a library by everything that it is made from."""
    compiler = compiler.resolve()
    stat = compiler.stat()
    digest = blake2b(digest_size=16)
    for part in (*FLAGS, *isa.flags, str(compiler), f"{stat.st_size} {stat.st_mtime_ns}"):
        digest.update(part.encode() + b"\0")
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
