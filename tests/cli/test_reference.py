"""Pages that are made of the code say what the code says."""

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "deployment_reference.py"


def test_the_page_on_deployment_files_is_true():
    tool = runpy.run_path(str(TOOL))
    assert tool["page"]() == tool["PAGE"].read_text(), "run python tools/deployment_reference.py --write"
