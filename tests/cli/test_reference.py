"""Generated pages match the code."""

import runpy
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def test_docs_of_deployment_files_match_the_code():
    tool = runpy.run_path(str(TOOLS / "deployment_reference.py"))
    assert tool["page"]() == tool["PAGE"].read_text(), "run python tools/deployment_reference.py --write"


def test_docs_of_request_fields_match_the_code():
    tool = runpy.run_path(str(TOOLS / "api_table.py"))
    assert tool["page"]() == tool["PAGE"].read_text(), "run python tools/api_table.py --write"


def test_an_undocumented_request_field_is_named():
    tool = runpy.run_path(str(TOOLS / "api_table.py"))
    tool["SECTIONS"]["Prompt"] = tool["SECTIONS"]["Prompt"][1:]
    with pytest.raises(AssertionError, match="messages"):
        tool["tables"]()
