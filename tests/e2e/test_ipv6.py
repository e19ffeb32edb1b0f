"""Hosts that know one another by IPv6 addresses."""

import contextlib
import socket

import openai
import pytest
import yaml

from penstock.cli.chat import Server, parse_url
from tests.helpers.deployments import PACED
from tests.helpers.etcd import three_members
from tests.helpers.links import NEEDS_MOONCAKE
from tests.helpers.network import NEEDS_IPV6
from tests.helpers.servers import READY, Served
from tests.helpers.waiting import eventually

pytestmark = NEEDS_IPV6


@pytest.mark.parametrize(
    ("kind", "etcd"), [("tcp", False), pytest.param("mooncake", True, marks=[pytest.mark.slow, NEEDS_MOONCAKE])]
)
def test_hosts_at_ipv6_addresses_serve_as_one(kind, etcd, tmp_path):
    with contextlib.ExitStack() as stack:
        cluster = {"host": "::1", "port": free_port(), "secret": "of these hosts"}
        if etcd:
            cluster["registry"] = stack.enter_context(three_members(loopback="::1")).address
        common = {"model": "demo", "engine": PACED, "policy": "least_loaded", "transport": {"kind": kind}}

        def run(*command, role, more=(), **content):
            file = tmp_path / f"{role}.yaml"
            settings = common | {"cluster": cluster, "instances": [{"role": role}]} | content
            file.write_text(yaml.safe_dump(settings, sort_keys=False))
            served = Served(*command, str(file), more=more)
            stack.callback(end, served)
            return served

        up = run("up", role="prefill", more=("--port", "0"), host="::1")
        url = up.wait_for(READY)[1]
        assert url.startswith("http://[::1]:")
        up.urls = [url]
        run("join", *([] if etcd else [f"[::1]:{cluster['port']}"]), role="decode")
        for name in ("prefill-0", "decode-0"):
            eventually(lambda name=name: any(f"{name} is ready: " in line for line in up.lines), 60, up.log)
        assert Server(parse_url(url + "/v1"), None).find_model(None) == "demo"
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
        long = "import os\n" * 100  # several blocks
        answer = client.completions.create(model="demo", prompt=long, max_tokens=8, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 8
        assert up.metric("handoffs_total") == 1, "over a link between IPv6 addresses"
        assert up.metric("kv_blocks_pulled_total") > 1


def free_port():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        return probe.getsockname()[1]


def end(served):
    if served.process.poll() is None:
        served.stop()
