"""vLLM's own tests of its OpenAI server, as they come from PyPI, run against ours with the demo model,
those of images with the one that sees.

    python tools/vllm_tests.py [--group GROUP] [--json FILE] [-- PYTEST ARGUMENTS]

Those count that speak to a server over HTTP; what tests vLLM's classes is left out, and so is what needs an adapter, an
image or a model's knowledge, whether it passes or not (`INAPPLICABLE` says which, and why). Needs penstock[dev] and
pytest-asyncio, openai, anthropic, jsonschema, regex. Nothing of theirs is kept but in the folder.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

INDEX = "https://pypi.org/simple/vllm/"  # which mirrors of PyPI have, too
HERE = Path(__file__).parent
FILES = {  # group -> files below tests/entrypoints/, each in the first group that has it
    "vision": (
        *("multimodal/openai/chat_completion/test_vision.py", "multimodal/openai/responses/test_image.py"),
        "serve/tokenize/test_token*_vlm.py",
    ),
    "tools": ("openai/chat_completion/*function_calling*", "openai/test_tool*"),
    "chat": ("openai/chat_completion/test_*",),
    "completion": ("openai/completion/test_*", "openai/models/test_*", "openai/test_*"),
    "responses": ("openai/responses/test_*",),
    "basic": ("serve/instrumentator/test_basic.py",),
    "metrics": ("serve/instrumentator/test_metrics.py",),
    "tokenization": ("serve/tokenize/test_*",),
    "embeddings": ("pooling/embed/test_online*",),
    "messages": ("anthropic/test_*",),
}
SEES = "the demo model sees nothing"  # but that of the group vision does
INAPPLICABLE = {  # why -> parts of tests' ids
    "adapters are not served": ("lora", "test_check_models"),
    SEES: ("multimodal", "_vlm", "online_vision", "image_extra"),
    "prompts are text or tokens": ("prompt_embeds",),
    "compares with a model from the Hub, its tokens or its size": (
        *("test_single_completion[Qwen", "test_single_chat_session[", "test_online.py::test_basic", "test_matryoshka"),
        *(
            "test_completion_request",
            "test_base64_embedding",
            "test_truncate_prompt_tokens",
            "test_online.py::test_chat",
        ),
        *("test_pooling_embed", "logprob_token_ids", "expands_image_placeholders"),
        *(f"test_vision.py::test_single_chat_session_image{more}[" for more in ("", "_base64encoded")),
    ),
    "needs what a model knows: to answer, to think, to call a function, to come to an end": (
        *(
            "test_response_format_json",
            "test_complex_message_content",
            "translategemma_extra",
            "budget_limits_reasoning",
        ),
        *(
            "include_reasoning_true",
            "reasoning_tokens",
            "test_default_includes_reasoning",
            "_with_tool_use",
            "with_emoji",
        ),
        *("test_comparison_with_prompt_logprobs", "test_named_tool_use", "test_simple_input", "test_instructions"),
        *("test_basic.py::test_chat[", "test_basic.py::test_chat\0", "test_function_tool_use[auto", "_with_streaming_"),
        *("test_reasoning_item", "test_store", "test_previous_response_id", "test_two_responses_with_same_prev_id"),
        *("test_structured_output", "test_anthropic_tool_call\0", "test_enable_response_messages"),
        "test_namespace_tool_separator",
        "test_single_chat_session_image_base64encoded_beamsearch[",
    ),
    "needs vLLM's or others' packages beside the server": (
        *("test_parsable_context", "tensorizer", "openapi_stateless", "embed_dtype_and_endianness"),
    ),
    "asks for pydantic's names of errors": ("test_long_seed", "test_params_not_supported"),
    "/pooling is not served": ("test_pooling_not_supported",),
}


class Outcome(msgspec.Struct):
    """Of one test, as `vllm_tests_plugin.py` tells it."""

    id: str
    outcome: str
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="0.33.0")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "penstock" / "vllm-tests")
    parser.add_argument("--group", action="append", choices=FILES, help="these alone")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    parser.add_argument("rest", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    root = fetch(options.version, options.folder)
    wanted = options.group or FILES
    told = {name: run(root, name, files, options.rest) for name, files in groups(root).items() if name in wanted}
    show(told)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1))
    return 0


def fetch(version: str, folder: Path) -> Path:
    """The folder with `tests/` of that version in it."""
    root = folder / f"vllm-{version}"
    if not (root / "tests" / "entrypoints").is_dir():
        index = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(index) as answer:
            files = json.load(answer)["files"]
        url = next(file["url"] for file in files if file["filename"] == f"vllm-{version}.tar.gz")
        with urllib.request.urlopen(url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as archive:
            wanted = [
                each for each in archive.getmembers() if re.match(r"[^/]+/tests/(entrypoints|__init__)", each.name)
            ]
            archive.extractall(folder, wanted, filter="data")
    (root / "tests" / "__init__.py").touch()
    return root


def groups(root: Path) -> dict[str, list[Path]]:
    base = root / "tests" / "entrypoints"
    found: dict[str, list[Path]] = {}
    taken: set[Path] = set()
    for name, patterns in FILES.items():
        found[name] = sorted({path for pattern in patterns for path in base.glob(pattern)} - taken)
        taken |= set(found[name])
    return found


def run(root: Path, group: str, files: list[Path], more: list[str]) -> list[Outcome]:
    told = root / "outcomes.jsonl"
    told.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "vllm_tests_plugin", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--rootdir", str(root), "-o", "asyncio_mode=auto", "-q", "--no-header", "--tb=short"]
    command += ["--continue-on-collection-errors"]
    path = ":".join(str(each) for each in (HERE, HERE.parent, root))
    environment = os.environ | {"PYTHONPATH": path, "VLLM_TESTS_OUTCOMES": str(told)}
    environment["VLLM_TESTS_MODEL"] = "demo-vl" if group == "vision" else "demo"
    subprocess.run([*command, *map(str, files), *more], env=environment, cwd=root, check=False)
    decode = msgspec.json.Decoder(Outcome).decode
    return [decode(line) for line in told.read_bytes().splitlines()] if told.exists() else []


def reason(outcome: Outcome, group: str) -> str | None:
    """Why it does not count."""
    reasons = (each for each in INAPPLICABLE.items() if (each[0], group) != (SEES, "vision"))
    return next((why for why, parts in reasons if any(part in f"{outcome.id}\0" for part in parts)), None)


def show(told: dict[str, list[Outcome]]) -> None:
    console = Console(width=120)
    table = Table("group", "passed", "failed", "share", "left out", box=None)
    failures = []
    for group, outcomes in told.items():
        counted = [each for each in outcomes if reason(each, group) is None]
        passed = sum(each.outcome == "passed" for each in counted)
        failed = [each for each in counted if each.outcome == "failed"]
        failures += failed
        share = f"{passed / (passed + len(failed)):.0%}" if passed + len(failed) else "-"
        left_out = len(outcomes) - passed - len(failed)
        table.add_row(group, str(passed), str(len(failed)), share, str(left_out))
    console.print(table)
    left = Counter(filter(None, (reason(each, name) for name, outcomes in told.items() for each in outcomes)))
    for why, count in left.most_common():
        console.print(f"{count} left out: {why}", highlight=False)
    for each in failures:
        console.print(f"{each.id}: {each.why}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
