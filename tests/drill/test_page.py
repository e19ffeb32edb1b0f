"""A drill's page has a place for every kind of fault, and for every process, cable and disk."""

import re

import pytest

from penstock.drill.faults import KINDS, Strike
from penstock.drill.outcome import Struck, judge
from penstock.drill.page import drill_page
from penstock.drill.report import document
from penstock.drill.run import Result
from tests.drill.test_file import drill
from tests.drill.test_outcome import record

TARGETS = {"partition": "host-1/host-2", "disk-full": "disk@host-1"}


def shown(tmp_path, kinds):
    struck = []
    for kind in kinds:
        strike = Strike(2.5, kind, TARGETS.get(kind, "engine-0"), 2.0, 0.3)
        struck.append(Struck(strike, 2.5, 4.5, 5.0))
    records, meets = [record(0), record(1)], dict.fromkeys([*TARGETS.values(), "engine-0"], frozenset())
    records[1].events, records[1].end = [], 2.0
    records[0].finish_reason = records[1].finish_reason = "length"
    found = document(
        drill(tmp_path),
        Result(
            began=0.0, rate=1.0, capacity=None, right=records, records=records, struck=struck,
            outcome=judge(records, records, struck, {}, meets), leaks=["engine-0: <3> used"], wrong=[], raised=[],
            states={"engine-0": [(0.0, "serves"), (2.5, "gone")]}, memory={"engine-0": [(0.0, 1, 5 << 20)]},
        ),
    )  # fmt: skip
    return found, drill_page(found)


def test_streams_that_run_and_wait_are_counted(tmp_path):
    found, _ = shown(tmp_path, ["kill"])
    at = {time: (running, waiting) for time, running, waiting in found["running"]}
    assert at[0.5] == (2, 2)  # both wait for their first token
    assert at[2.0] == (1, 1)  # one has ended without any, the other one waits again
    assert at[6.0] == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_has_its_place(kind, tmp_path):
    _, page = shown(tmp_path, [kind])
    target = TARGETS.get(kind, "engine-0")
    colour = re.search(r'<rect class="c(\d)"[^>]*><title>' + kind, page)[1]
    assert f".c{colour} {{" in page
    assert page.count(f"{kind} {target}") >= 2  # in the charts and in the table
    assert f">{target}</text>" in page
    assert "engine-0: &lt;3&gt; used" in page
