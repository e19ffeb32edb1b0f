"""Batches through real processes: each line has one answer, whichever of them is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import httpx
import pytest

from tests.helpers.batches import client_of, line, over, results, submitted
from tests.helpers.deployments import PACED, colocated, deployed
from tests.helpers.servers import QUICK, serving
from tests.helpers.waiting import eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving("demo", *QUICK, "--dtype", "float32", "--batch-dir", str(tmp_path_factory.mktemp("batches"))) as up:
        yield up


def test_openais_client_sees_a_batch_through(server):
    client = client_of(server.url)
    chats = [
        line(i, "/v1/chat/completions", messages=[{"role": "user", "content": f"{i}"}], prompt=None, seed=i)
        for i in range(20)
    ]
    chats.append(line(20, "/v1/chat/completions", messages=[], prompt=None, temperature=-1))
    batch = submitted(client, chats, "/v1/chat/completions")
    ended = over(client, batch.id)
    assert (ended.status, ended.request_counts.total, ended.request_counts.failed) == ("completed", 21, 1)
    answers = results(client, ended.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"id-{i}" for i in range(20)]
    online = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "7"}],
        max_tokens=4,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    said = answers[7]["response"]["body"]["choices"][0]
    assert said["message"]["content"] == online.choices[0].message.content
    (failed,) = results(client, ended.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-20", 400)
    assert ended.id in [one.id for one in client.batches.list(limit=1)]
    assert {file.purpose for file in client.files.list()} == {"batch", "batch_output"}
    assert client.files.delete(ended.input_file_id).deleted


def test_embeddings_and_inputs_that_are_wrong(server):
    client = client_of(server.url)
    embeddings = [
        json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": f"text {i}"}})
        for i in range(30)
    ]
    ended = over(client, submitted(client, "\n".join(embeddings), "/v1/embeddings").id)
    assert ended.request_counts.completed == 30
    found = results(client, ended.output_file_id)[3]["response"]["body"]["data"][0]["embedding"]
    assert found == client.embeddings.create(model="demo", input="text 3", encoding_format="float").data[0].embedding
    wrong = over(client, submitted(client, [line(1), line(2, stream=True), line(1)]).id)
    assert wrong.status == "failed"
    assert [(error.line, error.param) for error in wrong.errors.data] == [(2, "body.stream"), (3, "custom_id")]


def test_a_batch_that_is_cancelled_keeps_what_it_has(server):
    client = client_of(server.url)
    batch = submitted(client, [line(i, max_tokens=3 if i < 5 else 3000) for i in range(60)])
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
    client.batches.cancel(batch.id)
    ended = over(client, batch.id)
    assert ended.status == "cancelled"
    answers, errors = results(client, ended.output_file_id), results(client, ended.error_file_id)
    assert {f"id-{i}" for i in range(5)} <= {answer["custom_id"] for answer in answers}
    assert sorted(one["custom_id"] for one in [*answers, *errors]) == sorted(f"id-{i}" for i in range(60))
    eventually(lambda: not json.loads(server.get("/overview"))["frontend"]["sequences"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "count"),
    [
        (["frontend"], 100),
        (["frontend", "master", "engine-0", "frontend"], 800),
    ],
)
def test_each_line_is_answered_once_whoever_is_killed(tmp_path, victims, count):
    """The frontend that runs the batch, and others in turn. Online requests are answered meanwhile."""
    engine = PACED | {"max-num-seqs": 8}
    with deployed(colocated(2, engine=engine, frontends=2, **{"batch-dir": str(tmp_path)})) as up:

        def column(name):
            with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
                return db.execute(f"SELECT {name} FROM batches").fetchone()[0]

        lines = [line(i, max_tokens=100, seed=i) for i in range(count)]
        batch = submitted(client_of(up.url), lines)
        done = 0
        for victim in victims:
            eventually(lambda done=done: column("completed") > done, 60, up.log)
            assert column("status") == "in_progress"
            name = column("holder").rpartition("-")[0] if victim == "frontend" else victim
            earlier = up.kill(name)
            up.wait_restarted(name, earlier)
            done = column("completed")
        eventually(lambda: httpx.get(up.urls[1] + "/ready", timeout=10).status_code == 200, 60, up.log)
        other = httpx.post(up.urls[1] + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
        assert other.status_code == 200
        client = client_of(up.urls[1])
        ended = over(client, batch.id, 120)
        assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", count, 0)
        answers = results(client, ended.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"id-{i}" for i in range(count)]
        assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {100}


def penstock_batch(*arguments):
    words = [sys.executable, "-m", "penstock.cli.main", "batch", *map(str, arguments)]
    return subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
    )


def answered(path):
    return [(one["custom_id"], one["response"]["status_code"]) for one in map(json.loads, path.open())]


def test_the_command_against_a_server(server, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join([line(0), line(1, temperature=-1), line(2)]))
    command = penstock_batch(source, "-o", output, "--url", server.url)
    _, said = command.communicate(timeout=60)
    assert (command.returncode, said) == (1, "completed: 2 of 3 lines answered, 1 failed\n")
    assert answered(output) == [("id-0", 200), ("id-1", 400), ("id-2", 200)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    source.write_text(line(0) + "{")
    command = penstock_batch(source, "-o", output, "--url", server.url)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 2
    assert "line 2: this is no JSON object" in said


@pytest.mark.slow
def test_the_command_goes_on_where_it_was(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    count = 150
    source.write_text("".join(line(i, max_tokens=60) for i in range(count)))
    command = penstock_batch(source, "-o", output)
    database = tmp_path / "out.jsonl.batch" / "server" / "batches.sqlite"

    def completed():
        if not database.exists():
            return 0
        try:
            with closing(sqlite3.connect(database)) as db:
                return db.execute("SELECT completed FROM batches").fetchone()[0]
        except (sqlite3.Error, TypeError):
            return 0

    kept = eventually(completed, 90)
    os.killpg(command.pid, signal.SIGKILL)
    command.communicate()
    assert kept < count
    assert not output.exists()
    command = penstock_batch(source, "-o", output)
    _, said = command.communicate(timeout=200)
    assert command.returncode == 0, said
    assert answered(output) == [(f"id-{i}", 200) for i in range(count)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
