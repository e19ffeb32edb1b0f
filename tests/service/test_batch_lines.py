"""What a batch's input may be, and what is said of one that is wrong."""

import json

import pytest

from penstock.service.batch_lines import Line, LineError, LineReader, answered, check_lines, read_lines

ENDPOINT = "/v1/completions"
GOOD = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "m", "prompt": "x"}}


def written(tmp_path, *lines):
    path = tmp_path / "input"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def check(path, longest=1000, served=("m", "n")):
    return check_lines(path, ENDPOINT, longest, [served])


def test_good_lines_are_numbered_as_they_lie(tmp_path):
    lines = [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b"  \r", GOOD | {"custom_id": "b"}]
    path = written(tmp_path, *lines)
    assert check(path).errors == []
    assert (check(path).total, check(path).model) == (2, "m")
    assert [line.number for line in read_lines(path, ENDPOINT, 1000)] == [1, 4]
    reader = LineReader(path, ENDPOINT, 1000, done={1})
    assert [line.custom_id for line in reader.next(5, 10**6)] == ["b"]
    assert reader.ended


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"custom_id": None}, "invalid_type", "custom_id"),
        ({"custom_id": ""}, "invalid_value", "custom_id"),
        ({"custom_id": 5}, "invalid_type", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({"custom_id": "b"}, "duplicate_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"body": []}, "invalid_type", "body"),
        ({"body": {"model": "n"}}, "mismatched_model", "body.model"),
        ({"body": {}}, "mismatched_model", "body.model"),
        ({"body": {"model": "other"}}, "model_not_found", "body.model"),
        ({"body": {"model": 7}}, "invalid_type", "body.model"),
        ({"body": {"model": "m", "stream": True}}, "invalid_value", "body.stream"),
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'"\xff"', "invalid_json_line", None),
        (json.dumps(GOOD | {"body": {"prompt": "y" * 2000}}).encode(), "line_too_long", None),
    ],
)
def test_a_wrong_line_is_told_by_its_number(tmp_path, change, code, param):
    wrong = GOOD | change if isinstance(change, dict) else change
    path = written(tmp_path, GOOD | {"custom_id": "b"}, wrong, GOOD | {"custom_id": "c"})
    (error,) = check(path).errors
    assert (error.code, error.param, error.line) == (code, param, 2)
    assert error.message.startswith("line 2: ")


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "body"])
def test_nothing_may_be_missing(tmp_path, field):
    (error,) = check(written(tmp_path, {name: value for name, value in GOOD.items() if name != field})).errors
    assert (error.code, error.param, error.line) == ("missing_required_parameter", field, 1)


def test_a_file_without_requests_is_refused(tmp_path):
    assert [error.code for error in check(written(tmp_path, b"", b" ")).errors] == ["empty_file"]


def test_errors_are_told_up_to_a_number(tmp_path):
    assert len(check(written(tmp_path, *[b"{"] * 500)).errors) == 100


def test_a_line_of_the_longest_length_is_good(tmp_path):
    size = len(json.dumps(GOOD))
    path = written(tmp_path, GOOD, GOOD)
    assert [type(line) for line in read_lines(path, ENDPOINT, size)] == [Line, Line]
    assert [type(line) for line in read_lines(path, ENDPOINT, size - 1)] == [LineError, LineError]


def test_reading_ahead_has_bounds(tmp_path):
    path = written(tmp_path, *[GOOD | {"custom_id": str(i)} for i in range(10)])
    reader = LineReader(path, ENDPOINT, 1000, set())
    assert len(reader.next(3, 10**6)) == 3
    assert len(reader.next(5, 1)) == 1
    assert len(reader.next(100, 10**6)) == 6
    assert reader.ended


def test_a_body_goes_on_as_it_came_but_for_its_tier(tmp_path):
    text = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"seed":123456789012345678901234567890,'
    path = written(tmp_path, text + b'"temperature":0.10,"service_tier":"default"}}')
    (line,) = read_lines(path, ENDPOINT, 1000)
    assert line.request() == (b'{"seed":123456789012345678901234567890,"temperature":0.10,"service_tier":"flex"}')
    record = json.loads(answered("batch_f00", line, 200, b'{"x":1}'))
    assert record == {
        "id": "batch_req_f00-1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "batch_req_f00-1", "body": {"x": 1}},
        "error": None,
    }
