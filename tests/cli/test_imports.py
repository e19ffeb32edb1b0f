"""What a start does not wait for is not imported before."""

import subprocess
import sys


def imported(code: str, *names: str) -> set[str]:
    """Which of these modules are there after a fresh process has run the code."""
    code += f"\nimport sys; print(*(name for name in {names!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_an_engine_is_started_before_the_server_imports_what_it_needs_itself():
    code = """
from penstock.cli.main import make_parser
make_parser("serve")
import penstock.obs.logs, penstock.service.deployment, penstock.service.launcher, penstock.service.programs"""
    late = ("zmq", "yaml", "numpy", "http.client", "starlette", "penstock.cli.bench", "penstock.service.policies")
    assert imported(code, *late, "penstock.cli.serve") == {"penstock.cli.serve"}


def test_loading_a_model_does_not_import_sympy():
    code = """
import torch
from penstock.nn.loader import load_model
from penstock.service.checkpoint import find_checkpoint
load_model(find_checkpoint("demo"), torch.device("cpu"))"""
    assert imported(code, "sympy", "torch") == {"torch"}


def test_an_engine_of_a_modelled_device_imports_no_torch():
    code = "import penstock.engine.modelled, penstock.transfer.stores"
    assert imported(code, "torch", "penstock.engine.remote_tier") == {"penstock.engine.remote_tier"}


def test_text_imports_no_tokenizer_before_it_is_used():
    code = "import penstock.text.chat, penstock.text.detokenizer, penstock.text.stop, penstock.text.tokenizer"
    assert imported(code, "tokenizers", "jinja2", "transformers", "torch", "numpy") == set()
