"""Pages that are made of the code say what the code says."""

import runpy
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def test_the_page_on_deployment_files_is_true():
    tool = runpy.run_path(str(TOOLS / "deployment_reference.py"))
    assert tool["page"]() == tool["PAGE"].read_text(), "run python tools/deployment_reference.py --write"


def test_the_page_on_request_fields_is_true():
    tool = runpy.run_path(str(TOOLS / "api_table.py"))
    assert tool["page"]() == tool["PAGE"].read_text(), "run python tools/api_table.py --write"


def test_a_request_field_that_nobody_described_is_named():
    tool = runpy.run_path(str(TOOLS / "api_table.py"))
    tool["SECTIONS"]["The prompt"] = tool["SECTIONS"]["The prompt"][1:]
    with pytest.raises(AssertionError, match="messages"):
        tool["tables"]()
