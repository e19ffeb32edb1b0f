"""A vLLM server as an instance: the shapes of its API, what is believed of it, and the engine's messages in front of
one that fails as it is told to."""

import asyncio
import dataclasses
import json
import tempfile
from contextlib import asynccontextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.request import FinishReason, MediaSpan, Request
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import (
    AskCache,
    CacheDelta,
    Cancel,
    Drain,
    Enqueue,
    Failed,
    Inspect,
    Inspection,
    Leg,
    Migrate,
    Peer,
    Ready,
    Refused,
    SetRole,
    Shutdown,
    Snapshot,
    Stayed,
    StepReport,
    Stopped,
)
from penstock.kv.keys import extend_keys
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service.adopted import http, server
from penstock.service.adopted.beliefs import BelievedCache, Pace, Trial, device_of
from penstock.service.adopted.http import Silent, VllmServer
from penstock.service.adopted.server import AdoptedServer
from penstock.service.adopted.start import AdoptedOptions, adopt, until_there
from penstock.service.adopted.vllm import Dropped, body_of, read_chunk, read_metrics, refusal
from penstock.service.channel import engine_channel
from penstock.service.checkpoint import DEMO
from tests.helpers.vllm import METRICS, FakeVllm, next_token
from tests.helpers.waiting import until


def ask(request_id="r", prompt=(5, 6, 7), max_tokens=4, seed=1, generated=(), stop_ids=(), more=None, **params):
    params = SamplingParams(max_tokens=max_tokens, **params)
    return Request(
        id=request_id,
        prompt=list(prompt),
        params=params,
        seed=seed,
        stop_ids=frozenset(stop_ids),
        max_tokens=max_tokens,
        generated=tuple(generated),
        **(more or {}),
    )


# --- shapes


def test_a_request_in_vllms_words():
    request = ask(stop_ids=(2, 1), temperature=0.7, top_k=5, logprobs=3, bad_words=("no",), min_tokens=3, seed=9)
    request = dataclasses.replace(request, priority=-2, cache_salt="s")
    body = body_of(request, "m", priorities=True)
    assert body.items() >= {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "min_tokens": 3, "seed": 9}.items()
    assert body.items() >= {"stop_token_ids": [1, 2], "ignore_eos": True, "return_token_ids": True}.items()
    assert body.items() >= {"top_k": 5, "logprobs": 3, "bad_words": ["no"], "priority": -2, "cache_salt": "s"}.items()
    assert "priority" not in body_of(request, "m", priorities=False)
    assert "seed" not in body_of(ask(temperature=0.0), "m", priorities=True)
    assert json.loads(json.dumps(body)) == body


def test_what_goes_on_elsewhere_is_prompt_there_and_drawn_from_another_seed():
    body = body_of(ask(max_tokens=10, min_tokens=3, seed=2**63 - 1, generated=(8, 9)), "m", priorities=True)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([5, 6, 7, 8, 9], 8, 1)
    assert body["seed"] == -(2**63) + 1


@pytest.mark.parametrize(
    "form", [{"json": {"type": "object"}}, {"regex": "a+"}, {"choice": ["a"]}, {"json_object": True}]
)
def test_structured_outputs_are_passed_on(form):
    sent = body_of(ask(structured_outputs=form), "m", priorities=True)["structured_outputs"]
    ((kind, value),) = form.items()
    got = sent[kind] if kind != "json" else json.loads(sent[kind])
    assert (list(got) if kind == "choice" else got) == value


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ask(use_beam_search=True, temperature=0.0), "use_beam_search"),
        (ask(prompt_logprobs=1), "prompt_logprobs"),
        (ask(more={"pooling": "last"}), "embeddings"),
        (ask(more={"media": (MediaSpan(0, 1, b"d"),)}), "media"),
        (ask(structured_outputs={"regex": "a+"}, generated=(3,)), "structured_outputs"),
        (ask(more={"cache_salt": "s" * 2000}), "cache_salt"),
    ],
)
def test_what_it_cannot_do_is_named(request_, says):
    assert says in refusal(request_)
    assert not refusal(ask(structured_outputs={"regex": "a+"}, logprobs=2))


# as vLLM 0.32 sent it
CHUNK = (
    b'{"id":"cmpl-9f44","object":"text_completion","created":1795578992,"model":"m","choices":[{"index":0,"text":"E",'
    b'"logprobs":{"text_offset":[12,25],"token_logprobs":[-9.0101,-9.05],"tokens":["token_id:1030","token_id:7959"],'
    b'"top_logprobs":[{"token_id:1030":-9.0101,"token_id:6618":-7.85,"token_id:3719":-7.94},{"token_id:7959":-9.05,'
    b'"token_id:6814":-7.78,"token_id:6618":-7.83}]},"finish_reason":"length","stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":[1030,7959]}]}'
)
USAGE = b'{"id":"c","choices":[],"usage":{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":3}}}'


def test_what_a_chunk_says():
    piece = read_chunk(CHUNK, 2)
    assert (piece.tokens, piece.finish) == ([1030, 7959], FinishReason.LENGTH)
    first, second = piece.logprobs
    assert (first.chosen, first.rank, first.top) == (-9.0101, 3, [(6618, -7.85), (3719, -7.94)])
    assert [token for token, _ in second.top] == [6814, 6618]
    assert read_chunk(CHUNK, None).logprobs is None
    assert read_chunk(USAGE, None).cached_tokens == 3


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (b"{", "no chunk"),
        (b'{"error": {"message": "EngineCore died"}}', "EngineCore died"),
        (b'{"choices": [{"text": "a"}]}', "no token_ids"),
        (b'{"choices": [{"token_ids": [1], "finish_reason": "abort"}]}', "'abort'"),
        (b'{"choices": [{"token_ids": [1], "logprobs": null}]}', "lacks the log-probabilities"),
    ],
)
def test_what_is_no_answer_drops_the_request(chunk, says):
    with pytest.raises(Dropped, match=says):
        read_chunk(chunk, 1)


def test_what_its_metrics_say():
    load = read_metrics(METRICS.format(running=3, waiting=2, blocks=4096))
    assert (load.running, load.waiting, load.used, load.num_blocks, load.caches) == (3, 2, 0.25, 1024, True)
    assert (load.preemptions, load.prefix_queries, load.prefix_hits, load.tokens) == (2, 1500, 384, 42)
    older = read_metrics('vllm:num_requests_running{m="m"} 1.0\nvllm:gpu_cache_usage_perc{m="m"} 0.5\n')
    assert (older.used, older.num_blocks) == (0.5, None)
    two = METRICS.format(running=3, waiting=2, blocks=64).replace('engine="0"', 'engine="1"')
    assert read_metrics(two + METRICS.format(running=1, waiting=0, blocks=64)).num_blocks == 32
    with pytest.raises(Dropped, match="num_requests_running"):
        read_metrics("up 1\n")


# --- what is believed


@given(st.lists(st.one_of(st.lists(st.integers(0, 9), unique=True, max_size=5), st.none())), st.integers(0, 6))
def test_the_believed_cache_is_an_lru_and_its_changes_add_up(uses, room):
    cache, told = BelievedCache(room), set()
    newest: list[bytes] = []  # the oldest first
    for use in uses:
        if use is None:
            if (changes := cache.take()) is not None:
                told = (told | set(changes[0])) - set(changes[1])
            assert told == set(newest)
            continue
        keys = [bytes([number]) for number in use]
        cache.use(keys)
        cache.check()
        newest = [key for key in newest if key not in keys] + keys[::-1]
        newest = newest[len(newest) - room :] if len(newest) > room else newest
        held = [key for key in keys if key in newest]
        assert cache.count(keys) == len(held), "of a sequence the last blocks go first"
    assert set(cache.keys()) == set(newest)
    assert cache.take() is None


def test_a_device_is_what_answers_say_of_it():
    shape, true = GEOMETRIES["qwen3-8b"], StepTime(DEVICES["h200"], GEOMETRIES["qwen3-8b"])

    def trial(tokens):
        return Trial(tokens, true.step_ms([(tokens, 0)]) / 1e3, true.step_ms(decodes=1, kv_tokens=tokens) / 1e3)

    seen = StepTime(device_of(shape, trial(1024), trial(2048)), shape)
    assert seen.step_ms([(1500, 0)]) == pytest.approx(true.step_ms([(1500, 0)]), rel=0.1)
    assert seen.step_ms(decodes=1, kv_tokens=500) == pytest.approx(true.step_ms(decodes=1, kv_tokens=500), rel=0.1)
    noisy = device_of(shape, Trial(32, 0.5, 0.01), Trial(512, 0.4, 0.01))
    assert noisy.peak_flops > 0


def test_its_pace_is_learned_from_one_of_the_sequences_while_the_same_ones_decode():
    pace = Pace(DEVICES["h200"], GEOMETRIES["qwen3-8b"])
    now = 0.0
    for number in range(400):  # 20 ms a token, which come two at a time, those of "b" as well
        now += 0.04
        for who in ("a", "b"):
            pace.stepped(now, who, 3, 2, 8, 4000)
        if number % 50 == 0:
            pace.prefilled(0.2, 1000, 0, 0, 0)
    assert pace.interval == pytest.approx(0.02)
    learned = StepTime(DEVICES["h200"], GEOMETRIES["qwen3-8b"], pace.factors)
    assert learned.step_ms(decodes=8, kv_tokens=4000) == pytest.approx(20, rel=0.1)
    pace.stepped(now + 9.0, "a", 4, 1, 9, 4000)  # others joined meanwhile
    assert pace.interval == pytest.approx(0.02)
    assert Pace(None, None).factors == {}


# --- from a URL to an instance


@asynccontextmanager
async def started(**changes):
    fake = FakeVllm()
    for name, value in changes.items():
        setattr(fake, name, value)
    await fake.begin()
    client = VllmServer(fake.url)
    try:
        yield fake, client
    finally:
        await client.close()
        await fake.end()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def adopted(fake, client, **options):
    options = AdoptedOptions(model=str(DEMO), url=fake.url, **options)
    return await adopt(client, options, "v", 7, SystemClock())


def test_what_a_server_says_of_itself_is_what_an_engine_says_when_it_is_ready():
    async def scenario():
        async with started() as (fake, client):
            await until_there(client)
            found = await adopted(fake, client, max_num_seqs=9, max_num_batched_tokens=333)
            ready = found.ready
            assert (found.model, found.priorities) == ("m", True)
            assert (ready.peer, ready.max_model_len, ready.num_blocks) == (Peer("v", 7, ""), 2048, 64)
            assert (ready.max_sequences, ready.token_budget, ready.embedding_size) == (9, 333, 0)
            assert StepTime(ready.device_model, ready.shape).step_ms(decodes=1) > 0
            sizes = [len(body["prompt"]) for body in fake.bodies]
            assert (sizes[0], set(sizes)) == (32, {32, 512})
            assert len({tuple(body["prompt"]) for body in fake.bodies}) == len(sizes), "no cache has them"
            assert (await adopted(fake, client, kv_blocks=5)).ready.num_blocks == 5
        async with started(priorities=False) as (fake, client):
            assert not (await adopted(fake, client)).priorities

    run(scenario)


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"old": True}, {}, "older than vLLM 0.10.2"),
        ({"refuses": "no"}, {}, "does not complete a prompt of token ids: no"),
        ({}, {"served_model_name": "x"}, "served-model-name: 'x', .* serves m"),
        ({"_blocks": "None"}, {}, "kv-blocks: missing"),
        ({"tokenizer": type("Other", (), {"encode": lambda *_: [1, 2]})()}, {}, "another tokenizer"),
    ],
)
def test_a_server_that_will_not_do_is_told_why(changes, options, says):
    async def scenario():
        async with started(**changes) as (fake, client):
            with pytest.raises(ConfigError, match=says):
                await adopted(fake, client, **options)

    run(scenario)


def test_a_server_that_is_not_there_is_waited_for(monkeypatch):
    monkeypatch.setattr("penstock.service.adopted.start.AGAIN", 0.01)

    async def scenario():
        async with started() as (fake, client):
            await fake.end()
            waiting = asyncio.create_task(until_there(client))
            await asyncio.wait((waiting,), timeout=0.05)
            assert not waiting.done()
            await fake.begin(fake.port)
            await waiting

    run(scenario)


# --- as an instance


class Side:
    """A frontend or a master in front of it."""

    def __init__(self, context, address, name, kind):
        self.events = []
        self.channel = engine_channel(context, address, name, kind, SystemClock())
        self.channel.open(self.events.append)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def outputs(self, request_id="r"):
        return [o for report in self.of(StepReport) for o in report.outputs if o.request_id == request_id]

    def tokens(self, request_id="r"):
        return [token for output in self.outputs(request_id) for token in output.tokens]

    def finish(self, request_id="r"):
        outputs = self.outputs(request_id)
        return outputs[-1].finish if outputs else None


class Instance:
    """
    Attributes:
        running: what serves.
    """

    def __init__(self, fake, found, client, folder):
        self.fake, self.found, self.peer = fake, found, found.ready.peer
        self.context, address = zmq.Context(), f"ipc://{folder}/e"
        self.server = AdoptedServer(
            address, found.ready, client, found.model, found.load, SystemClock(), priorities=found.priorities
        )
        self.running = asyncio.create_task(self.server.run())
        self.frontend = Side(self.context, address, "f", "frontend")
        self.master = Side(self.context, address, "master", "master")

    def enqueue(self, request, generation=0, to=7, route=()):
        self.frontend.channel.send(Enqueue(to, request, generation, list(route)))

    async def close(self):
        self.server.stop()
        await asyncio.gather(self.running, return_exceptions=True)
        self.server.check()
        for side in (self.frontend, self.master):
            side.channel.close()
        self.server.close()
        self.context.term()


def serve(scenario, **changes):
    async def go():
        with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as folder:
            async with started(**changes) as (fake, client):
                found = await adopted(fake, client)
                fake.bodies.clear()
                instance = Instance(fake, found, client, folder)
                try:
                    await until(lambda: instance.frontend.of(Ready) and instance.master.of(Snapshot))
                    await scenario(instance, fake)
                finally:
                    await instance.close()

    run(go)


def expected(prompt, count, vocab=4096):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


def test_tokens_come_in_order_with_logprobs_and_end_as_vllm_says():
    async def scenario(instance, fake):
        frontend = instance.frontend
        instance.enqueue(ask(logprobs=2), generation=3)
        await until(lambda: frontend.finish() is not None)
        outputs = frontend.outputs()
        assert frontend.tokens() == expected([5, 6, 7], 4)
        assert [output.start for output in outputs] == [0, 1, 2, 3]
        assert {output.generation for output in outputs} == {3}
        assert all(len(output.logprobs[0].top) == 2 for output in outputs)
        assert (outputs[-1].finish, outputs[-1].stop_token, outputs[-1].cached_tokens) == (
            FinishReason.LENGTH,
            None,
            16,
        )
        assert outputs[-1].timing.prefill > 0
        stop = expected([5, 6, 7], 3)[2]
        instance.enqueue(ask("s", stop_ids=(stop,), max_tokens=9))
        await until(lambda: frontend.finish("s") is not None)
        assert (frontend.finish("s"), frontend.outputs("s")[-1].stop_token) == (FinishReason.STOP, stop)
        assert len(frontend.tokens("s")) == 3
        instance.enqueue(ask("g", prompt=[5, 6], generated=[7], max_tokens=5))
        await until(lambda: frontend.finish("g") is not None)
        assert (frontend.tokens("g"), frontend.outputs("g")[0].start) == (expected([5, 6, 7], 4), 1)

    serve(scenario)


def test_who_cancels_or_leaves_has_the_server_abort_it():
    async def scenario(instance, fake):
        fake.pause = 0.001
        for name in ("a", "b", "c"):
            instance.enqueue(ask(name, max_tokens=2000))
        await until(lambda: all(instance.frontend.outputs(name) for name in "abc"))
        instance.frontend.channel.send(Cancel(7, ["a"], 0))
        await until(lambda: len(fake.aborted) == 1)
        instance.enqueue(ask("b", max_tokens=2), generation=1)  # another attempt
        await until(lambda: len(fake.aborted) == 2 and instance.frontend.finish("b"))
        assert instance.frontend.outputs("b")[-1].generation == 1
        instance.server._clients["f"].heard -= 10.0
        await until(lambda: len(fake.aborted) == 3)
        assert not instance.server._runs

    serve(scenario)


def test_what_is_refused():
    async def scenario(instance, fake):
        frontend = instance.frontend
        instance.enqueue(ask("beams", use_beam_search=True, temperature=0.0))
        instance.enqueue(ask("stale"), to=6)
        fake.refuses = "Requested sample logprobs of 50"
        instance.enqueue(ask("invalid"))
        await until(lambda: len(frontend.of(Refused)) == 3)
        frontend.channel.send(Drain(7))
        instance.enqueue(ask("late"))
        await until(lambda: len(frontend.of(Refused)) == 4)
        said = {refused.request_id: (refused.why, refused.message) for refused in frontend.of(Refused)}
        assert said["stale"][0] == "stale"
        assert said["invalid"] == ("invalid", "Requested sample logprobs of 50")
        assert said["late"][0] == "draining"
        assert said["beams"][1].startswith("use_beam_search")
        await until(lambda: instance.master.of(Snapshot)[-1].draining)

    serve(scenario)


@pytest.mark.parametrize("how", ["cut", "error"])
def test_what_breaks_off_is_dropped_to_go_on_elsewhere(how):
    async def scenario(instance, fake):
        fake.breaks = 2, how
        instance.enqueue(ask())
        await until(lambda: instance.frontend.finish() is not None)
        assert (instance.frontend.finish(), len(instance.frontend.tokens())) == (FinishReason.ABORT, 2)
        fake.breaks = None
        instance.enqueue(ask("next"))
        await until(lambda: instance.frontend.finish("next") is not None)
        assert not instance.running.done(), "one request fails, the server serves"

    serve(scenario)


def test_the_master_sees_its_load_and_what_it_should_have_cached():
    async def scenario(instance, fake):
        master, prompt = instance.master, list(range(5, 205))
        fake.others = 3
        fake.gate.clear()
        instance.enqueue(ask("waits", prompt=prompt, max_tokens=1))
        await until(lambda: master.of(Snapshot)[-1].waiting == 1 and master.of(Snapshot)[-1].running == 3)
        seen = master.of(Snapshot)[-1]
        assert (seen.waiting_tokens, seen.num_blocks, seen.free_blocks) == (200, 64, 48)
        fake.gate.set()
        keys: list[bytes] = []
        extend_keys(keys, instance.found.ready.root_key, prompt, 3)
        await until(
            lambda: ([key for delta in master.of(CacheDelta) for key in delta.added] and not fake.others) or fake
        )
        await until(lambda: {key for delta in master.of(CacheDelta) for key in delta.added} == set(keys))
        await until(lambda: master.of(Snapshot)[-1].waiting == 0 and master.of(Snapshot)[-1].ttft_ms)
        fake.gate.clear()
        instance.enqueue(ask("again", prompt=[*prompt[:192], *range(900, 950)], max_tokens=1))
        await until(lambda: master.of(Snapshot)[-1].waiting_tokens == 50)
        fake.gate.set()
        master.channel.send(AskCache(7))
        await until(lambda: master.of(CacheDelta)[-1].whole and len(master.of(CacheDelta)) > 2)
        assert set(keys) <= set(master.of(CacheDelta)[-1].added)
        master.channel.send(SetRole(7, "decode", 1))
        await until(lambda: master.of(Snapshot)[-1].role == "decode")
        master.channel.send(Inspect())
        await until(lambda: master.of(Inspection))
        assert not master.of(Inspection)[0].broken
        await until(lambda: instance.frontend.of(StepReport)[-1].stats.prefix_hits == 384)

    serve(scenario)


def test_it_takes_no_part_in_handoffs():
    async def scenario(instance, fake):
        fake.gate.clear()
        elsewhere = Peer("d", 1, "unix:/d")
        instance.enqueue(ask(), route=[Leg("decode", elsewhere)])
        await until(lambda: instance.frontend.of(Stayed))
        instance.frontend.channel.send(Migrate(7, "r", 0, elsewhere))
        await until(lambda: len(instance.frontend.of(Stayed)) == 2)
        fake.gate.set()
        await until(lambda: instance.frontend.finish() is FinishReason.LENGTH)
        instance.frontend.channel.send(Shutdown())
        await until(instance.running.done)
        await until(lambda: instance.frontend.of(Stopped))

    serve(scenario)


def test_a_pause_of_its_own_is_no_silence_of_the_server():
    async def scenario(instance, fake):
        asked, load = [], instance.server._server.load

        async def silent_twice():
            asked.append(1)
            if len(asked) < 3:
                raise Silent("nothing for 5 s, of which this process ran none")
            return await load()

        instance.server._server.load = silent_twice
        await until(lambda: len(asked) > 3)
        assert not instance.running.done()

    serve(scenario)


@pytest.mark.parametrize("how", ["dies", "is silent", "computes nothing"])
def test_a_server_that_is_lost_ends_the_instance(how, monkeypatch):
    monkeypatch.setattr(http, "ANSWERS_WITHIN", 0.05)
    monkeypatch.setattr(server, "STUCK", 0.05)

    async def scenario(instance, fake):
        fake.breaks = 1, "hang"
        instance.enqueue(ask())
        await until(instance.frontend.outputs)
        if how == "dies":
            await fake.end()
        fake.silent = how == "is silent"
        await until(lambda: instance.frontend.of(Failed))
        with pytest.raises(Unavailable):
            await instance.running

    serve(scenario)
