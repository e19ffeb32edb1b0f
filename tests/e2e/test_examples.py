"""The programs of examples/, run as they are. Their deployment file is checked with the recipes, in test_up."""

import re
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


def test_chat_stream(server):
    assert re.search(
        r"\S.*\n\n\d+ prompt tokens, \d+ completion tokens\n$", run("chat_stream.py", server.url + "/v1"), re.S
    )


def test_slo_classes(server):
    shown = run("slo_classes.py", server.url + "/v1")
    assert re.search(r"^offline: 12 requests, mean TTFT \d+ ms", shown, re.M)
    assert re.search(r"^interactive: 4 requests, mean TTFT \d+ ms", shown, re.M)


def test_deployment_client(server):
    shown = run("deployment_client.py", server.url + "/v1")
    prompt, cached = map(int, re.fullmatch(r"4 conversations: (\d+) prompt tokens, (\d+) .*\n", shown).groups())
    assert 0 < cached < prompt


def test_embeddings(server):
    *rows, last = run("embeddings.py", server.url + "/v1").splitlines()
    scores = [float(row.split()[0]) for row in rows]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)
    assert re.fullmatch(r"\d+ tokens, 256 numbers each", last)


def test_offline_batch():
    shown = run("offline_batch.py")
    assert shown == run("offline_batch.py"), "seeded"
    assert len(shown.splitlines()) == 7
