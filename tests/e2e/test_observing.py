"""What operators see of a real server: several keys, vLLM's metrics, JSON lines, a trace; and what no client may do."""

import json

import httpx
import pytest

from tests.helpers.deployments import PACED
from tests.helpers.documented import CHECKS
from tests.helpers.servers import QUICK, serving
from tests.helpers.traces import receiving

TRACE = "0af7651916cd43dd8448eb211c80319c"
ASK = {"prompt": "secret-word", "max_tokens": 5, "ignore_eos": True, "slo": {"ttft_ms": 60000}}


@pytest.fixture
def receiver():
    with receiving() as address_and_got:
        yield address_and_got


def commands(command, url, folder):
    flags = {"api-key": "one,two", "metrics-compat": "vllm", "log-format": "json", "otlp-traces-endpoint": url}
    if command == "serve":
        return ["demo", *QUICK, *(word for name, value in flags.items() for word in (f"--{name}", value))]
    settings = {"model": "demo", **flags, "instances": [{"count": 1}], "engine": PACED}
    (folder / "deployment.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return [str(folder / "deployment.yaml")]


def cached(target, key, **fields):
    """Tokens of a prompt of three blocks that were cached for this key."""
    body = {"prompt": "a tenant's own " * 20, "max_tokens": 1} | fields
    answer = httpx.post(target, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_request_leaves_one_line_one_trace_and_vllms_metrics(command, receiver, tmp_path):
    url, got = receiver
    with serving(*commands(command, url, tmp_path), command=command) as server:
        target = server.url + "/v1/completions"
        headers = {"authorization": "Bearer two", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert httpx.post(target, json=ASK, timeout=30).status_code == 401
        answer = httpx.post(target, json=ASK, headers=headers, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["traceparent"].split("-")[1] == TRACE
        metrics = server.get("/metrics")
        assert cached(target, "one") == 0
        assert cached(target, "one") > 0
        assert cached(target, "two") == 0
        assert cached(target, "two", cache_salt="its own") == 0
        assert cached(target, "one", cache_salt="its own") == 0
        assert 'vllm:generation_tokens_total{model_name="demo"} 5.0' in metrics
        assert 'penstock:generation_tokens_total{model_name="demo"} 5.0' in metrics
        assert 'penstock:goodput_requests_total{class="online",model_name="demo"} 1.0' in metrics
        assert 'penstock:slo_attainment_ratio{class="online",model_name="demo"} 1.0' in metrics
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines]
    line, *_ = [line for line in lines if line["logger"] == "penstock.request"]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["completion_tokens"], line["slo_met"], line["status"]) == (5, True, 200)
    assert line["ttft"] > 0 < line["tpot"]
    assert line["instance"].startswith("engine-0")
    assert not any("secret-word" in line for line in server.lines)
    spans = [s for _, message in got for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert {s.name for s in spans if s.trace_id.hex() == TRACE} == {
        *("POST /v1/completions", "text_completion demo", "queue", "prefill", "decode"),
    }


@pytest.mark.slow
def test_the_real_server_answers_as_it_documents():
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    with serving("demo", *QUICK, "--max-model-len", "64") as server:
        document = schemathesis.openapi.from_url(server.url + "/openapi.json")
        for result in document.get_all_operations():
            operation = result.ok()

            @given(case=operation.as_strategy())
            @settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
            def hold(case):
                case.call_and_validate(checks=CHECKS, timeout=60)

            hold()
        assert httpx.get(server.url + "/ready").status_code == 200
        assert not any("Traceback" in line for line in server.lines)
