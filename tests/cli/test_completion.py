"""Scripts by which shells complete the command line."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from penstock.cli import serve
from penstock.cli.completion import SHELLS
from penstock.cli.main import main

pytest.importorskip("shtab")


@pytest.fixture(params=SHELLS)
def script(request, capsys):
    assert main(["completion", request.param]) == 0
    return request.param, capsys.readouterr().out


def test_commands_flags_and_values_are_in_it_and_the_shell_understands_it(script):
    shell, text = script
    assert all(option.name in text for option in serve.OPTIONS)
    assert all(word in text for word in ("completion", "bfloat16", "replay", "num-prompts"))
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("penstock ser", {"serve"}),
        ("penstock serve --ssl-c", {"--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"}),
        ("penstock serve --log-format ", {"text", "json"}),
        ("penstock bench ser", {"serve"}),
        ("penstock up --che", {"--check"}),
    ],
)
def test_bash_completes(capsys, line, found):
    assert main(["completion", "bash"]) == 0
    words = line.split(" ")
    ask = f"""
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
        COMP_LINE='{line}'; COMP_POINT={len(line)}
        _shtab_penstock; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", capsys.readouterr().out + ask], capture_output=True, text=True, check=False, timeout=30
    )
    assert set(done.stdout.split()) == found, done.stderr
