"""Compiles the kernels for an instruction set, once; the library is kept in the user's cache. Wheels have theirs."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import lzma
import os
import platform
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path

from penstock.nn.native.isa import InstructionSet, machine_name

SOURCES = Path(__file__).parent
IN_WHEEL = SOURCES / "lib"  # of a wheel that holds libraries
PACKED = ".xz"  # as these are there
COMPILERS = ("c++", "g++", "clang++")
# one arithmetic everywhere: a multiplication and an addition become one operation only where the source says so
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi", "-pthread")
LESS = {"bounded_logits": "-O2", "quantised": "-O2"}  # as fast, and up to a third of the size
KEPT = 16  # libraries in the user's cache, a megabyte each
SECONDS = 1800  # that a compiler may take; half a minute on an idle core, but hosts that build are busy ones

log = logging.getLogger("penstock.native")


class BuildError(Exception):
    """Why there is no library."""


def cache_folder() -> Path:
    return Path.home() / ".cache" / "penstock" / "native"


def find_compiler(machine: str) -> str:
    """One for this kind of machine; for another kind, by the name that Debian gives it. Raises BuildError."""
    names = COMPILERS if machine == machine_name(platform.machine()) else (f"{machine}-linux-gnu-g++",)
    compiler = next((found for found in map(shutil.which, names) if found), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(names)})")
    return compiler


def find_library(isa: InstructionSet) -> Path | None:
    """The library, where it need not be compiled first."""
    if (found := next(IN_WHEEL.glob(f"penstock-{isa.name}-*.so{PACKED}"), None)) is not None:
        return found
    try:
        library = cache_folder() / library_name(isa)
        if not library.exists():
            return None
        with contextlib.suppress(OSError):  # a cache that is only read
            os.utime(library)
        return library
    except (BuildError, OSError, RuntimeError):
        return None


def load_library(path: Path) -> ctypes.CDLL:
    """Packed or not. Raises OSError."""
    if path.suffix != PACKED:
        return ctypes.CDLL(str(path))
    fd = os.memfd_create(path.stem, os.MFD_CLOEXEC)  # stays open: a library of the same number would be taken for it
    with os.fdopen(fd, "wb", buffering=0, closefd=False) as file:
        file.write(unpacked(path))
    return ctypes.CDLL(f"/proc/self/fd/{fd}")


def unpacked(path: Path) -> bytes:
    """Raises OSError."""
    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise OSError(f"{path} is damaged ({error})") from None


def build_library(isa: InstructionSet, folder: Path | None = None) -> Path:
    """The library of a wheel, or that of these sources and this compiler, compiled unless the folder has it.

    Args:
        folder: where libraries are kept; by default the user's cache, or a new temporary one where that cannot be
            written.

    Raises:
        BuildError: no compiler, or one that fails.
    """
    if folder is None and (found := find_library(isa)) is not None:
        return found
    name = library_name(isa)
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
                compile_library(isa, Path(scratch)).replace(library)
            _remove_old(folder)
        except OSError as error:
            raise BuildError(f"{folder} cannot be written ({error})") from None
    return library


def _remove_old(folder: Path) -> None:
    """Libraries of sources that nobody has used for long; a process that has one loaded goes on with it."""
    with contextlib.suppress(OSError):  # another process does it
        for path in sorted(folder.glob("penstock-*.so"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            path.unlink()


def compile_library(isa: InstructionSet, scratch: Path, linking: tuple[str, ...] = ()) -> Path:
    """A new library in an empty folder; all sources at once, each by its own process. Raises BuildError.

    Args:
        linking: more flags for the last step.
    """
    compiler = find_compiler(isa.machine)
    flags = (*FLAGS, *isa.flags)
    objects, running = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(scratch / f"{source.stem}.o")
        own = [LESS[source.stem]] if source.stem in LESS else []
        command = [compiler, *flags, *own, "-c", str(source), "-o", str(objects[-1])]
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
        command = [compiler, "-shared", "-pthread", *linking, *map(str, objects), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode == 0:
            return library
        failed = done.stderr
    lines = failed.strip().splitlines()
    raise BuildError(f"{compiler} failed: {next((line for line in lines if 'error' in line), 'without a word')}")


def library_name(isa: InstructionSet) -> str:
    """Says everything that a library is made from. Raises BuildError without a compiler."""
    compiler = Path(find_compiler(isa.machine)).resolve()
    stat = compiler.stat()
    digest = blake2b(digest_size=16)
    for part in (*FLAGS, str(LESS), *isa.flags, str(compiler), f"{stat.st_size} {stat.st_mtime_ns}"):
        digest.update(part.encode() + b"\0")
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"penstock-{isa.name}-{digest.hexdigest()}.so"
