"""Several models behind one endpoint, from one file: `penstock up` with real processes of each."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import openai
import pytest
import torch

from penstock.service.checkpoint import DEMO as DEMO_FOLDER
from tests.e2e.test_apply import apply, ready
from tests.e2e.test_fleet import joined
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.deployments import DEMO, PACED, deployed
from tests.helpers.waiting import eventually

ASK = {"prompt": "import os", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "What is a list?"}]
NAMES = ["demo", "tiny", "other"]


def checkpoint(folder):
    """A random model of another geometry than the demo's, with its tokens."""
    folder.mkdir(exist_ok=True)
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    write_checkpoint(folder, "llama", vocab_size=config["vocab_size"], eos_token_id=config["eos_token_id"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """Demo and a random model of another geometry, with the demo's tokens; two frontends for both. Who kills a part
    waits for it to serve again."""
    folder = checkpoint(tmp_path_factory.mktemp("other"))
    engine = DEMO | {"max-model-len": 1024}
    content = {
        "frontends": 2,
        "seed": 1,
        "enable-sleep-mode": True,
        "batch-dir": str(tmp_path_factory.mktemp("batches")),
        "restart": {"backoff": 0.1, "limit": 50},
        "models": [
            {"name": "demo", "model": "demo", "engine": DEMO, "instances": [{}]},
            {
                "name": "tiny",
                "model": str(folder),
                "served-model-name": ["tiny", "other"],
                "policy": "round_robin",
                "engine": engine,
                "instances": [{"count": 2}],
            },
        ],
    }
    with deployed(content) as running:
        yield running


def ask(up, model, frontend=0, path="/v1/completions", **more):
    return httpx.post(up.urls[frontend] + path, json={**ASK, "model": model, **more}, timeout=60)


def post(up, path, **body):
    answer = httpx.post(up.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def states(up, model):
    """Of its instances; none while it is unhealthy."""
    return {row["state"] for row in httpx.get(f"{up.url}/health?model={model}").json().get("instances", [])}


def text(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_both_answer_at_every_frontend_as_they_do_alone(up):
    processes = {"frontend-0", "frontend-1", "demo/engine-0", "tiny/engine-0", "tiny/engine-1"}
    processes |= {f"{name}/{what}" for name in ("demo", "tiny") for what in ("master", "kv-pool")}
    assert up.pids().keys() == processes
    texts = {name: {text(ask(up, name, frontend)) for frontend in (0, 1)} for name in NAMES}
    assert all(len(each) == 1 for each in texts.values())
    assert texts["tiny"] == texts["other"] != texts["demo"]
    assert ask(up, "other").json()["model"] == "other"


@pytest.mark.parametrize("name", NAMES)
def test_every_api_goes_by_the_model(up, name):
    longest = 4096 if name == "demo" else 1024
    client = openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0)
    asked = {"model": name, "temperature": 0}
    chat = client.chat.completions.create(messages=CHAT, max_tokens=8, **asked)
    said = chat.choices[0].message.content
    assert chat.model == name
    assert client.responses.create(input=CHAT[0]["content"], max_output_tokens=8, **asked).output_text == said
    message = post(up, "/v1/messages", messages=CHAT, max_tokens=8, **asked)
    assert (message["model"], message["content"][0]["text"]) == (name, said)
    count = post(up, "/v1/messages/count_tokens", model=name, messages=CHAT)["input_tokens"]
    tokens = post(up, "/tokenize", model=name, messages=CHAT)
    assert (tokens["count"], tokens["max_model_len"]) == (count, longest)
    assert "list" in post(up, "/detokenize", model=name, tokens=tokens["tokens"])["prompt"]
    vector = client.embeddings.create(model=name, input="x").data[0].embedding
    assert len(vector) == (
        64 if name != "demo" else json.loads((DEMO_FOLDER / "config.json").read_text())["hidden_size"]
    )
    assert client.models.retrieve(name).id == name
    assert post(up, "/v1/score", model=name, text_1="a", text_2="a")["model"] == name


def test_a_name_that_nobody_has_and_none_at_all(up):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ):
        refused = httpx.post(up.url + path, json={**body, "model": "nobody"}, timeout=30)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "model: 'nobody' is not served here, allowed is demo, tiny, other"
        refused = httpx.post(up.url + path, json=body, timeout=30)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "model: missing, allowed are demo, tiny, other"
    assert (
        httpx.post(up.url + "/v1/messages", json={"model": "x", "messages": CHAT, "max_tokens": 1}).status_code == 404
    )
    assert httpx.get(up.url + "/v1/models/nobody").status_code == 404


def test_what_operators_see(up):
    cards = httpx.get(up.url + "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == NAMES
    assert len({card["fingerprint"] for card in cards}) == 2
    health = httpx.get(up.url + "/health").json()
    assert [(told["id"], told["ready"]) for told in health["models"]] == [("demo", True), ("tiny", True)]
    assert len(health["instances"]) == 3
    (alone,) = httpx.get(up.url + "/health?model=demo").json()["instances"]
    assert alone["name"] == "demo/engine-0"
    assert httpx.get(up.url + "/ready?model=other").status_code == 200
    assert up.metric("instance_up", model_name="tiny") == 2
    assert up.metric("instance_up", model_name="demo", engine="demo/engine-0") == 1
    page = up.get("/metrics")
    families = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "each is there once"
    assert httpx.get(up.url + "/overview").status_code == 400
    seen = httpx.get(up.url + "/overview?model=other").json()
    assert seen["model"] == "tiny"
    assert {row["name"] for row in seen["master"]["instances"]} == {"tiny/engine-0", "tiny/engine-1"}
    for name in ("demo", "tiny"):
        request = ask(up, name).headers["x-request-id"]
        (sequence,) = httpx.get(f"{up.url}/explain/{request}").json()["sequences"]
        assert sequence["placements"][0]["prefill"].startswith(f"{name}/")
    assert httpx.get(up.url + "/explain/never").status_code == 404
    with httpx.stream("GET", up.url + "/overview/stream?model=demo") as events:
        first = next(line for line in events.iter_lines() if line.startswith("data: "))
    assert json.loads(first.removeprefix("data: "))["model"] == "demo"


def test_a_change_to_other_models_is_refused_by_name(up, tmp_path):
    code, said = apply(up, tmp_path, {"model": "demo", "engine": DEMO, "instances": [{}]})
    assert code == 2
    assert "models: one without a name, allowed while the deployment runs are demo tiny" in said


@pytest.mark.slow
def test_all_models_change_or_none_does(tmp_path):
    def listed(a, b, policy="round_robin"):
        entry = {"model": "demo", "engine": DEMO, "policy": policy}
        return {"models": [{"name": "a", **entry, "instances": a}, {"name": "b", **entry, "instances": b}]}

    def served():
        return {name: {row["name"] for row in states_of(name) if row["state"] == "ready"} for name in ("a", "b")}

    def states_of(name):
        return httpx.get(f"{up.url}/health?model={name}").json()["instances"]

    with deployed(listed([{}], [{}])) as up:
        said_at_first = {name: text(ask(up, name)) for name in ("a", "b")}
        with ThreadPoolExecutor() as clients:
            over = threading.Event()

            def load(name):
                while not over.is_set():
                    assert text(ask(up, name, max_tokens=60)).startswith(said_at_first[name])

            loads = [clients.submit(load, name) for name in ("a", "b")]
            wanted = listed([{"count": 2}], [{"max-num-seqs": 7}], "least_loaded")
            wanted["models"].reverse()
            code, said = apply(up, tmp_path, wanted)
            assert code == 0, said + up.log()
            lines = ("a/engine-1 is added", "a/master is started anew: policy", "b/engine-0 is replaced: max-num-seqs")
            assert all(line in said for line in lines), said
            changed = {"a": {"a/engine-0", "a/engine-1"}, "b": {"b/engine-0.1"}}
            eventually(lambda: served() == changed, 60, up.log)
            if not torch.cuda.is_available():
                broken = listed([{"count": 3}], [{"max-num-seqs": 7}, {"name": "gpu", "device": "cuda:0"}])
                code, said = apply(up, tmp_path, broken)
                assert code == 1, said + up.log()
                assert "b/gpu-0 is not fit to serve" in said
                eventually(lambda: served() == changed, 60, up.log)
            over.set()
            for each in loads:
                each.result()


@pytest.mark.slow
def test_a_list_of_one_model_changes_as_one_without_a_list(tmp_path):
    def listed(count, policy):
        entry = {"name": "m", "model": "demo", "policy": policy, "engine": PACED, "instances": [{"count": count}]}
        return {"models": [entry]}

    with deployed(listed(1, "round_robin")) as up:
        code, said = apply(up, tmp_path, listed(2, "least_loaded"))
        assert code == 0, said + up.log()
        assert "master is started anew: policy" in said
        assert len(ready(up)) == 2
        assert all(name.startswith("m/") for name in ready(up))
        text(ask(up, "m"))


def test_one_sleeps_and_the_other_serves(up):
    assert httpx.post(up.url + "/sleep", timeout=60).status_code == 400
    assert httpx.post(up.url + "/sleep?model=tiny", timeout=60).status_code == 200
    assert httpx.get(up.url + "/is_sleeping?model=tiny").json() == {"is_sleeping": True}
    assert httpx.get(up.url + "/is_sleeping?model=demo").json() == {"is_sleeping": False}
    assert (ask(up, "tiny").status_code, ask(up, "demo").status_code) == (503, 200)
    assert httpx.get(up.url + "/ready").status_code == 200
    assert httpx.get(up.url + "/ready?model=tiny").status_code == 503
    assert httpx.post(up.url + "/wake_up?model=tiny", timeout=60).status_code == 200
    eventually(lambda: ask(up, "tiny").status_code == 200)


def test_batches_of_both_run_at_once(up):
    client = openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0)

    def batch(*models):
        bodies = [{**ASK, "prompt": f"line {i}", "model": model} for i, model in enumerate(models)]
        lines = [
            json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body})
            for i, body in enumerate(bodies)
        ]
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id

    def ended(made):
        found = client.batches.retrieve(made)
        return found if found.status in ("completed", "failed") else None

    made = [batch(*["demo"] * 12), batch(*["tiny"] * 12), batch("demo", "tiny")]
    over = [eventually(lambda each=each: ended(each)) for each in made]
    assert [each.status for each in over] == ["completed", "completed", "failed"]
    assert over[2].errors.data[0].code == "mismatched_model"
    for each, name in zip(over, ("demo", "tiny"), strict=False):
        assert (each.request_counts.completed, each.request_counts.failed) == (12, 0)
        for answer in map(json.loads, client.files.content(each.output_file_id).text.splitlines()):
            body = answer["response"]["body"]
            alone = text(ask(up, name, prompt=f"line {answer['custom_id']}"))
            assert (body["model"], body["choices"][0]["text"]) == (name, alone)


@pytest.mark.parametrize("victim", ["master", "engine-0", pytest.param("kv-pool", marks=pytest.mark.slow)])
def test_what_happens_to_one_does_not_reach_the_other(up, victim):
    """Under load of both: every answer is what it is undisturbed, and the other's processes are the same as before."""
    prompts = [f"def f{i}(" for i in range(4)]
    calm = {(name, p): text(ask(up, name, prompt=p, max_tokens=24)) for name in ("demo", "tiny") for p in prompts}
    before = up.pids()
    struck = f"tiny/{victim}"
    with ThreadPoolExecutor(8) as pool:
        asked = []
        for turn in range(4):
            asked += [(key, pool.submit(ask, up, key[0], turn % 2, prompt=key[1], max_tokens=24)) for key in calm]
            if turn == 1:
                up.kill(struck, signal.SIGKILL)
        for (name, prompt), answer in asked:
            if name == "demo" or victim != "kv-pool":
                assert text(answer.result()) == calm[name, prompt]
            else:
                assert answer.result().status_code in (200, 503)
    up.wait_restarted(struck, before[struck])
    after = up.pids()
    assert {name: pid for name, pid in after.items() if not name.startswith("tiny/")} == {
        name: pid for name, pid in before.items() if not name.startswith("tiny/")
    }
    eventually(lambda: states(up, "tiny") == {"ready"})
    assert text(ask(up, "tiny", prompt=prompts[0], max_tokens=24)) == calm["tiny", prompts[0]]


@pytest.mark.slow
def test_one_that_fails_for_good_leaves_the_other():
    """Until there is none left."""
    models = [{"name": name, "model": "demo", "engine": PACED, "instances": [{}]} for name in ("a", "b")]
    with deployed({"restart": {"limit": 0}, "models": models}) as up:
        up.kill("a/engine-0")
        up.wait_for("a/engine-0 ended once, .*; a is given up, and the other models serve on")
        eventually(lambda: httpx.get(up.url + "/ready?model=a").status_code == 503)
        assert [httpx.get(f"{up.url}/health{asked}").status_code for asked in ("", "?model=b", "?model=a")] == [
            200,
            200,
            503,
        ]
        assert (ask(up, "a").status_code, ask(up, "b").status_code) == (503, 200)
        assert [card["id"] for card in httpx.get(up.url + "/v1/models").json()["data"]] == ["a", "b"]
        up.kill("b/engine-0")
        assert up.process.wait(60) == 1


def free_ports(count):
    """The first of so many in a row."""
    while True:
        with contextlib.ExitStack() as stack:
            probe = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            first = probe.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for more in range(1, count):
                    stack.enter_context(socket.create_server(("127.0.0.1", first + more)))
                return first


@pytest.mark.slow
def test_a_host_joins_one_of_them_by_the_port_of_its_master(tmp_path):
    """It adds instances to that model alone; when its launcher is killed that model goes on, and the other never sees
    any of it. Who comes to the master of the other model is told so."""
    cluster = {"host": "127.0.0.1", "port": free_ports(2), "secret": "of these hosts"}
    common = {"policy": "round_robin", "transport": {"kind": "tcp"}}
    other = checkpoint(tmp_path / "other")
    models = [
        {"name": "a", "model": str(other), "engine": DEMO | {"max-model-len": 1024}, "instances": [{}]} | common,
        {"name": "b", "model": "demo", "engine": PACED, "instances": [{}]} | common,
    ]
    (tmp_path / "hosts").mkdir()
    join = partial(joined, tmp_path / "hosts", cluster=cluster, engine=PACED, **common)
    with deployed({"models": models, "cluster": cluster}) as up:
        masters = [f"127.0.0.1:{cluster['port'] + number}" for number in range(2)]
        before = up.pids()

        def names(model):
            rows = httpx.get(f"{up.url}/health?model={model}").json()["instances"]
            return {row["name"] for row in rows if row["state"] == "ready"}

        with join(masters[1], instances=[{"name": "far", "count": 2}]) as far:
            eventually(lambda: names("b") == {"b/engine-0", "far-0", "far-1"}, 90, lambda: up.log() + far.log())
            assert names("a") == {"a/engine-0"}
            eventually(lambda: where(up, "b") == {"b/engine-0", "far-0", "far-1"}, 30, up.log)
            assert where(up, "a") == {"a/engine-0"}
            with join(masters[0], instances=[{"name": "wrong"}]) as wrong:
                wrong.wait_for("its checkpoint is another one than that of")
                assert wrong.process.wait(60) == 2
            with ThreadPoolExecutor(8) as pool:
                asked = [(name, pool.submit(ask, up, name, max_tokens=100)) for name in ("a", "b") * 12]
                eventually(lambda: up.metric("num_requests_running", engine="far-0") > 0, 30, up.log)
                far.process.kill()
                answers = {name: {text(answer.result()) for each, answer in asked if each == name} for name in "ab"}
            assert [len(texts) for texts in answers.values()] == [1, 1]
            eventually(lambda: names("b") == {"b/engine-0"}, 60, up.log)
        assert where(up, "b") == {"b/engine-0"}
        assert up.pids() == before


def where(up, model):
    """Instances at which some requests of a model run."""
    requests = [ask(up, model).headers["x-request-id"] for _ in range(6)]
    told = [httpx.get(f"{up.url}/explain/{request}").json()["sequences"] for request in requests]
    return {sequence["placements"][0]["prefill"] for (sequence,) in told}
