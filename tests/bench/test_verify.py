"""Answers of modelled engines compared with those computed offline."""

import json
import re

import pytest

from penstock.bench.metrics import Answer, ClientRecord
from penstock.bench.verify import compare
from penstock.core.errors import ConfigError
from penstock.core.request import FinishReason
from tests.bench.test_bench_cli import serve

DRAWN = range(10, 4000)


@pytest.fixture
def modelled(server):
    server.drawn = DRAWN
    return server


def verify(server, tmp_path, *words):
    """(exit code, the document's part on verification)"""
    out = tmp_path / "out.json"
    code = serve(server, "--verify", "--json", out, *words)
    return code, json.loads(out.read_text())["verification"]


def spoil(which, how):
    """Change the answers of some generations; the trial and one warm-up come before the run."""
    return lambda number, tokens, finish: how(tokens, finish) if number - 2 in which else (tokens, finish)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--temperature", 0.7),
        ("--temperature", 0.7, "--extra-body", '{"seed": 5, "top_k": 3}'),
        ("--endpoint", "chat"),
        ("--extra-body", json.dumps({"stop_token_ids": list(range(0, 4000, 2))})),
    ],
)
def test_right_answers(modelled, tmp_path, capsys, flags):
    modelled.tokens_per_event = 3
    code, result = verify(modelled, tmp_path, *flags)
    assert (code, result) == (0, {"checked": 4, "begun": 0, "unchecked": 0, "differ": 0, "differences": []})
    text = capsys.readouterr().out
    assert re.search(r"checked against those computed offline +│ +4 ", text)
    assert re.search(r"answers that differ +│ +0 ", text)


def test_each_request_has_its_own_seed(modelled, tmp_path):
    verify(modelled, tmp_path, "--temperature", 1.0, "--seed", 7)
    assert sorted(body["seed"] for body in modelled.bodies[2:]) == [7, 8, 9, 10]  # they may overtake each other


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        (lambda tokens, finish: ([*tokens[:-1], 11], finish), "token 3 is 11, "),
        (lambda tokens, finish: (tokens[:-1], finish), "token 3 is None, "),
        (lambda tokens, finish: ([*tokens, 12], finish), "token 4 is 12, "),
        (lambda tokens, finish: (tokens, "abort"), "it ended with 'abort', 'length' is right"),
    ],
)
def test_wrong_answers_are_counted_and_fail(modelled, tmp_path, capsys, how, shown):
    modelled.spoil = spoil({1, 3}, how)
    code, result = verify(modelled, tmp_path, "--max-concurrency", 1)
    assert code == 1
    assert (result["checked"], result["differ"]) == (4, 2)
    assert [found["number"] for found in result["differences"]] == [1, 3]
    assert all(found["what"].startswith(shown) for found in result["differences"])
    assert f"request 3: {shown}" in capsys.readouterr().out


def test_a_wrong_text_without_token_ids(modelled, tmp_path):
    modelled.gives_ids = False
    modelled.spoil = spoil({0}, lambda tokens, finish: ([tokens[0], 11, *tokens[2:]], finish))
    code, result = verify(modelled, tmp_path, "--max-concurrency", 1)
    assert (code, result["differ"]) == (1, 1)
    assert result["differences"][0]["what"].startswith("character ")


def test_failed_requests_have_to_begin_right(modelled, tmp_path):
    def break_off(tokens, finish):
        modelled.error_after = 2
        return ([11, *tokens[1:]] if len(modelled.bodies) == 4 else tokens), finish

    modelled.spoil = spoil({1, 2, 3}, break_off)
    code, result = verify(modelled, tmp_path, "--max-concurrency", 1)
    assert (code, result["checked"], result["begun"], result["differ"]) == (1, 1, 3, 1)
    assert result["differences"][0]["number"] == 1


def test_what_a_beginning_is():
    record = ClientRecord(number=0, start=0.0, sent=0.0, error="error event", answer=Answer(["ab"], [1, 2]))
    assert compare(record, [1, 2, 3], "abc", FinishReason.LENGTH) is None
    record.answer = Answer(["ab", "\ufffd"], [1, 2])
    assert compare(record, [1, 2, 3], "abé", FinishReason.LENGTH) is None
    record.answer = Answer(["ab"], [1, 4])
    assert compare(record, [1, 2, 3], "abc", FinishReason.LENGTH) == "token 1 is 4, 2 is right (2 came, 3 are right)"
    record.answer = Answer(["abcd"], None)
    assert "character 3 is 'd', None is right" in str(compare(record, [1, 2, 3], "abc", FinishReason.LENGTH))


def test_requests_that_brought_nothing_are_unchecked(modelled, tmp_path):
    modelled.fail_every = 3  # of trial, warm-up and four requests, the first and the last of these
    code, result = verify(modelled, tmp_path, "--max-concurrency", 1)
    assert (code, result["checked"], result["unchecked"], result["differ"]) == (0, 2, 2, 0)


def test_what_cannot_be_verified_is_said(server):
    with pytest.raises(ConfigError, match=r"--verify: fake at http.* does not say that its engines are modelled"):
        serve(server, "--verify")
    server.drawn = DRAWN
    with pytest.raises(ConfigError, match="--extra-body: stop 'x' with --verify, allowed are"):
        serve(server, "--verify", "--extra-body", '{"stop": "x"}')
    assert server.bodies == []  # nothing was sent


def test_without_verify_nothing_is_kept(modelled, tmp_path):
    out = tmp_path / "out.json"
    assert serve(modelled, "--json", out, "--extra-body", '{"seed": 1}') == 0
    assert json.loads(out.read_text())["verification"] is None
