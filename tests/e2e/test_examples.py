"""The programs of examples/, run as they are. Their deployment file is checked with the recipes, in test_up."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_stream(alone):
    assert re.search(
        r"\S.*\n\n\d+ prompt tokens, \d+ completion tokens\n$", run("chat_stream.py", alone.url + "/v1"), re.S
    )


def test_tools(alone):
    shown = run("tools.py", alone.url + "/v1")
    assert re.match(r'time_in\(\{\s*"city":\s*"(UTC|Oslo|Tokyo)"\s*\}\) -> \d\d:\d\d\n', shown)


def test_slo_classes(apart):
    shown = run("slo_classes.py", apart.url + "/v1")
    assert re.search(r"^offline: 12 requests, mean TTFT \d+ ms", shown, re.M)
    assert re.search(r"^interactive: 4 requests, mean TTFT \d+ ms", shown, re.M)


def test_deployment_client(apart):
    shown = run("deployment_client.py", apart.url + "/v1")
    prompt, cached = map(int, re.fullmatch(r"4 conversations: (\d+) prompt tokens, (\d+) .*\n", shown).groups())
    assert 0 < cached < prompt


def test_embeddings(apart):
    *rows, last = run("embeddings.py", apart.url + "/v1").splitlines()
    scores = [float(row.split()[0]) for row in rows]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)
    assert re.fullmatch(r"\d+ tokens, 256 numbers each", last)


def test_offline_batch(capsys):
    runpy.run_path(str(EXAMPLES / "offline_batch.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown == run("offline_batch.py"), "seeded"
    assert len(shown.splitlines()) == 7
