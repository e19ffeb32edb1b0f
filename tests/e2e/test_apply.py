"""`penstock up --apply`: a deployment changes while requests run, and not one of them fails."""

import contextlib
import json
import math
import shutil
import subprocess
import sys
import threading

import httpx
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from penstock.service.checkpoint import DEMO as CHECKPOINT
from tests.helpers.deployments import DEMO, PACED, colocated, deployed, disaggregated
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow
SHORT, LONG = 60, 1500  # tokens


def stream(url, tokens=SHORT):
    """The text, from the first event to the end of a whole stream; AssertionError if it is not one."""
    ask = {"model": "demo", "prompt": "import os", "temperature": 0, "stream": True, "max_tokens": tokens}
    pieces, reason = [], None
    with httpx.stream("POST", url + "/v1/completions", json=ask | {"ignore_eos": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "choices" in event, event
                pieces.append(event["choices"][0]["text"])
                reason = event["choices"][0]["finish_reason"]
    assert reason == "length", reason
    return "".join(pieces)


class Load:
    """Clients that stream one request after another, until they are stopped."""

    def __init__(self, url, clients):
        self.texts, self.failures = [], []
        self._url, self._over = url, threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _work(self):
        while not self._over.is_set():
            try:
                self.texts.append(stream(self._url))
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(repr(error))

    def stop(self):
        self._over.set()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def under_load(up, clients=2):
    load = Load(up.url, clients)
    try:
        eventually(lambda: load.texts, 60, up.log)
        yield load
    finally:
        load.stop()
    assert not load.failures, str(load.failures[:3]) + up.log()


class Applying:
    """`penstock up --apply` in a process of its own."""

    def __init__(self, up, folder, content, *more):
        file = folder / "new.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        port = up.url.rpartition(":")[2]
        words = [sys.executable, "-m", "penstock.cli.main", "up", "--apply", str(file), "--port", port, *more]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self):
        """Its exit code, and all that it said."""
        return self.process.wait(180), "".join(self.process.communicate())


def apply(up, folder, content, *more):
    return Applying(up, folder, content, *more).end()


def ready(up):
    return {i["name"] for i in json.loads(up.get("/health"))["instances"] if i["state"] == "ready"}


def engines(up):
    return {name for name in up.pids() if name not in ("kv-pool", "master", "frontend-0")}


def test_instances_roles_settings_and_policies_change_under_load(tmp_path):
    first = colocated(1, engine=PACED, policy="round_robin")
    with deployed(first) as up:
        expected = stream(up.url)
        with under_load(up, clients=8) as load:
            two = colocated(2, engine=PACED, policy="round_robin")
            assert apply(up, tmp_path, two, "--check") == (0, "engine-1 is added\n")
            assert engines(up) == {"engine-0"}, "nothing has happened"
            assert apply(up, tmp_path, two)[0] == 0
            assert engines(up) == ready(up) == {"engine-0", "engine-1"}
            apart = disaggregated(engine=PACED, policy="round_robin")
            assert apply(up, tmp_path, apart)[0] == 0
            assert engines(up) == ready(up) == {"prefill-0", "decode-0"}
            master = up.pids()["master"]
            unified = disaggregated(engine=PACED | {"max-num-seqs": 32}, policy="unified")
            assert apply(up, tmp_path, unified)[0] == 0
            assert engines(up) == ready(up) == {"prefill-0.1", "decode-0.1"}
            assert up.settings("master")["policy"] == "unified"
            assert up.pids()["master"] != master
            code, said = apply(up, tmp_path, unified | {"frontends": 2, "kv-pool": {"orphans": 5}})
            assert code == 2
            assert "new.yaml: frontends: another value, allowed while the deployment runs is what it began with" in said
            assert "new.yaml: kv-pool.orphans: 5.0, allowed while the deployment runs is 60.0" in said
            assert apply(up, tmp_path, colocated(1, engine=PACED))[0] == 0
            assert engines(up) == ready(up) == {"engine-0"}
        assert set(load.texts) == {expected}
        assert up.stop() == 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two that can be used, one that cannot be read, one that cannot be loaded, and one that computes nonsense."""
    folder, norm = tmp_path_factory.mktemp("checkpoints"), "model.norm.weight"
    for name in ("old", "new", "cut", "misshapen", "nonsense"):
        shutil.copytree(CHECKPOINT, folder / name)
    weights = load_file(folder / "old" / "model.safetensors")
    changes = {"new": -weights[norm], "misshapen": weights[norm][:-1].clone(), "nonsense": weights[norm] * math.nan}
    for name, changed in changes.items():
        save_file(weights | {norm: changed}, folder / name / "model.safetensors", {"format": "pt"})
    whole = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def test_a_checkpoint_is_rolled_in_and_a_broken_one_is_turned_back(tmp_path, checkpoints):
    def content(name, **more):
        model = {"model": str(checkpoints / name), "served-model-name": "demo"}
        return colocated(2, engine=DEMO | more) | model

    with deployed(content("old")) as up:
        before, long = stream(up.url), stream(up.url, LONG)
        with under_load(up) as load:
            code, said = apply(up, tmp_path, content("cut"))
            assert code == 2, said
            assert "corrupt or truncated" in said
            for name, why in (("misshapen", "it ended with exit code "), ("nonsense", "its probe failed: ")):
                code, said = apply(up, tmp_path, content(name))
                assert code == 1, said
                assert f"engine-0.1 is not fit to serve ({why}" in said
                assert engines(up) == ready(up) == {"engine-0", "engine-1"}
        assert set(load.texts) == {before}
        with under_load(up) as load:
            texts = []
            caught = threading.Thread(target=lambda: texts.append(stream(up.url, LONG)))
            caught.start()
            code, said = apply(up, tmp_path, content("new"))
            assert code == 0, said + up.log()
            assert engines(up) == ready(up) == {"engine-0.1", "engine-1.1"}
            caught.join()
            assert texts == [long], "it ends with the weights that it began with"
            after = stream(up.url)
            assert after != before
        assert set(load.texts) == {before, after}
        if not torch.cuda.is_available():  # then the second cannot be had, and the first returns
            with under_load(up) as load:
                groups = {"instances": [{"max-num-seqs": 32}, {"name": "gpu", "device": "cuda:0"}]}
                code, said = apply(up, tmp_path, content("new") | groups)
                assert code == 1, said
                assert "gpu-0 is not fit to serve" in said
                assert engines(up) == ready(up) == {"engine-0.1", "engine-1.1"}
            assert set(load.texts) == {after}
        assert up.stop() == 0
