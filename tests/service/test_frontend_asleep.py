"""The routes of sleep mode, over a frontend whose engines say what a test tells them to say."""

import asyncio

import httpx
import msgspec
import pytest

from penstock.api.app import create_app
from penstock.core.wire.engine import Sleep, Slept, StepReport, WakeUp
from penstock.obs.exposition import Exposition
from penstock.service.checkpoint import DEMO
from penstock.service.frontend import Models
from penstock.service.instances import ChannelLost
from penstock.text.tokenizer import Tokenizer
from tests.helpers.frontends import run
from tests.helpers.scripted import STATS
from tests.helpers.waiting import until

ASK = {"prompt": [5, 6], "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)


def client_of(frontend, *, sleep_mode=True):
    app = create_app(Models([frontend]), Exposition([frontend.metrics]), sleep_mode=sleep_mode)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def orders(channel):
    return [command for command in channel.sent if isinstance(command, Sleep | WakeUp)]


async def ordered(channel, count):
    await until(lambda: len(orders(channel)) == count)
    return orders(channel)[-1]


def says_level(channel, level):
    channel.say(StepReport(channel.life, [], msgspec.structs.replace(STATS, asleep=level), 0))


async def state(client):
    paths = ("/health", "/ready", "/is_sleeping", "/v1/models")
    health, ready, sleeping, models = [await client.get(path) for path in paths]
    states = {i["name"]: i["state"] for i in health.json()["instances"]}
    return health.status_code, ready.status_code, sleeping.json()["is_sleeping"], models.status_code, states


def test_all_engines_sleep_and_wake_up(tokenizer):
    async def scenario(frontend, channels, clock):
        a, b = channels["a"], channels["b"]
        async with client_of(frontend) as client:
            assert await state(client) == (200, 200, False, 200, {"a": "ready", "b": "ready"})
            sleeping = asyncio.create_task(client.post("/sleep?level=2"))
            assert await ordered(a, 1) == await ordered(b, 1) == Sleep(1, 1, 2)
            says_level(a, 2)
            a.say(Slept(1, 1, 2))
            await until(lambda: a.silent)
            assert await state(client) == (200, 200, False, 200, {"a": "sleeping", "b": "ready"})
            assert not sleeping.done()
            says_level(b, 2)
            await until(lambda: b.silent)
            assert await state(client) == (200, 503, True, 200, {"a": "sleeping", "b": "sleeping"})
            assert not sleeping.done(), "it still finishes what runs"
            for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
                refused = await client.post(path, json=body)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
                assert refused.json()["error"]["message"] == "sleeping: POST /wake_up has it serve again"
            shown = Exposition([frontend.metrics]).render()[0].decode()
            assert 'engine_sleep_state{engine="a",model_name="m",sleep_state="discard_all"} 1.0' in shown
            assert 'engine_sleep_state{engine="a",model_name="m",sleep_state="awake"} 0.0' in shown
            b.say(Slept(1, 1, 2))
            assert (await sleeping).status_code == 200
            waking = asyncio.create_task(client.post("/wake_up?tags=weights"))
            assert (await ordered(a, 2)).parts == ["weights"]
            a.say(Slept(1, 2, 2)), b.say(Slept(1, 2, 2))
            assert (await waking).status_code == 200
            assert (await state(client))[2]
            waking = asyncio.create_task(client.post("/wake_up"))
            assert (await ordered(a, 3)).parts == ["weights", "kv_cache"]
            a.say(Slept(1, 3, 0)), b.say(Slept(1, 3, 0))
            assert (await waking).status_code == 200
            assert await state(client) == (200, 200, False, 200, {"a": "ready", "b": "ready"})

    run(tokenizer, scenario, "a", "b")


def test_what_an_engine_cannot_do_is_said_and_lost_engines_are_no_obstacle(tokenizer):
    async def scenario(frontend, channels, clock):
        a, b = channels["a"], channels["b"]
        async with client_of(frontend) as client:
            sleeping = asyncio.create_task(client.post("/sleep"))
            assert await ordered(a, 1) == Sleep(1, 1, 1)
            a.say(Slept(1, 1, 0, "it was woken up"))
            b.say(ChannelLost("killed"))
            answer = await sleeping
            assert (answer.status_code, answer.json()["error"]["message"]) == (409, "a: it was woken up")
            sleeping = asyncio.create_task(client.post("/sleep"))
            await ordered(a, 2)
            a.say(Slept(1, 2, 1))
            assert (await sleeping).status_code == 200
            waking = asyncio.create_task(client.post("/wake_up"))
            await ordered(a, 3)
            a.say(ChannelLost("killed"))
            answer = await waking
            assert answer.status_code == 503
            assert "a: killed" in answer.json()["error"]["message"]
            assert (await client.post("/sleep")).status_code == 503

    run(tokenizer, scenario, "a", "b")


def test_wrong_values_are_named_and_without_the_flag_there_are_no_routes(tokenizer):
    async def scenario(frontend, channel, clock):
        async with client_of(frontend) as client:
            for path, field in (
                ("/sleep?level=3", "level"),
                ("/sleep?mode=abort", "mode"),
                ("/wake_up?tags=x", "tags"),
            ):
                answer = await client.post(path)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert "/sleep" in (await client.get("/openapi.json")).json()["paths"]
        async with client_of(frontend, sleep_mode=False) as client:
            for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
                assert (await client.request(method, path)).status_code == 404
        assert not orders(channel)

    run(tokenizer, scenario)
