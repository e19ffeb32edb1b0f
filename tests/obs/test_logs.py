from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock.obs.logs import Format, RequestRecord, log_ended, log_request, setup_logging

RECORD = RequestRecord(
    request_id="abc", model="m", instance="e0", prompt_tokens=12, cached_tokens=3, completion_tokens=40,
    finish_reason="stop", ttft=0.0123, tpot=0.004, e2e=1.5, seed=7,
)  # fmt: skip


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []  # so that setup_logging closes none of pytest's
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(capsys: pytest.CaptureFixture[str], format: Format, record: RequestRecord = RECORD) -> str:
    setup_logging("info", format)
    log_request(record, format)
    log_ended()
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_text_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = written(capsys, "text").split()
    assert words[1:5] == ["INFO", "penstock.request:", "200", "stop"]
    pairs = dict(word.split("=") for word in words[5:])
    assert pairs["ttft"] == "12.30ms"
    assert pairs["e2e"] == "1.50s"
    assert pairs["queue"] == "-"
    assert (pairs["id"], pairs["prompt"], pairs["seed"]) == ("abc", "12", "7")


@pytest.mark.parametrize("id", ["a id=b model=c", 'a" b', "a\u2028b", "=", '"a"', "status=200 prompt=1"])
def test_what_a_client_chose_is_one_value(capsys: pytest.CaptureFixture[str], id: str) -> None:
    line = written(capsys, "text", RequestRecord(request_id=id, model="m"))
    before, shown = line.split(" id=", 1)
    assert json.loads(shown) == id
    assert before.endswith(" model=m")


def test_text_columns_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    other = RequestRecord(request_id="x", model="m", prompt_tokens=99999, e2e=123.4, status=500)
    assert written(capsys, "text").index("e2e=") == written(capsys, "text", other).index("e2e=")


def test_json_line_has_the_fields_at_the_top(capsys: pytest.CaptureFixture[str]) -> None:
    line = json.loads(written(capsys, "json"))
    assert line["logger"] == "penstock.request"
    assert line["completion_tokens"] == 40
    assert line["queue"] is None
    assert "message" not in line


def test_requests_lines_are_written_a_moment_later_and_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json")
    for _ in range(3):
        log_request(RECORD, "json")
    lines: list[str] = []
    deadline = time.monotonic() + 20
    while len(lines) < 3:
        assert time.monotonic() < deadline
        lines += capsys.readouterr().err.splitlines()
        time.sleep(0.01)
    log_request(RECORD, "json")
    logging.getLogger("penstock.x").info("at once, and what waits goes before it")
    loggers = [json.loads(line)["logger"] for line in capsys.readouterr().err.splitlines()]
    assert loggers == ["penstock.request", "penstock.x"]


def test_no_line_is_lost_at_the_end_of_a_process() -> None:
    program = (
        "from penstock.obs.logs import *\n"
        "setup_logging('info', 'text')\n"
        "for _ in range(7): log_request(RequestRecord(request_id='a', model='m'), 'text')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.count("id=a") == len(ended.stderr.splitlines()) == 7


def test_other_lines_in_json_keep_message_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning", "json")
    logging.getLogger("penstock.x").info("not shown")
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("penstock.x").exception("two\nlines %d", 1)
    (text,) = capsys.readouterr().err.splitlines()
    line = json.loads(text)
    assert line["message"] == "two\nlines 1"
    assert "KeyError: 'gone'" in line["exception"]


def test_below_the_level_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning", "text")
    log_request(RECORD, "text")
    assert capsys.readouterr().err == ""
