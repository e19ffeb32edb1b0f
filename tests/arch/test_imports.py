"""The house rules: who imports whom, which rooms stay free of torch, and which never read a clock."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "penstock"
# room -> rooms that it may import, besides itself
RULES = {
    "core": set(),
    "kv": {"core"},
    "text": {"core"},
    "workload": {"core"},
    "media": {"core"},
    "obs": {"core"},
    "nn": {"core"},
    "transfer": {"core", "kv"},
    "sched": {"core", "kv"},
    "engine": {"core", "kv", "sched", "nn", "transfer", "text", "obs"},
    "service": {"core", "kv", "sched", "text", "media", "obs"},
    "api": {"core", "text", "media", "service", "obs"},
    "sim": {"core", "kv", "sched", "service", "workload", "obs"},
    "bench": {"core", "workload", "obs"},
    "drill": {"core", "workload", "transfer", "service", "sim", "bench"},
}
EVERYTHING = ["cli", "llm"]  # put the rest together, so they may import all of it
TORCH_FREE = [room for room in RULES if room not in ("nn", "engine")]
PURE = ["sched", "kv", "sim"]  # no clock, no hidden randomness, no environment, no I/O
IMPURE = {
    "time",
    "random",
    "os",
    "asyncio",
    "threading",
    "socket",
    "subprocess",
    "datetime",
    "uuid",
    "secrets",
    "pathlib",
}
CORE_PACKAGES = {"msgspec"}
ROOMS = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").exists())


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, in full."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_room_has_a_rule():
    assert set(ROOMS) <= {*RULES, *EVERYTHING}


@pytest.mark.parametrize("room", [room for room in ROOMS if room in RULES])
def test_rooms_import_only_whom_they_may(room):
    for path in files(room):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "penstock" and len(parts) > 1 and (ROOT / parts[1]).exists():
                assert parts[1] in RULES[room] | {room}, f"{path} imports {name}"


@pytest.mark.parametrize("path", files("core"), ids=lambda p: p.name)
def test_core_needs_nothing_but_msgspec(path):
    for name in imports(path):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names | CORE_PACKAGES | {"penstock"}, f"{path} imports {name}"


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_read_no_clock_and_no_world(room):
    for path in files(room):
        assert not {name.split(".")[0] for name in imports(path)} & IMPURE, path


def test_engine_takes_only_grammars_from_text():
    for path in files("engine"):
        assert not {n for n in imports(path) if n.startswith("penstock.text") and "grammar" not in n}, path


def test_only_the_command_line_reads_the_environment():
    for path in ROOT.rglob("*.py"):
        if path.parent.name != "cli":
            assert not {"os.environ", "os.getenv"} & imports(path), path
            assert "os.environ" not in path.read_text(), path
            assert "getenv" not in path.read_text(), path


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_free_rooms_stay_so():
    modules = [
        ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for room in TORCH_FREE
        for path in files(room)
    ]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    assert run(code) == "False"


def test_the_engine_runs_where_only_model_libraries_are_installed():
    """A GPU machine without network has torch, safetensors and tokenizers, but none of the server's packages."""
    absent = {"msgspec", "zmq", "starlette", "uvicorn", "uvloop", "pydantic", "aiohttp", "blake3", "xxhash"}
    code = (
        f"absent = {absent}"
        + """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import penstock.llm, penstock.bench.offline, penstock.cli.main, penstock.transfer.pool
from penstock.core.layout import KVLayout, attention_groups
layout = KVLayout(
    model="m", order="block", dtype="float32", groups=attention_groups((None,) * 1, 1, 8, "float32"), block_bytes=4096
)
pool = penstock.transfer.pool.memfd_pool(layout, 4)
pool.memory.block(3)[:] = bytes(4096)
pool.close()
print("fine")
"""
    )
    assert run(code) == "fine"
