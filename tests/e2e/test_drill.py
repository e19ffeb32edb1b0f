"""`penstock drill` on engines each of which always has streams."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from penstock.cli.main import main
from penstock.drill.hosts import LINK, why_not
from tests.helpers.deployments import PACED, colocated
from tests.helpers.waiting import eventually

DRILL = {
    "duration": 16,
    "deployment": colocated(2, policy="round_robin", engine=PACED | {"slowdown": 6})
    | {"restart": {"backoff": 1e-6, "limit": 1000, "heartbeat-timeout": 1}},
    "load": {"request-rate": 8, "random-input-len": 64, "random-output-len": 60},
    "safety": {"settle": 1},
    "faults": [
        {"kind": "kill", "every": 16, "targets": "engine-0"},
        {"kind": "freeze", "every": 16, "targets": "engine-1", "for": 4},
    ],
}


@pytest.mark.slow
def test_streams_outlive_what_is_killed_and_what_is_frozen(tmp_path, capsys):
    file, result, shown = (tmp_path / name for name in ("drill.yaml", "drill.json", "drill.html"))
    file.write_text(yaml.safe_dump(DRILL))
    code = main(["drill", str(file), "--json", str(result), "--html", str(shown), "--keep", str(tmp_path / "kept")])
    found = json.loads(result.read_text())
    assert (code, found["broken"]) == (0, []), found["exceptions"]
    assert found["streams"] == found["completed"] == found["identical"] > 60
    assert (found["leaks"], found["lost"], found["exceptions"]) == (0, 0, {})
    assert {fault["kind"] for fault in found["faults"]} == {"kill", "freeze"}
    assert all(fault["met"] and fault["back_s"] > fault["began_s"] for fault in found["faults"])
    assert found["recovery"]["kill"]["max"] > 0
    assert found["recovery"]["freeze"]["max"] > 500, "the fault was real: nothing came from a stopped process"
    assert "every promise was kept" in shown.read_text()
    assert "every promise was kept" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        f"{run}.{kind}" for run in ("undisturbed", "disturbed") for kind in ("yaml", "log")
    }


ON_HOSTS = {key: value for key, value in DRILL["deployment"].items() if key != "instances"}
HOSTS = DRILL | {
    "duration": 30,
    "deployment": ON_HOSTS | {"flight-recorder": "recorder"},
    "hosts": [{"instances": [{"name": name, "count": 2}]} for name in ("first", "second")],
    "safety": {"settle": 1, "at-once": 2, "healthy": 0},
    "faults": [
        {"kind": "partition", "every": 30, "targets": "host-1", "for": 8},
        {"kind": "disk-full", "every": 30, "targets": "disk@host-2", "for": 12},
        {"kind": "kill", "every": 30, "targets": "second-0"},
        {"kind": "disk-full", "every": 30, "targets": "disk", "for": 8},
        {"kind": "kill", "every": 30, "targets": "master"},
        {"kind": "unmount", "every": 30, "targets": "second-1", "for": 3},
    ],
}


@pytest.mark.slow
def test_streams_outlive_cut_cables_and_disks_that_are_full_or_gone(tmp_path):
    if why := why_not(cables=True):
        pytest.skip(why)
    file, result, shown = (tmp_path / name for name in ("drill.yaml", "drill.json", "drill.html"))
    file.write_text(yaml.safe_dump(HOSTS))
    code = main(["drill", str(file), "--json", str(result), "--html", str(shown)])
    found = json.loads(result.read_text())
    assert (code, found["broken"]) == (0, []), found["exceptions"]
    assert found["streams"] == found["completed"] == found["identical"] > 100
    assert (found["leaks"], found["lost"], found["exceptions"]) == (0, 0, {})
    done = {fault["kind"] for fault in found["faults"] if fault["began_s"] is not None}
    assert done == {"partition", "disk-full", "kill", "unmount"}
    assert found["recovery"]["partition"]["max"] > 500, "the fault was real: nothing came from that host"
    assert ">host-1</text>" in shown.read_text()


@pytest.mark.slow
def test_whatever_ends_a_drill_nothing_of_it_is_left(tmp_path):
    content = HOSTS if not why_not(cables=True) else DRILL
    file = tmp_path / "drill.yaml"
    freezes = {"kind": "freeze", "every": 6, "targets": "master", "for": 5}
    file.write_text(yaml.safe_dump(content | {"faults": [freezes]}))
    before = links()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "penstock.cli.main", "drill", str(file)]
            drill = subprocess.Popen(words, env=os.environ | {"TMPDIR": folder}, stderr=subprocess.DEVNULL)
            eventually(lambda folder=folder: "T" in of(folder).values(), 120)
            drill.send_signal(number)
            assert drill.wait(60) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
            eventually(lambda folder=folder: not of(folder), 60)
            assert links() <= before
            assert number == signal.SIGKILL or os.listdir(folder) == []


def links():
    return {name for name in os.listdir("/sys/class/net") if name.startswith(LINK)}


def of(folder):
    """Process id -> state, of everything that runs for the drill with that folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}".encode() in (path / "environ").read_bytes():
                found[path.name] = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has gone
    return found
