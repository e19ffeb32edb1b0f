"""`penstock up` with real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from penstock.cli.run_folder import run_folder
from tests.helpers.deployments import DEMO, PACED, colocated, deployed
from tests.helpers.servers import Served, refuses_while_it_drains
from tests.helpers.waiting import eventually

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
RECIPES = [path for path in RECIPES if not path.stem.startswith("drill-")]  # those are of tests/drill
SILENCE = 3  # seconds after which a process hangs
ASK = {"model": "demo", "prompt": "import os", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def up():
    """Two engines that take turns. Who kills a part of it waits for it to serve again."""
    quick = {"backoff": 0.1, "heartbeat-timeout": SILENCE}
    with deployed(colocated(2, engine=PACED, policy="round_robin", seed=1, restart=quick)) as running:
        yield running


def gone(pid):
    """No such process, or one that only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def complete(up, frontend=0, **more):
    return httpx.post(up.urls[frontend] + "/v1/completions", json={**ASK, **more}, timeout=30)


def test_it_answers_chat_and_completions(up):
    assert sorted(up.pids()) == ["engine-0", "engine-1", "frontend-0", "kv-pool", "master"]
    client = openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = client.chat.completions.create(model="demo", messages=messages, max_tokens=20, temperature=0)
    chunks = client.chat.completions.create(model="demo", messages=messages, max_tokens=20, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content != ""
    texts = {client.completions.create(**ASK).choices[0].text for _ in range(4)}
    assert len(texts) == 1, "whichever engine it was"


def test_a_killed_engine_comes_back_and_serves(up):
    earlier = up.kill("engine-0")
    up.wait_for("engine-0 ended with SIGKILL and starts again")
    assert up.wait_restarted("engine-0", earlier) != earlier
    eventually(lambda: complete(up).status_code == 200)
    before = sum("instance=engine-0" in line for line in up.lines)

    def back():
        complete(up)
        return sum("instance=engine-0" in line for line in up.lines) > before

    eventually(back)


def test_a_killed_frontend_comes_back_on_its_port(up):
    earlier = up.kill("frontend-0")
    up.wait_restarted("frontend-0", earlier)

    def answered():
        try:
            return complete(up).status_code == 200
        except httpx.TransportError:
            return False

    eventually(answered)


def test_answers_of_a_killed_frontend_end_with_an_error():
    """Streams with an event, what had no answer yet with a 503, and a connection without a request as ever."""
    slow = PACED | {"slowdown": 4, "max-num-seqs": 4}
    with deployed(colocated(1, engine=slow, frontends=2)) as up, ExitStack() as stack:
        ask = {**ASK, "max_tokens": 2000, "ignore_eos": True}
        idle = stack.enter_context(httpx.Client(timeout=30))
        assert idle.get(up.url + "/health").status_code == 200
        streams = [
            stack.enter_context(httpx.stream("POST", up.url + path, json={**ask, **body, "stream": True}, timeout=30))
            for path, body in [("/v1/completions", {}), ("/v1/completions", {"n": 2})]
        ]
        lines = [stream.iter_lines() for stream in streams]
        for stream in lines:
            assert next(stream).startswith("data: {")
        with ThreadPoolExecutor() as pool:
            whole = [pool.submit(complete, up, max_tokens=2000, ignore_eos=True) for _ in range(3)]
            eventually(lambda: up.metric("num_requests_running") + up.metric("num_requests_waiting") == 6)
            earlier = up.kill("frontend-0")
            assert complete(up, frontend=1).status_code == 200
            for stream in lines:
                last = json.loads([line for line in stream if line][-1].removeprefix("data: "))
                assert last["error"]["code"] == "frontend_failed"
                assert "can be sent again" in last["error"]["message"]
            for answer in whole:
                assert answer.result().status_code == 503
                assert answer.result().headers["retry-after"] == "1"
                assert answer.result().json()["error"]["code"] == "frontend_failed"
        up.wait_restarted("frontend-0", earlier)
        assert idle.get(up.url + "/health").status_code in (200, 503), "a new connection, which waits for the next one"
        assert any("2 streams, which got an error, and 0 answers" in line for line in up.lines)


def test_a_killed_master_comes_back(up):
    earlier = up.kill("master")
    up.wait_restarted("master", earlier)
    eventually(lambda: complete(up).status_code == 200)


def test_a_killed_kv_pool_server_takes_its_engines_along_and_all_come_back(up):
    pids = up.pids()
    up.kill("kv-pool")
    for name in ("engine-0", "engine-1"):
        up.wait_restarted(name, pids[name])
    eventually(lambda: complete(up).status_code == 200)


@pytest.mark.parametrize("victim", ["kv-pool", "master"])
def test_a_stopped_process_is_noticed_named_and_replaced(up, victim):
    """Its clients are neither blamed nor restarted without need."""
    mark, pids = len(up.lines), up.pids()
    alone = up.metric("routing_decisions_total", policy="fallback")
    stopped = time.monotonic()
    up.kill(victim, signal.SIGSTOP)

    def refused():
        answer = httpx.get(up.url + "/ready", timeout=10)
        return answer if answer.status_code == 503 else None

    if victim == "master":  # its frontends do without
        assert complete(up).status_code == 200
        decided = up.metric("routing_decisions_total", policy="fallback") - alone
        assert decided == 1 or up.pids().get(victim) != pids[victim], "by itself, unless the next master was quicker"
    else:
        answer = eventually(refused, 20, up.log)
        assert time.monotonic() - stopped < SILENCE + 2  # two for a busy machine
        assert victim in answer.text
    up.wait_restarted(victim, pids[victim])
    eventually(lambda: complete(up).status_code == 200, 60, up.log)
    eventually(lambda: httpx.get(up.url + "/ready", timeout=10).status_code == 200)
    said = "".join(up.lines[mark:])
    assert f"{victim} is killed: it hangs: no heartbeat for" in said
    others = {"kv-pool": ["master", "frontend-0"], "master": ["kv-pool", "engine-0", "engine-1", "frontend-0"]}[victim]
    assert {name: up.pids()[name] for name in others} == {name: pids[name] for name in others}
    assert "Traceback" not in said


def test_a_signal_drains_and_leaves_nothing():
    with deployed(colocated(1, engine=PACED, frontends=2)) as up:
        assert len(set(up.urls)) == 2
        assert complete(up, frontend=1).json()["choices"][0]["text"] == complete(up).json()["choices"][0]["text"]
        pids = up.pids()
        body = {**ASK, "max_tokens": 300, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", up.url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            for pid in (*pids.values(), up.process.pid):  # as a service manager does
                os.kill(pid, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert up.process.wait(30) == 0
        assert len(pids) == 5
        assert all(map(gone, pids.values()))
        assert not up.folder.exists()
        assert not any("Traceback" in line for line in up.lines)


@pytest.mark.slow
def test_while_it_drains_its_frontends_answer_503():
    with deployed(colocated(2, engine=PACED)) as up:
        refuses_while_it_drains(up)
        assert up.process.wait(30) == 0
        assert not any("Traceback" in line for line in up.lines)
        assert any("frontend-0]: 2 of 2 instances are ready" in line for line in up.lines)
        assert any("master]: engine-1 is ready" in line for line in up.lines)


# --- an engine dies amid streams

STREAMED = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "n": 2},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.7, "seed": 3, "stop": ["\n\n\n"]},
    {"temperature": 0.7, "seed": 4, "stream": False},
]


class Streams:
    """Answers that come while the test does something else.

    Attributes:
        texts: by request and output, so far.
        errors: what clients were told that is no answer.
    """

    def __init__(self, up, about):
        client = openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0, timeout=90)
        self.texts = [{} for _ in STREAMED]
        self.logprobs = [[] for _ in STREAMED]
        self.errors = []
        self.threads = [threading.Thread(target=self._ask, args=(client, i, about)) for i in range(len(STREAMED))]
        for thread in self.threads:
            thread.start()

    def _ask(self, client, i, about):
        body = {"model": "demo", "prompt": f"import {about}\n" * (5 + 20 * i), "max_tokens": 250, "stream": True}
        body |= {"extra_body": {"ignore_eos": True}} | STREAMED[i]
        try:
            answer = client.completions.create(**body)
            for chunk in answer if body["stream"] else [answer]:
                for choice in chunk.choices:
                    self.texts[i][choice.index] = self.texts[i].get(choice.index, "") + choice.text
                    if choice.logprobs is not None:
                        self.logprobs[i] += choice.logprobs.tokens
        except openai.APIError as error:
            self.errors.append(f"request {i}: {error}")

    def begun(self):
        """Which streams have."""
        return [bool(texts) for body, texts in zip(STREAMED, self.texts, strict=True) if body.get("stream", True)]

    def wait(self):
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        return self


@pytest.mark.parametrize(
    ("shape", "victim"),
    [
        pytest.param("pair", "engine-0", marks=pytest.mark.slow),
        pytest.param("apart", "prefill-0", marks=pytest.mark.slow),
        ("apart", "decode-0"),
    ],
)
def test_streams_go_on_where_an_engine_dies(request, shape, victim):
    up = request.getfixturevalue(shape)
    mark, before = len(up.lines), up.metric("recoveries_total")
    streams = Streams(up, victim)
    enough = any if victim == "prefill-0" else all  # so that there are prompts still to be prefilled
    eventually(lambda: enough(streams.begun()))
    up.kill(victim)
    streams.wait()
    assert not streams.errors
    recovered = up.metric("recoveries_total")
    eventually(lambda: '"ready"' in up.get("/health") and '"lost"' not in up.get("/health"), 60)
    undisturbed = Streams(up, victim).wait()
    assert not undisturbed.errors
    assert streams.texts == undisturbed.texts
    assert streams.logprobs == undisturbed.logprobs
    assert len(streams.texts[1]) == 2
    assert recovered > before or victim == "prefill-0", "nothing was interrupted"
    assert up.metric("recoveries_total") == recovered
    assert up.metric("request_success_total", finished_reason="error") == 0
    assert not any("Traceback" in line for line in up.lines[mark:])


def test_an_engine_that_is_alone_takes_up_what_it_had_when_it_is_back():
    with deployed(colocated(1, engine=PACED, restart={"backoff": 0.01})) as up:
        body = {**ASK, "max_tokens": 300, "stream": True, "ignore_eos": True, "n": 3}
        with httpx.stream("POST", up.url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            up.kill("engine-0")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert not any("error" in line for line in rest)
        up.wait_for("engine-0 was lost .*: 1 request is to go on elsewhere")
        eventually(lambda: up.metric("instance_lost_total", engine="engine-0") == 1)
        assert up.metric("recoveries_total") == 3
        assert not any("Traceback" in line for line in up.lines)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_an_engine_whose_rank_is_killed_is_started_again_and_goes_on(tmp_path):
    """With what it has on disk, and so does the next deployment."""
    engine = DEMO | {"tensor-parallel-size": 2, "disk-cache": str(tmp_path), "disk-cache-size": "100M"}
    content = colocated(1, engine=engine, restart={"backoff": 0.01})
    body = {**ASK, "prompt": [(7 * i) % 900 for i in range(1000)], "max_tokens": 100, "ignore_eos": True}
    with deployed(content) as up:
        earlier = up.pids()["engine-0"]
        (rank,) = children_of(earlier)
        undisturbed = complete(up, **body).json()["choices"][0]["text"]
        eventually(lambda: up.metric("kv_bytes_moved_total", to="disk") > 0)
        with httpx.stream("POST", up.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.kill(rank, signal.SIGKILL)
            events = [line.removeprefix("data: ") for line in (first, *lines) if line]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == undisturbed
        said = "".join(up.lines)
        assert f"the engine ends: rank 1 (process {rank}) was killed by SIGKILL" in said
        (successor,) = children_of(up.wait_restarted("engine-0", earlier))
        up.process.kill()
        eventually(lambda: gone(successor))
        assert "Traceback" not in said
    with deployed(content) as up:
        answer = complete(up, **body).json()
        assert answer["choices"][0]["text"] == undisturbed
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached <= 15 * 64
        eventually(lambda: up.metric("kv_hit_tokens_total", tier="disk") == cached)


def test_requests_of_an_engine_that_does_not_come_back_end_with_an_error_each():
    with deployed(colocated(1, engine=PACED, restart={"backoff": 30})) as up:
        body = {**ASK, "max_tokens": 3000, "stream": True, "ignore_eos": True, "n": 3}
        with httpx.stream("POST", up.url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            up.kill("engine-0")
            rest = [line for line in lines if line]
        assert "engine-0 failed during this request" in rest[-1]
        assert "no instance could continue it, the request can be sent again" in rest[-1]
        assert not any("Traceback" in line for line in up.lines)


def test_nobody_outlives_a_killed_launcher():
    with deployed(colocated(1, engine=PACED)) as up:
        pids = up.pids()
        up.process.kill()
        eventually(lambda: all(map(gone, pids.values())))
        with run_folder():  # the next run removes what this one could not; one beside this test may have done so
            assert not up.folder.exists()


def test_nor_does_an_engine_that_is_still_starting_nor_what_it_has_begun(tmp_path, monkeypatch):
    """A compiler that takes its time."""
    compiler, runs = tmp_path / "c++", tmp_path / "runs"
    compiler.write_text(f"#!/bin/sh\necho $$ >> {runs}\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    served = Served("serve", "demo")
    try:
        served.wait_for("compiling kernels", 90)
        eventually(lambda: runs.exists() and children_of(served.process.pid))
        begun = [*children_of(served.process.pid), *map(int, runs.read_text().split())]
    finally:
        served.process.kill()
    eventually(lambda: all(map(gone, begun)))


@pytest.mark.slow
def test_a_warm_process_takes_the_place_of_a_killed_engine_and_no_other_outlives_the_launcher():
    with deployed(colocated(2, engine=DEMO, policy="round_robin", **{"warm-pool": 1})) as up:
        texts = {complete(up).json()["choices"][0]["text"] for _ in range(2)}
        warm = int(up.wait_for(r"process (\d+) is warm").group(1))
        up.kill("engine-1")
        up.wait_for(f"engine-1 is process {warm}, of the warm pool")
        eventually(lambda: up.pids().get("engine-1") == warm and up.settings("engine-1")["role"] == "any")
        other = int(up.wait_for(r"process (\d+) is warm").group(1))
        eventually(lambda: up.metric("instance_starts_total", path="warm") == 1, 60, up.log)
        eventually(lambda: up._ready(0) == {"engine-0", "engine-1"}, 60, up.log)
        assert {complete(up).json()["choices"][0]["text"] for _ in range(2)} == texts
        up.process.kill()
        eventually(lambda: gone(warm) and gone(other))


def penstock_up(*arguments):
    command = [sys.executable, "-m", "penstock.cli.main", "up", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_pass_their_check(recipe):
    done = penstock_up(recipe, "--check")
    assert done.returncode == 0, done.stderr
    assert re.search("penstock up: .*demo", done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize("flags", [["--check"], []])
def test_a_bad_file_is_told_by_line_and_key(tmp_path, flags):
    file = tmp_path / "bad.yaml"
    file.write_text(
        "model: demo\nport: http\ninstances:\n  - count: 2\n    max-num-seq: 3\n    kv-cache-memory: 900T\n"
    )
    done = penstock_up(file, *flags)
    assert done.returncode == 2
    port, unknown, memory = done.stderr.splitlines()
    assert port == f"{file}:2: port: 'http', allowed is a whole number from 0 to 65535"
    assert unknown == f"{file}:5: instances[0].max-num-seq: no such setting, did you mean max-num-seqs?"
    assert memory.startswith(f"{file}:6: instances[0].kv-cache-memory: 921600.0 GiB for each of 2, ")


def test_a_file_that_is_not_there_is_one_line():
    done = penstock_up("/no/such.yaml")
    assert done.returncode == 2
    assert done.stderr == "penstock: /no/such.yaml: cannot be read (No such file or directory)\n"


def test_settings_that_do_not_fit_the_model_fail_the_check_and_the_start(tmp_path):
    file = tmp_path / "ranks.yaml"
    file.write_text("model: demo\ninstances: [{tensor-parallel-size: 3}]\n")
    done = penstock_up(file, "--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "penstock: --tensor-parallel-size: 3, allowed is what divides the model's num_attention_heads, 8\n"
    )
    file = tmp_path / "disk.yaml"
    gpus = "{name: gpus, device: cuda, tensor-parallel-size: 2}"
    file.write_text(f"model: demo\nengine: {{disk-cache: /tmp/kv}}\ninstances: [{{}}, {gpus}]\n")
    done = penstock_up(file, "--check")
    assert done.returncode == 2
    why = "not supported yet on cuda with 2 ranks, allowed with 1, or on a CPU"
    assert done.stderr == f"penstock: --disk-cache: '/tmp/kv', {why}\n"
    file = tmp_path / "up.yaml"
    file.write_text("model: demo\nport: 0\nengine: {max-model-len: 99999999}\ninstances: [{}]\n")
    assert "max-model-len: 99999999, this checkpoint allows" in penstock_up(file, "--check").stderr
    done = penstock_up(file)
    assert done.returncode == 2
    assert "[engine-0]: max-model-len: 99999999, this checkpoint allows" in done.stderr
    assert "engine-0 ended with exit code 2: it cannot be served" in done.stderr
    assert "Traceback" not in done.stderr


def test_api_keys_are_asked_for_shown_to_nobody_and_may_share_prefixes():
    keys = ["sk-not-for-other-users-of-this-host", "sk-nor-this-one"]
    with deployed(colocated(1, engine=PACED, **{"api-key": keys, "share-prefixes": True})) as up:
        assert complete(up).status_code == 401
        found = []
        for key in keys:
            headers, body = {"Authorization": f"Bearer {key}"}, {**ASK, "prompt": "import os\n" * 50}
            answer = httpx.post(up.url + "/v1/completions", json=body, headers=headers, timeout=30)
            assert answer.status_code == 200
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found[0] == 0 < found[1]
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in up.pids().values()]
        assert len(lines) == 4
        assert not any(key in line for line in lines for key in keys)


@pytest.mark.slow
def test_a_stuck_engine_does_not_keep_it_from_stopping():
    with deployed(colocated(2, engine=PACED)) as up:
        stuck = up.kill("engine-0", signal.SIGSTOP)
        assert up.stop(timeout=40) == 0
        assert gone(stuck)


@pytest.mark.slow
def test_a_stuck_engine_is_killed_and_its_requests_go_on_elsewhere():
    with deployed(colocated(2, engine=PACED)) as up:
        body = {**ASK, "max_tokens": 2500, "stream": True, "ignore_eos": True, "n": 4}
        with httpx.stream("POST", up.url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            eventually(lambda: up.metric("num_requests_running") == 4)
            victim = next(n for n in ("engine-0", "engine-1") if up.metric("num_requests_running", engine=n))
            stuck = up.kill(victim, signal.SIGSTOP)
            up.wait_for(f"{victim} is killed: it hangs: no heartbeat for . s, a signal has stopped it", 30)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert up.metric("recoveries_total") >= 1
        up.wait_restarted(victim, stuck)
        eventually(lambda: all(i["state"] == "ready" for i in json.loads(up.get("/health"))["instances"]))
        assert up.stop() == 0


def test_streams_of_a_frozen_engine_go_on_before_it_is_given_up(up):
    """It is stopped and goes on later: each text comes once, and is that of an undisturbed run."""
    body = {**ASK, "max_tokens": 500, "ignore_eos": True, "n": 2}
    whole = httpx.post(up.url + "/v1/completions", json=body, timeout=60).json()["choices"]
    before = up.metric("hedged_requests_total", how="overtaken")
    with httpx.stream("POST", up.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        texts = {choice["index"]: choice["text"] for choice in next(events)["choices"]}
        frozen = up.kill("engine-0", signal.SIGSTOP)
        try:
            eventually(lambda: up.metric("hedged_requests_total", how="overtaken") > before)
        finally:
            if not gone(frozen):
                os.kill(frozen, signal.SIGCONT)
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole}
    eventually(lambda: all(i["state"] == "ready" for i in json.loads(up.get("/health"))["instances"]))


def test_what_was_evicted_comes_back_from_the_hosts_memory():
    tiered = PACED | {"kv-blocks": 40, "max-model-len": 2048, "host-cache-memory": "2G"}
    with deployed(colocated(1, engine=tiered)) as up:
        prompts = [[100 * i + k % 97 + 3 for k in range(1000)] for i in range(4)]
        texts = [complete(up, prompt=prompt).json()["choices"][0]["text"] for prompt in prompts]
        assert up.metric("kv_hit_tokens_total", tier="host") == 0
        again = complete(up, prompt=prompts[0]).json()
        assert again["choices"][0]["text"] == texts[0]
        eventually(lambda: up.metric("kv_hit_tokens_total", tier="host") > 0)
        block = 64 * 147456  # bytes of qwen3-8b's KV
        loaded = up.metric("kv_bytes_moved_total", **{"from": "host", "to": "device"})
        assert loaded == up.metric("kv_hit_tokens_total", tier="host") / 64 * block
        assert up.metric("kv_bytes_moved_total", **{"from": "device", "to": "host"}) == 4 * 15 * block
