"""The client, and a whole measurement, against a server."""

import asyncio
import sys

import pytest

from penstock.bench.client import Call, Client
from penstock.bench.serve import Bench, LoadShape, RequestOptions
from penstock.bench.server import find_model, find_token_ids, parse_metrics
from penstock.core.errors import ConfigError, Unavailable
from penstock.workload.lengths import Fixed, Independent
from penstock.workload.requests import WorkRequest
from penstock.workload.synthetic import synthesise

BODY = b'{"prompt": [1, 2, 3], "max_tokens": 6, "stream": true, "stream_options": {"include_usage": true}'


def with_client(server, use, **settings):
    async def main():
        async with Client(server.url, **settings) as client:
            return await use(client)

    return asyncio.run(main())


def send(server, ids=True, **settings):
    """The record of one request for six tokens."""
    body = BODY + (b', "return_token_ids": true}' if ids else b"}")

    async def use(client):
        return await client.send(Call(0, 0.0, body, 3, 6), client.clock.now())

    return with_client(server, use, **settings)


def connect(server, use, **settings):
    async def connected(client):
        return await use(await Bench.connect(client, RequestOptions()))

    return with_client(server, connected, **settings)


def workload(count=6, rate=float("inf"), prompt=20, output=5, **more):
    import numpy as np

    lengths = Independent(Fixed(prompt), Fixed(output))
    return synthesise(count, lengths, np.random.default_rng(0), rate=rate, **more)


def measure(server, requests, shape, limits=None, **settings):
    return connect(server, lambda bench: bench.measure(requests, shape, limits), **settings)


CLOSED = LoadShape(scheduled=False, concurrency=2)


def test_one_request(server):
    server.first_delay, server.token_delay, server.cached = 0.02, 0.005, 2
    record = send(server)
    assert record.error is None
    assert [tokens for _, tokens in record.events] == [1] * 6
    assert (record.prompt_tokens, record.cached_tokens, record.finish_reason) == (3, 2, "length")
    assert record.ttft >= 0.02
    assert record.tpot == pytest.approx((record.events[-1][0] - record.events[0][0]) / 5)
    assert record.e2e >= 0.04


@pytest.mark.parametrize("ids", [True, False])
def test_coalesced_tokens_are_all_counted(server, ids):
    server.tokens_per_event, server.token_delay = 3, 0.01
    record = send(server, ids=ids)
    assert [tokens for _, tokens in record.events] == [3, 3]
    (first, _), (last, _) = record.events
    assert record.tpot == pytest.approx((last - first) / 3)  # the three that followed, not five


@pytest.mark.parametrize(
    ("setting", "kind", "detail"),
    [
        ({"status": 429}, "http 429", "told to fail"),
        ({"fail_every": 1}, "http 500", "told to fail"),
        ({"error_after": 2}, "error event", "told to fail"),
        ({"hangs": True}, "timeout", "not complete after 0.2 s"),
        ({"gives_ids": False, "gives_usage": False}, "uncounted", "neither token ids nor usage"),
    ],
)
def test_failures_have_a_kind(server, setting, kind, detail):
    for name, value in setting.items():
        setattr(server, name, value)
    record = send(server, timeout=0.2)
    assert record.error == kind
    assert detail in record.detail
    assert record.end > record.sent


def test_a_broken_connection_is_a_failure(server):
    server.break_after = 2
    assert send(server).error in ("connection", "incomplete")


def test_nobody_there_is_a_failure(server):
    server.stop()
    assert send(server).error == "connection"


def test_api_key_is_sent(server):
    send(server, api_key="secret")
    assert server.headers["Authorization"] == "Bearer secret"


def test_without_aiohttp_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[bench\]'"):
        Client("http://127.0.0.1:1")


def test_models(server):
    server.models = [{"id": "a", "max_model_len": 10}, {"id": "b"}]
    assert with_client(server, lambda c: find_model(c, None)).max_model_len == 10
    assert with_client(server, lambda c: find_model(c, "b")).max_model_len is None
    with pytest.raises(ConfigError, match=r"--model: c, served at .*: a, b"):
        with_client(server, lambda c: find_model(c, "c"))
    server.models = []
    with pytest.raises(ConfigError, match="none"):
        with_client(server, lambda c: find_model(c, None))


def test_token_ids_come_from_the_servers_vocabulary(server):
    ids = with_client(server, lambda c: find_token_ids(c, "fake", None))
    assert len(ids) > 300
    assert ids.min() > 100
    assert with_client(server, lambda c: find_token_ids(c, "fake", 7)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    server.tokenizes = False
    with pytest.raises(ConfigError, match="--vocab-size: not given"):
        with_client(server, lambda c: find_token_ids(c, "fake", None))


def test_a_run(server):
    run = measure(server, workload(count=6, prompt=20, output=5), CLOSED, {"ttft": 10_000.0})
    summary = run.summary
    assert (summary.completed, summary.failed, summary.short_answers) == (6, 0, 0)
    assert (summary.prompt_tokens, summary.output_tokens) == (120, 30)
    assert summary.ttft_ms.count == summary.tpot_ms.count == 6
    assert summary.goodput.attainment == 1.0
    assert server.peak <= 2  # that it is reached is test_load.py's to show, where nothing ends before its turn
    trial, *bodies = server.bodies
    assert trial["max_tokens"] == 4
    for body in bodies:
        assert len(body["prompt"]) == 20
        assert body.items() >= {"model": "fake", "max_tokens": 5, "stream": True, "ignore_eos": True}.items()
        assert body["temperature"] == 0.0
    assert len({tuple(body["prompt"]) for body in bodies}) == 6


def test_warm_up_is_not_counted_and_shares_no_tokens(server):
    shape = LoadShape(scheduled=False, concurrency=2, warmups=4)
    run = measure(server, workload(count=3, prompt=30, prefixes=1, prefix_tokens=20), shape)
    assert run.summary.requests == 3
    prompts = [body["prompt"] for body in server.bodies[1:]]
    warm, measured = prompts[:4], prompts[4:]
    assert [len(prompt) for prompt in warm] == [50] * 4
    assert len({tuple(prompt[:20]) for prompt in measured}) == 1
    assert not {tuple(prompt[:20]) for prompt in warm} & {tuple(prompt[:20]) for prompt in measured}
    assert run.reusable_tokens == 40
    # the server's counts leave the warm-up out too
    assert {row.metric: row.server for row in run.server.rows}["request_success_total"] == 3


def test_failed_warm_ups_are_told(server):
    server.fail_every = 2  # of trial, warm-up 1, warm-up 2, request: the second and the fourth
    run = measure(server, workload(count=1), LoadShape(scheduled=False, concurrency=1, warmups=2))
    assert run.failed_warmups == 1
    assert run.summary.failures == {"http 500": 1}


def test_open_loop_run_follows_its_schedule(server):
    requests = workload(count=5, rate=100.0, cv=0.0)
    run = measure(server, requests, LoadShape(scheduled=True, concurrency=None))
    starts = [record.start - run.records[0].start for record in run.records]
    assert starts == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])
    assert run.summary.offered_per_s == pytest.approx(100.0)
    assert run.summary.lag_ms.count == 5


def test_requests_are_cut_to_the_model(server):
    server.models = [{"id": "small", "max_model_len": 16}]
    run = measure(server, workload(count=2, prompt=20, output=5), CLOSED)
    assert run.cut == 2
    assert {(len(body["prompt"]), body["max_tokens"]) for body in server.bodies[1:]} == {(13, 3)}
    assert run.summary.short_answers == 0


def test_short_answers_are_told(server):
    server.stop_early = 3
    assert measure(server, workload(count=2, output=5), CLOSED).summary.short_answers == 2


def test_chat_sends_words(server):
    run = measure(server, workload(count=2, prompt=20), CLOSED, endpoint="chat")
    assert run.summary.completed == 2
    message = server.bodies[-1]["messages"][0]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 20


def test_a_server_that_refuses_token_ids_is_measured_by_its_usage(server):
    server.refuses_ids, server.tokens_per_event = True, 2

    async def use(bench):
        return bench.counts_tokens, await bench.measure(workload(count=2, output=4), CLOSED)

    counts, run = connect(server, use)
    assert not counts
    assert "return_token_ids" not in server.bodies[-1]
    assert run.summary.output_tokens == 8
    assert run.summary.tokens_per_event == 2


def test_a_failing_trial_is_one_clear_error(server):
    server.status = 401
    with pytest.raises(ConfigError, match="a trial request failed, http 401: told to fail"):
        measure(server, workload(), CLOSED)
    server.status = 503
    with pytest.raises(Unavailable, match="a trial request failed, http 503"):
        measure(server, workload(), CLOSED)
    server.status, server.gives_ids, server.gives_usage = 200, False, False
    with pytest.raises(ConfigError, match="a trial request failed, uncounted"):
        measure(server, workload(), CLOSED)


def test_the_servers_view_stands_beside_the_clients(server):
    server.miscount, server.token_delay = 1, 0.002
    run = measure(server, workload(count=4, prompt=20, output=5), CLOSED)
    rows = {row.metric: row for row in run.server.rows}
    assert rows["request_success_total"].server == rows["request_success_total"].client == 4
    assert (rows["prompt_tokens_total"].server, rows["prompt_tokens_total"].difference) == (80, 0)
    assert (rows["generation_tokens_total"].server, rows["generation_tokens_total"].difference) == (16, 4)
    ttft = rows["time_to_first_token_seconds"]
    assert 0 <= ttft.server <= ttft.client
    assert rows["request_time_per_output_token_seconds"].server > 1.0


def test_a_server_without_metrics_is_still_measured(server):
    server.tells_metrics = False
    run = measure(server, workload(count=1), CLOSED)
    assert run.summary.completed == 1
    assert "/metrics answered 404" in run.server.missing


def test_metrics_are_summed_over_labels_under_either_prefix():
    text = """# TYPE {0}prompt_tokens_total counter
{0}prompt_tokens_total{{model="a"}} 3
{0}prompt_tokens_total{{model="b"}} 4
{0}other_total 9
"""
    assert parse_metrics(text.format("penstock:")) == {"prompt_tokens_total": 7}
    assert parse_metrics(text.format("vllm:")) == {"prompt_tokens_total": 7}
    assert parse_metrics(text.format("else:")) is None
    assert parse_metrics("{not metrics") is None


def test_a_number_is_a_requests_own(server):
    async def use(bench):
        one = WorkRequest(number=5, at=0.0, prompt_tokens=50, output_tokens=1)
        return [bench.call(one, seed=seed).body for seed in (1, 1, 2)]

    first, again, other = connect(server, use)
    assert first == again != other
