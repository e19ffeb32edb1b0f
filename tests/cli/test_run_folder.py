"""The folder of a run: there as long as the run lives, and not much longer."""

import subprocess
import sys

import pytest

from penstock.cli import run_folder as module
from penstock.cli.run_folder import LOCK, run_folder

HOLD = """
import sys, tempfile
from penstock.cli import run_folder
tempfile.tempdir, run_folder.LONGEST = sys.argv[1], 1000
with run_folder.run_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "LONGEST", 1000)
    return tmp_path


def test_it_is_removed_at_the_end_whatever_is_in_it(parent):
    with run_folder() as folder:
        assert folder.parent == parent
        (folder / "sub").mkdir()
    assert list(parent.iterdir()) == []


def test_only_what_killed_runs_have_left_is_removed(parent):
    command = [sys.executable, "-c", HOLD, str(parent)]
    killed, lives = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    folders = [process.stdout.readline().strip() for process in (killed, lives)]
    killed.kill()
    killed.wait()
    somebodys, link = parent / "penstock-without-lock", parent / "penstock-link"
    somebodys.mkdir()
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    link.symlink_to(elsewhere)
    with run_folder() as ours:
        there = {str(path) for path in parent.iterdir()}
        assert there == {str(path) for path in (folders[1], somebodys, link, elsewhere, ours)}
    lives.communicate()
    assert lives.returncode == 0
    assert (elsewhere / LOCK).exists()


def test_a_long_folder_for_temporary_files_is_not_used(monkeypatch, parent):
    monkeypatch.setattr(module, "LONGEST", len(str(parent)) - 1)
    with run_folder() as folder:
        assert str(folder).startswith("/tmp/penstock-")
