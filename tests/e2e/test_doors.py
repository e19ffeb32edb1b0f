"""A server that others reach: TLS, keys from a file, pages of other origins, a proxy's path. What is in its files
changes while it serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.helpers.certificates import NEEDS_OPENSSL, certificate
from tests.helpers.deployments import PACED
from tests.helpers.servers import QUICK, Served
from tests.helpers.waiting import eventually

pytestmark = NEEDS_OPENSSL
READY = re.compile(r"ready: \S+ on (https://\S+)/v1")
HEALTH_CHECK = Path(__file__).parents[2] / "deploy" / "docker" / "healthcheck.py"
STREAM = {"model": "demo", "prompt": "import os", "stream": True, "ignore_eos": True}


def trusting(ca: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate(ca)["ca"])
    context.check_hostname = False
    return context


def put(ca: str, folder: Path) -> dict[str, str]:
    """A certificate of this CA and its key, each replaced in one step."""
    names = {"certificate": "tls.crt", "key": "tls.key"}
    for kind, name in names.items():
        shutil.copy(certificate(ca)[kind], folder / f"{name}.new")
        (folder / f"{name}.new").rename(folder / name)
    return {"ssl-certfile": str(folder / "tls.crt"), "ssl-keyfile": str(folder / "tls.key")}


@pytest.fixture
def server(tmp_path):
    (tmp_path / "keys").write_text("first\n")
    flags = {
        **put("one", tmp_path),
        "api-key-file": str(tmp_path / "keys"),
        "allowed-origins": '["https://app.example"]',
        "root-path": "/llm",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    served = Served("serve", "demo", *QUICK, *words, new_group=True)  # without a terminal
    try:
        served.urls.append(served.wait_for(READY).group(1))
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()


def status(server, ca, key, path="/v1/models"):
    """Of an answer on a connection of its own; the reason where there is none."""
    try:
        with httpx.Client(verify=trusting(ca)) as client:
            return client.get(server.url + path, headers={"authorization": f"Bearer {key}"}).status_code
    except httpx.TransportError as error:
        return str(error)


def test_a_server_that_others_reach(server, tmp_path):
    assert server.url.endswith("/llm")
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    asked = httpx.options(server.url + "/v1/chat/completions", headers=asks, verify=trusting("one"))
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert [status(server, "one", key) for key in ("first", "second")] == [200, 401]
    assert "CERTIFICATE_VERIFY_FAILED" in status(server, "two", "first")
    headers = {"authorization": "Bearer first"}
    with (
        httpx.Client(verify=trusting("one"), headers=headers, timeout=60) as client,
        client.stream("POST", server.url + "/v1/completions", json={**STREAM, "max_tokens": 3000}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        put("two", tmp_path)
        (tmp_path / "keys").write_text("second\n")
        eventually(lambda: status(server, "two", "second") == 200, 30, server.log)
        (tmp_path / "keys").write_text("third\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("API keys: read again, at SIGHUP")
        assert [status(server, "two", key) for key in ("second", "third")] == [401, 200]
        (tmp_path / "keys").write_text("second\n")
        eventually(lambda: status(server, "two", "second") == 200, 30, server.log)
        assert status(server, "two", "first") == 401
        assert "CERTIFICATE_VERIFY_FAILED" in status(server, "one", "second")
        (tmp_path / "tls.crt").write_text("no certificate")
        (tmp_path / "keys").write_text("\n")
        for what in ("TLS", "API keys"):
            known = f"{what}: the files cannot be used"
            eventually(lambda known=known: any(known in line for line in server.lines), 30, server.log)
        assert status(server, "two", "second") == 200
        *_, last, done = [line.removeprefix("data: ") for line in lines if line]
    assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    port = re.search(r":(\d+)/", server.url)
    environment = {"PENSTOCK_PORT": port[1], "PENSTOCK_SSL_CERTFILE": "x", "PENSTOCK_ROOT_PATH": "/llm"}
    subprocess.run([sys.executable, HEALTH_CHECK], env={**os.environ, **environment}, check=True, timeout=30)
    assert server.stop() == 0, server.log()


@pytest.mark.slow
def test_a_deployment_with_tls_goes_on_after_its_frontend_and_takes_another_instance(tmp_path):
    content = {
        "model": "demo",
        **put("one", tmp_path),
        "policy": "round_robin",
        "engine": PACED,
        "instances": [{"name": "engine"}],
    }
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(content))
    up = Served("up", str(file), new_group=True)  # without a terminal
    try:
        up.urls.append(up.wait_for(READY).group(1))
        with (
            httpx.Client(verify=trusting("one"), timeout=60) as client,
            client.stream("POST", up.url + "/v1/completions", json={**STREAM, "max_tokens": 4000}) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            up.process.send_signal(signal.SIGHUP)
            up.wait_for("TLS: read again, at SIGHUP")
            frontend = subprocess.run(
                ["pgrep", "-P", str(up.process.pid), "-f", "penstock.cli.frontend"],
                capture_output=True,
                text=True,
                check=True,
            )
            os.kill(int(frontend.stdout), 9)
            with pytest.raises(httpx.TransportError):
                list(lines)
        eventually(lambda: status(up, "one", "") == 200, 30, up.log)
        file.write_text(yaml.safe_dump(content | {"instances": [{"name": "engine", "count": 2}]}))
        port = up.url.rsplit(":", 1)[1]
        words = [sys.executable, "-m", "penstock.cli.main", "up", "--apply", str(file), "--port", port]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=90)
        assert done.returncode == 0, done.stderr + up.log()
        assert up.stop() == 0
    finally:
        if up.process.poll() is None:
            up.stop()
