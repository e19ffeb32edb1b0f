"""Policies over real processes: requests with targets and without, and offline work beside them, whatever decides."""

import asyncio
import json
import threading

import httpx
import pytest

from penstock.cli.devices import save_device, saved_file
from penstock.cli.main import main
from penstock.sched.steptime import DEVICES
from penstock.service.policies import BUNDLES, STEADY
from tests.helpers.chaos import Load, bodies, served_model, verified
from tests.helpers.deployments import PACED, deployed
from tests.helpers.servers import QUICK, serving
from tests.helpers.waiting import eventually

BUSY = PACED | {"slowdown": 6, "max-num-batched-tokens": 256, "max-num-seqs": 16}
QUICK_RESTART = {"backoff": 1e-6, "limit": 100}
LEVELS = [
    {"slo": {"ttft_ms": 2000, "tpot_ms": 200}},
    {},
    {"service_tier": "flex"},
    {"slo": {"ttft_ms": 50, "tpot_ms": 20}},  # which nobody can keep
    {"priority": 5},
]


@pytest.fixture(scope="module")
def unified(tmp_path_factory):
    recording = tmp_path_factory.mktemp("unified") / "recording"
    content = {
        "model": "demo",
        "engine": BUSY,
        "instances": [{"count": 2}],
        "policy": "unified",
        "priorities": [{"priority": 5, "ttft-ms": [4000, 5000], "tpot-ms": [300, 300]}],
        "flight-recorder": str(recording),
        "restart": QUICK_RESTART,
    }
    with deployed(content) as up:
        yield up, str(recording)
        assert up.stop() == 0
        assert not any("Traceback" in line for line in up.lines), "".join(up.lines[-60:])


def send(up, count, **more):
    model = asyncio.run(served_model(up.url))
    made = [body | LEVELS[i % len(LEVELS)] for i, body in enumerate(bodies(model, count, **more))]
    return model, Load(up.urls, made)


def answered(up, model, load):
    """Every request has got its whole text, and the right one."""
    failed = [record.detail for record in load.wait() if record.error]
    assert not failed, failed
    result = asyncio.run(verified(up.url, model, load))
    assert (result.checked, result.differ) == (len(load.bodies), 0), result.differences


def test_unified_answers_all_kinds_and_explain_tells_why(unified, capsys):
    up, recording = unified
    model, load = send(up, 30, seed=1)
    body = {"model": "demo", "prompt": "import os", "max_tokens": 8, "slo": {"ttft_ms": 1500, "tpot_ms": 90}}
    answer = httpx.post(up.url + "/v1/completions", json=body, headers={"X-Request-Id": "why-there"}, timeout=30)
    assert answer.status_code == 200
    answered(up, model, load)
    assert up.metric("routing_decisions_total", policy="unified") == 31
    assert up.metric("routing_decisions_total", policy="unified", reason="offline") == 6

    def explained():
        assert main(["explain", "why-there", "--file", recording, "--json"]) in (0, 2)
        out = capsys.readouterr().out
        sequences = json.loads(out)["sequences"] if out else []
        return sequences if sequences and sequences[0]["outcome"] else None

    (sequence,) = eventually(explained, what=lambda: "".join(up.lines[-30:]))
    assert (sequence["demand"]["ttft_ms"], sequence["demand"]["tpot_ms"]) == (1500, 90)
    (placement,) = sequence["placements"]
    assert placement["policy"] == "unified"
    rows = {row["instance"]: row for row in placement["stages"]["prefill"]}
    assert rows.keys() == {"engine-0", "engine-1"}
    assert [name for name, row in rows.items() if row["chosen"]] == [placement["prefill"]]
    assert sequence["outcome"]["tokens"] == 8
    assert main(["explain", "--file", recording]) == 0
    shown = capsys.readouterr().out
    assert "by unified: offline" in shown


def test_a_queue_survives_its_master_and_forgets_who_leaves(unified):
    up, _ = unified
    model, load = send(up, 50, seed=2, prompts=(800, 1500), tokens=10)
    eventually(lambda: up.metric("num_requests_waiting", engine="master") >= 5, what=lambda: "".join(up.lines[-20:]))
    body = {"model": "demo", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "service_tier": "flex"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(up.url + "/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.2))
    earlier = up.kill("master")
    up.wait_restarted("master", earlier)
    answered(up, model, load)
    eventually(lambda: up.metric("num_requests_waiting") == up.metric("num_requests_running") == 0)


def test_xllm_moves_instances_loses_nothing_and_drains_what_waits_at_the_master():
    content = {
        "model": "demo",
        "engine": BUSY | {"slowdown": 4},
        "instances": [{"role": "prefill"}, {"role": "decode", "count": 2}],
        "policy": "xllm",
    }
    with deployed(content) as up:
        model, load = send(up, 20, seed=4, prompts=(500, 1500), tokens=16)
        answered(up, model, load)
        moves = [line for line in up.lines if " changes to role " in line]
        assert any("decode-" in line and "changes to role prefill" in line for line in moves), "".join(up.lines[-60:])
        assert any(" has role prefill " in line for line in up.lines), "nobody said that it has it"
        assert up.metric("handoffs_total") > 0
        offline = [body | {"service_tier": "flex"} for body in bodies(model, 24, 5, (1400, 1500), 4)]
        load = Load(up.urls, offline)
        eventually(lambda: up.metric("num_requests_waiting", engine="master") >= 3)
        code = up.stop()
        assert (code, [record.detail for record in load.wait() if record.error]) == (0, [])
        assert not any("Traceback" in line for line in up.lines)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["together", "apart"])
@pytest.mark.parametrize("policy", [name for name in STEADY if name != "epd"])  # which is about images
def test_every_policy_that_a_deployment_may_have_serves_all_kinds(policy, layout):
    roles = [{"count": 3}] if layout == "together" else [{"role": "prefill"}, {"role": "decode", "count": 2}]
    content = {
        "model": "demo",
        "engine": BUSY,
        "instances": roles,
        "policy": policy,
        "priorities": [{"priority": 5, "ttft-ms": [4000, 5000], "tpot-ms": [300, 300]}],
        "transport": {"kind": "tcp"},
    }
    with deployed(content) as up:
        model, load = send(up, 40, seed=7)
        answered(up, model, load)
        model, load = send(up, 40, seed=8, prompts=(500, 1500), tokens=12)
        answered(up, model, load)
        names = {policy, policy.replace("_", "-")}
        decided = [up.metric("routing_decisions_total", policy=name) for name in names]
        assert sum(decided) >= 80, "somebody else decided"
        assert up.metric("recoveries_total") == 0
        handed = up.metric("handoffs_total")
        assert handed > 0 if layout == "apart" else handed == 0 or BUNDLES[policy].moves
        assert up.stop() == 0
        assert not any("Traceback" in line for line in up.lines), "".join(up.lines[-60:])


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kind"), [("xllm", "shared"), ("unified", "tcp"), ("least_loaded", "shared")])
def test_roles_change_again_and_again_and_the_text_is_the_same(policy, kind):
    """Prompts that have to be early, and then tokens, in turn."""
    content = {
        "model": "demo",
        "engine": BUSY,
        "instances": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 3}],
        "policy": policy,
        "live-roles": True,
        "transport": {"kind": kind},
    }
    with deployed(content) as up:
        model = asyncio.run(served_model(up.url))
        for turn in range(6):
            slo, prompts, tokens = {"ttft_ms": 100}, (1000, 1500), 8
            if turn % 2:
                slo, prompts, tokens = {"ttft_ms": 9000, "tpot_ms": 10}, (5, 50), 60
            made = [body | {"slo": slo} for body in bodies(model, 40, turn, prompts, tokens)]
            answered(up, model, Load(up.urls, made))
        assert up.metric("recoveries_total") == 0
        for role in ("prefill", "decode"):
            assert any(f" changes to role {role}: " in line for line in up.lines), "".join(up.lines[-60:])
        assert up.stop() == 0
        assert not any("Traceback" in line for line in up.lines), "".join(up.lines[-60:])


def test_targets_reach_the_engine_of_serve(tmp_path, monkeypatch):
    """One that waits at the engine goes before an earlier one that has no target."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_device(DEVICES["l4"], saved_file())  # without step times nobody knows who can be in time
    with serving("demo", *QUICK, "--max-num-seqs", "1") as server:
        ask = {"model": "demo", "prompt": "import os", "ignore_eos": True, "temperature": 0}
        ended = []

        def complete(name, more):
            httpx.post(server.url + "/v1/completions", json={**ask, "max_tokens": 30, **more}, timeout=60)
            ended.append(name)

        first = {**ask, "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=first, timeout=60) as answer:
            lines = answer.iter_lines()  # kept: when it is collected, the connection is closed
            next(lines)
            levels = {"without": {}, "with": {"slo": {"ttft_ms": 60_000, "tpot_ms": 5000}}}
            threads = [threading.Thread(target=complete, args=level) for level in levels.items()]
            for waiting, thread in enumerate(threads, 1):
                thread.start()
                eventually(lambda n=waiting: server.metric("num_requests_waiting") == n)
        for thread in threads:
            thread.join(60)
        assert ended == ["with", "without"]
