import gzip
import json
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.workload.traces import MOONCAKE_BLOCK, read_trace

TOKENS = st.integers(1, 200_000)
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def read_text(text, name="trace", compress=False):
    """The trace as read from a file of that content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
        return read_trace(path)


def shape(requests):
    return [(r.number, r.prompt_tokens, r.output_tokens) for r in requests]


def expected(rows):
    return [(number, prompt, output) for number, (_, prompt, output) in enumerate(rows)]


@given(st.lists(st.tuples(st.integers(0, 10**12), TOKENS, TOKENS), min_size=1, max_size=20), st.booleans())
def test_azure_keeps_its_100_ns_digits(rows, compress):
    rows.sort()
    start = datetime(2023, 11, 16, 18, 15, 46)
    lines = [
        f"{start + timedelta(seconds=t // 10**7)}.{t % 10**7:07d},{prompt},{output}\n" for t, prompt, output in rows
    ]
    requests = read_text(AZURE_HEADER + "".join(lines), compress=compress)
    assert shape(requests) == expected(rows)
    assert [r.at for r in requests] == [(t - rows[0][0]) / 10**7 for t, _, _ in rows]


@given(st.data())
def test_mooncake_blocks_and_milliseconds(data):
    rows = sorted(data.draw(st.lists(st.tuples(st.integers(0, 10**7), TOKENS, TOKENS), min_size=1, max_size=10)))
    blocks = [list(range(i, i - (-prompt // MOONCAKE_BLOCK))) for i, (_, prompt, _) in enumerate(rows)]
    lines = [
        json.dumps({"timestamp": t, "input_length": p, "output_length": o, "hash_ids": ids})
        for (t, p, o), ids in zip(rows, blocks, strict=True)
    ]
    requests = read_text("\n".join(lines), compress=data.draw(st.booleans()))
    assert shape(requests) == expected(rows)
    assert [list(r.prefix) for r in requests] == blocks
    assert all(r.prefix_tokens == r.prompt_tokens for r in requests)
    assert [r.at for r in requests] == pytest.approx([(t - rows[0][0]) / 1000 for t, _, _ in rows])


@given(st.lists(st.tuples(st.integers(0, 10**7), TOKENS, TOKENS), min_size=1, max_size=20), st.booleans())
def test_servegen_text_and_images(rows, images):
    rows.sort()
    if images:
        header = "arrival_s,client,text_tokens,image_count,image_tokens,output_tokens\n"
        lines = [f"{t / 1e4:.4f},3,{p - p // 3},{min(1, p // 3)},{p // 3},{o}\n" for t, p, o in rows]
    else:
        header = "arrival_s,client,input_tokens,output_tokens,reason_tokens\n"
        lines = [f"{t / 1e4:.4f},3,{p},{o},0\n" for t, p, o in rows]
    requests = read_text(header + "".join(lines))
    assert shape(requests) == expected(rows)
    assert [r.at for r in requests] == pytest.approx([(t - rows[0][0]) / 1e4 for t, _, _ in rows], abs=1e-9)


def test_rows_out_of_order_are_put_in_order_under_their_own_number():
    text = AZURE_HEADER + "2023-11-16 18:00:02,5,6\n2023-11-16 18:00:00.5,3,4\n"
    requests = read_text(text)
    assert [(r.number, r.at, r.prompt_tokens) for r in requests] == [(1, 0.0, 3), (0, 1.5, 5)]


def test_time_zones_are_read():
    text = AZURE_HEADER + "2024-05-10 00:00:00.5+00:00,5,6\n2024-05-10 02:00:01.25+02:00,3,4\n"
    assert [r.at for r in read_text(text)] == [0.0, 0.75]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (
            AZURE_HEADER + "2023-11-16 18:00:00,5,6\nyesterday,5,6\n",
            r"line 3, column TIMESTAMP: 'yesterday', allowed is",
        ),
        (AZURE_HEADER + "2023-13-16 18:00:00,5,6\n", r"line 2, column TIMESTAMP"),
        (
            AZURE_HEADER + "2023-11-16 18:00:00,5.5,6\n",
            r"line 2, column ContextTokens: '5.5', allowed is a whole number",
        ),
        (AZURE_HEADER + "2023-11-16 18:00:00,0,6\n", r"line 2, column ContextTokens: '0', allowed is .* at least 1"),
        (AZURE_HEADER + "2023-11-16 18:00:00,5,-6\n", r"line 2, column GeneratedTokens: '-6'"),
        (AZURE_HEADER + "2023-11-16 18:00:00,5\n", r"line 2: 2 cells, the header has 3"),
        (AZURE_HEADER, "no rows"),
        ("", "empty"),
        ("time,prompt\n1,2\n", "columns time,prompt are no known trace"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", r"line 2, column arrival_s: 'nan'"),
        ("arrival_s,text_tokens,image_tokens,output_tokens\n0,0,0,1\n", r"line 2, column text_tokens"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "line 1, column hash_ids"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1, "hash_ids": [1]}', "column input_length: True"),
        (
            '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1}',
            "line 2: no hash_ids",
        ),
        ('{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [1]}\n[1]', "line 2: a JSON list"),
        ('{"timestamp": 0,', "line 1: not JSON"),
    ],
)
def test_bad_rows_say_where(text, where):
    with pytest.raises(ConfigError, match=where) as raised:
        read_text(text, name="bad_trace")
    assert "bad_trace" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_files_and_folders_say_where_the_originals_are(tmp_path):
    with pytest.raises(
        ConfigError, match=r"nowhere.csv: no such file; .*Azure/AzurePublicDataset.*kvcache-ai/Mooncake"
    ):
        read_trace(tmp_path / "nowhere.csv")
    (tmp_path / "one.csv").write_text(AZURE_HEADER)
    with pytest.raises(ConfigError, match=r"a folder, .*one\.csv.*alibaba/ServeGen"):
        read_trace(tmp_path)


def test_broken_compression_is_an_error(tmp_path):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE_HEADER.encode() * 100)[:-12])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read_trace(path)
