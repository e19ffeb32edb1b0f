"""`penstock drill` on two engines, each of which always has streams."""

import json

import pytest
import yaml

from penstock.cli.main import main
from tests.helpers.deployments import PACED, colocated

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
