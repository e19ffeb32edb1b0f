"""The check for CUDA machines needs only what it says, which is less than the server."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"msgspec", "xxhash", "zmq", "starlette", "uvicorn", "uvloop", "rich", "yaml"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_its_tests_are_found_without_the_servers_packages(tmp_path):
    named = re.findall(r"tests/[\w/.]+", (ROOT / "tools" / "gpu_check.sh").read_text())
    assert named
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = run([sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", *named])
    assert found.returncode == 0, found.stdout[-2000:]
    assert run([sys.executable, "-c", "import msgspec"]).returncode, "nothing was blocked"
