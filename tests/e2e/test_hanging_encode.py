"""An image that is looked at beside steps, and hangs: the engine is found out, killed, and started again."""

import os
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_images import drawn, url
from tests.helpers.servers import QUICK, serving

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow
FAULT = """
import importlib.util, os, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "penstock.engine.media":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def patched(module):
            run(module)
            look = module.LookingThread._look
            def hang(*args):
                try:
                    os.close(os.open(os.environ["HANGS_ONCE"], os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return look(*args)
                while True:
                    time.sleep(3600)
            module.LookingThread._look = hang
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""


def test_an_encode_that_hangs_beside_steps(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
    monkeypatch.setenv("HANGS_ONCE", str(tmp_path / "hung"))
    with serving("demo-vl", *QUICK, "--encode-beside", "on") as server:
        first = server.engine_pid()
        picture = {"type": "image_url", "image_url": {"url": url(drawn("red", 200, 200))}}
        talk = [{"role": "user", "content": [picture, {"type": "text", "text": "Describe the picture."}]}]
        body = {"model": "demo-vl", "messages": talk, "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=90)
        assert answer.status_code == 200, answer.text
        assert (tmp_path / "hung").exists()
        assert server.engine_pid() != first
        assert any("engine-0 is killed: it hangs: no heartbeat for" in line for line in server.lines)
        again = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=90)
        assert again.status_code == 200, again.text
        assert again.json()["choices"][0]["message"] == answer.json()["choices"][0]["message"]
