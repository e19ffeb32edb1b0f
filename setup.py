"""What pyproject.toml has no words for: a wheel holds the kernels compiled for every instruction set of its machine.

python -m build                                                           # for this kind of machine
python -m build --wheel -C--build-option=--plat-name=linux_aarch64        # for another, by a cross compiler
"""

import logging
import lzma
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# not the package itself, which imports torch
native = ModuleType("penstock.nn.native")
native.__path__ = [str(ROOT / "penstock" / "nn" / "native")]
sys.path.insert(0, str(ROOT))
sys.modules[native.__name__] = native

from penstock.nn.native.build import PACKED, BuildError, compile_library, library_name, unpacked  # noqa: E402
from penstock.nn.native.isa import SETS, InstructionSet  # noqa: E402

# nothing of the machine that builds is needed but its C library, of which symbols say how new it must be; of what is
# linked statically, only what is used is kept
LINKING = ("-static-libstdc++", "-static-libgcc", "-s", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
GLIBC = re.compile(rb"GLIBC_2\.(\d+)")
log = logging.getLogger(__name__)


class BuildKernels(build_py):
    """Also compiles kernels; not for an editable install, where they are compiled when first needed."""

    libraries: list[Path]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.libraries = []

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        wheel = self.get_finalized_command("bdist_wheel")
        sets = [isa for isa in SETS if wheel.plat_name.endswith(isa.machine)]
        folder = Path(self.build_lib) / "penstock/nn/native/lib"
        try:
            libraries = {isa: folder / f"{library_name(isa)}{PACKED}" for isa in sets}
        except BuildError as error:
            log.warning("the wheel holds no kernels, which are compiled where it is installed: %s", error)
            return
        folder.mkdir(parents=True, exist_ok=True)
        for old in set(folder.iterdir()) - set(libraries.values()):  # of another build in the same place
            old.unlink()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._compile, libraries, libraries.values()))
        self.libraries = list(libraries.values())

    def _compile(self, isa: InstructionSet, library: Path) -> None:
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=self.build_lib) as scratch:
                made = compile_library(isa, Path(scratch), LINKING).read_bytes()
                packed = Path(scratch) / "packed"
                packed.write_bytes(lzma.compress(made, preset=9 | lzma.PRESET_EXTREME))  # smaller than pip would
                packed.replace(library)


class Wheel(bdist_wheel):
    """Named by what its libraries need."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = self.get_finalized_command("build_py").libraries
        if not libraries:
            return "py3", "none", "any"
        newest = max(int(minor) for library in libraries for minor in GLIBC.findall(unpacked(library)))
        machine = next(isa.machine for isa in SETS if self.plat_name.endswith(isa.machine))
        return "py3", "none", f"manylinux_2_{newest}_{machine}"


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel})
