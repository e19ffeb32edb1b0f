"""A deployment whose registry is an etcd of three members, with a master that stands by."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from tests.e2e.test_fleet import complete, free_port, joined, states, stream, text_of
from tests.helpers.deployments import PACED, colocated, deployed
from tests.helpers.etcd import three_members
from tests.helpers.servers import Served
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow
SLOW = PACED | {"slowdown": 3}


def leader(up):
    """The newest master that said so."""
    return re.findall(r"\[(master[-0-9]*)\]: this master leads", "".join(up.lines))[-1]


def refuses_other_settings(folder, cluster, content):
    """Whoever begins the deployment a second time, or joins it."""
    with joined(folder, None, cluster, policy="xllm", transport={"lease": 2}, instances=[{"name": "c"}]) as other:
        other.wait_for("policy: 'xllm' here, 'round_robin' there; lease: 2.0 here, 5.0 there, in the deployment;")
        assert other.process.wait(30) == 2
    file = folder / "again.yaml"
    file.write_text(yaml.safe_dump(content | {"policy": "least_loaded"}))
    again = Served("up", str(file))
    again.wait_for("policy: 'least_loaded' here, 'round_robin' there, in the deployment that runs; allowed is the same")
    assert again.process.wait(30) == 2


def test_members_and_masters_fail_and_nothing_is_lost(tmp_path):
    with three_members() as etcd:
        cluster = {"host": "127.0.0.1", "port": free_port(), "secret": "s", "registry": etcd.address}
        content = colocated(1, engine=SLOW, policy="round_robin", cluster=cluster | {"masters": 2})
        others = {"engine": SLOW, "instances": [{"name": "b"}], "model": None}  # model and policy are the deployment's
        with deployed(content) as up, joined(tmp_path, None, cluster, **others):
            both = {"engine-0": "ready", "b-0": "ready"}
            eventually(lambda: states(up) == both, 60, up.log)
            eventually(lambda: any("b-0 is ready: " in line for line in up.lines), 30, up.log)
            refuses_other_settings(tmp_path, cluster, content)
            expected = text_of(stream(up.url, 300))

            def all_right(trouble):
                with ThreadPoolExecutor(4) as pool:
                    texts = [pool.submit(lambda: text_of(stream(up.url, 300))) for _ in range(4)]
                    eventually(lambda: up.metric("num_requests_running") >= 1, 30, up.log)
                    trouble()
                    assert {text.result() for text in texts} == {expected}

            all_right(lambda: etcd.kill(0))
            assert states(up) == both
            up.kill(leader(up))
            eventually(lambda: any("the master has gone" in line for line in up.lines), 10, up.log)
            all_right(lambda: None)
            fallback = up.metric("routing_decisions_total", policy="fallback", reason="no-master")
            assert fallback == 4, "until another one is elected"
            eventually(lambda: sum("this master leads" in line for line in up.lines) == 2, 30, up.log)
            eventually(lambda: sum("b-0 is ready: " in line for line in up.lines) == 2, 30, up.log)
            assert states(up) == both
            assert complete(up.url, max_tokens=4)
        # the joined host has been killed by now: its lease ends by itself
