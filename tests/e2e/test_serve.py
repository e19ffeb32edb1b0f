"""The demo model behind a real server, through the official client."""

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from penstock import LLM, SamplingParams
from penstock.cli.main import main
from tests.helpers.servers import QUICK, refuses_while_it_drains, serving
from tests.helpers.waiting import eventually

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


def test_a_streamed_chat_equals_the_whole_answer(client):
    options = {"model": "demo", "messages": QUESTION, "max_tokens": 40, "seed": 3, "temperature": 0.8}
    whole = client.chat.completions.create(**options)
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 20
    assert stream[0].choices[0].delta.role == "assistant"
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert stream[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_operators_see_it_live(server, client, capsys, monkeypatch):
    monkeypatch.delenv("PENSTOCK_FLIGHT_RECORDER", raising=False)
    answer = client.completions.create(model="demo", prompt="import os", max_tokens=2)
    assert main(["top", "--url", server.url, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert {row["state"] for row in seen["master"]["instances"]} == {"ready"}
    assert seen["frontend"]["generated_tokens"] >= 2
    assert main(["explain", answer.id, "--url", server.url, "--json"]) == 0
    (sequence,) = json.loads(capsys.readouterr().out)["sequences"]
    names = {row["name"] for row in seen["master"]["instances"]}
    assert sequence["placements"][-1]["prefill"] in names
    assert sequence["demand"]["max_tokens"] == 2


def test_the_server_and_the_offline_engine_give_the_same_tokens(client):
    prompts = ["import os", "Return the", "class Thread:\n    "]
    llm = LLM("demo", dtype="float32", max_model_len=4096, max_num_batched_tokens=512, kv_cache_memory=64 << 20)
    for params in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 11, "top_p": 0.9}):
        offline = llm.generate(prompts, SamplingParams(max_tokens=30, **params))
        online = client.completions.create(model="demo", prompt=prompts, max_tokens=30, **params)
        assert [c.text for c in online.choices] == [o.text for o in offline]


def test_sampling_fields_reach_the_engine(client):
    ask = {"model": "demo", "prompt": "import os", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**ask)
    text = plain.choices[0].text
    stop = text[5:8]
    stopped = client.completions.create(**ask, stop=[stop])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    two = client.completions.create(**{**ask, "temperature": 1.2}, n=2, seed=1)
    assert two.choices[0].text != two.choices[1].text
    detailed = client.completions.create(**ask, logprobs=2)
    assert detailed.choices[0].text == text
    assert len(detailed.choices[0].logprobs.tokens) == detailed.usage.completion_tokens
    top = client.completions.create(**ask, extra_body={"ignore_eos": True, "top_k": 1})
    assert top.usage.completion_tokens == 24
    words = client.post("/../tokenize", body={"model": "demo", "prompt": "zebra"}, cast_to=object)["tokens"]
    biased = client.completions.create(**ask, logit_bias={str(words[0]): 100}, presence_penalty=0)
    assert biased.choices[0].text != text


def test_prefix_cache_is_reported(client):
    ask = {"model": "demo", "prompt": "cached " * 150, "max_tokens": 2, "temperature": 0}
    client.completions.create(**ask)
    again = client.completions.create(**ask)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached == (again.usage.prompt_tokens - 1) // 4 * 4 >= 64


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x" * 40000}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 5000}, 400, "max_tokens"),
        ({"prompt": [5000000]}, 400, "prompt"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "model": "gpt-17"}, 404, "model"),
        ({"prompt": "x", "use_beam_search": True, "stream": True}, 400, "use_beam_search"),
        ({"prompt": "x", "use_beam_search": True, "n": 60, "max_tokens": 4000}, 400, "max_tokens"),
    ],
)
def test_errors_have_the_status_and_name_the_field(server, body, status, param):
    answer = httpx.post(server.url + "/v1/completions", json={"model": "demo", **body}, timeout=30)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert "Traceback" not in answer.text


def test_leaving_cancels_the_work(server):
    ask = {"model": "demo", "prompt": "for", "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json={**ask, "stream": True}, timeout=30) as answer:
        lines = answer.iter_lines()  # kept: when it is collected, the connection is closed
        next(lines)
        eventually(lambda: server.metric("num_requests_running") == 1)
    eventually(lambda: server.metric("num_requests_running") == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=ask, timeout=httpx.Timeout(30, read=0.5))
    eventually(lambda: server.metric("num_requests_running") == 0)
    eventually(lambda: server.metric("kv_cache_usage_perc") == 0)


@pytest.mark.parametrize("hints", [{}, {"slo": {"ttft_ms": 2000}}], ids=["no hints", "targets"])
def test_what_is_short_goes_between_the_chunks_of_long_prompts(alone, hints):
    """Two come after three that take 24 steps, and are answered before the last of these."""
    with ExitStack() as stack:
        connections = []
        for i in range(3):
            prompt = [
                200 + 3 * len(hints) + i,
                *(100 + k % 900 for k in range(3999)),
            ]  # so that nothing of it is cached
            long = {"model": "demo", "prompt": prompt, "max_tokens": 2}
            connection = stack.enter_context(closing(http.client.HTTPConnection(alone.url.removeprefix("http://"))))
            connection.request("POST", "/v1/completions", json.dumps(long), {"content-type": "application/json"})
            connections.append(connection.sock)
        eventually(lambda: alone.metric("num_requests_running") + alone.metric("num_requests_waiting") == 3)
        for _ in range(2):
            short = {"model": "demo", "prompt": "import os", "max_tokens": 2, **hints}
            httpx.post(alone.url + "/v1/completions", json=short, timeout=60).raise_for_status()
        assert len(select.select(connections, [], [], 0)[0]) < 3, "the long ones were answered before"
    eventually(lambda: alone.metric("num_requests_running") == 0)


def test_many_at_once(client, server):
    answers = {}

    def ask(i):
        answers[i] = (
            client.completions.create(
                model="demo", prompt=f"Return the {i % 5}", max_tokens=20, temperature=0.9, seed=i % 5
            )
            .choices[0]
            .text
        )

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(25):
        assert answers[i] == answers[i % 5]


def test_the_log_has_one_line_a_request_and_no_prompts(client, server):
    client.completions.create(
        model="demo", prompt="secret-word", max_tokens=2, extra_headers={"X-Request-Id": "my-id-1"}
    )
    eventually(lambda: any("my-id-1" in line for line in server.lines))
    assert sum("my-id-1" in line for line in server.lines) == 1
    assert not any("secret-word" in line for line in server.lines)


def test_while_it_drains_it_answers_503_and_finishes_what_runs():
    """Whoever has sent the signal to all of its processes, as a terminal does."""
    with serving("demo", *QUICK, new_group=True) as server:
        begun, ends = set(), {}

        def ask(number):
            body = {"model": "demo", "prompt": "a", "max_tokens": 800, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
                for line in filter(None, answer.iter_lines()):
                    begun.add(number)
                    ends[number] = line

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(begun) == 12)
        os.kill(server.engine_pid(), signal.SIGTERM)  # which is in a group of its own
        refuses_while_it_drains(server, lambda: os.killpg(server.process.pid, signal.SIGTERM))
        for thread in threads:
            thread.join()
        assert list(ends.values()) == ["data: [DONE]"] * 12
        assert server.process.wait(60) == 0
        assert not any("Traceback" in line for line in server.lines)


def test_what_outlasts_the_drain_is_ended_with_an_error():
    with serving("demo", *QUICK, "--drain-timeout", "1") as server:
        # so that nobody can guess what comes: drafts would be done in a second
        ask = {
            "model": "demo",
            "prompt": "a",
            "max_tokens": 4000,
            "stream": True,
            "ignore_eos": True,
            "temperature": 2.0,
        }
        with httpx.stream("POST", server.url + "/v1/completions", json=ask, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert server.process.wait(60) == 0
        assert not any("Traceback" in line for line in server.lines)


def test_a_second_signal_ends_what_runs_at_once():
    with serving("demo", *QUICK) as server:
        ask = {"model": "demo", "prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=ask, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("draining")
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert server.process.wait(60) == 0


def test_the_engine_stops_computing_for_a_server_that_is_gone():
    with serving("demo", *QUICK) as server:
        engine = server.engine_pid()
        ask = {"model": "demo", "prompt": "a", "max_tokens": 4000, "n": 8, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=ask, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop(signal.SIGKILL)
        eventually(lambda: not alive(engine))


def test_a_server_stopped_while_it_starts_leaves_nothing_behind():
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "demo", *QUICK, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(children.read_text)
    engine = int(children.read_text().split()[0])
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    eventually(lambda: not alive(engine))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_sleeps_has_given_its_memory_back(tmp_path):
    """And keeps what runs, says the same when it is woken up, and needs nothing but a restart when it is killed. After
    all that, it finds on disk what it has computed, and so does the next server."""

    def is_found_on_disk(times):
        eventually(lambda: server.metric("kv_hit_tokens_total", tier="disk") == times * 46 * 64)

    ask = {"model": "demo", "prompt": [(7 * i) % 900 for i in range(3000)], "max_tokens": 4, "temperature": 0.0}
    disk = ("--disk-cache", str(tmp_path), "--disk-cache-size", "100M")
    with serving("demo", "--enable-sleep-mode", *disk, *QUICK) as server, httpx.Client(base_url=server.url) as http:
        first = http.post("/v1/completions", json=ask, timeout=60).json()
        eventually(lambda: server.metric("kv_cache_usage_perc", engine="engine-0") == 0.0)
        before = server.memory(kv=True)
        for level in (1, 2):
            with http.stream("POST", "/v1/completions", json=ask | {"stream": True, "max_tokens": 50}) as running:
                lines = running.iter_lines()
                next(lines)
                assert http.post(f"/sleep?level={level}", timeout=60).status_code == 200
                *_, done = [line for line in lines if line]
                assert done == "data: [DONE]"
            assert before - server.memory(kv=True) > 5 << 20, "more than half of what the prompt's KV takes"
            assert http.post("/v1/completions", json=ask).status_code == 503
            assert http.post("/wake_up", timeout=60).status_code == 200
            again = http.post("/v1/completions", json=ask, timeout=60).json()
            assert again["choices"] == first["choices"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 46 * 64
            is_found_on_disk(times=level)
        assert http.post("/sleep", timeout=60).status_code == 200
        os.kill(engine := server.engine_pid(), signal.SIGKILL)
        eventually(lambda: server.has_engine(engine) and http.get("/ready").status_code == 200, 60)
        assert not http.get("/is_sleeping").json()["is_sleeping"]
        assert http.post("/v1/completions", json=ask, timeout=60).json()["choices"] == first["choices"]
        is_found_on_disk(times=3)
    with serving("demo", *disk, *QUICK) as server, httpx.Client(base_url=server.url) as http:
        again = http.post("/v1/completions", json=ask, timeout=60).json()
        assert again["choices"] == first["choices"]
        is_found_on_disk(times=1)
