"""The wire itself: greetings, order, and that a loss is noticed at once."""

import asyncio
import resource
import tempfile
import time
from contextlib import contextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from penstock.cli.http import allow_connections
from penstock.core.clock import SystemClock
from penstock.core.wire import codec
from penstock.core.wire.engine import Cancel, Failed, Hello, decode_command
from penstock.service.channel import GREETING_INTERVAL, Inbox, engine_channel, make_context
from penstock.service.instances import ChannelLost
from tests.helpers.scripted import ready
from tests.helpers.waiting import until


class Engine:
    """The other end, in the same event loop."""

    def __init__(self, address):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.client = b""

    async def hear(self):
        self.client, data = await self.socket.recv_multipart()
        return decode_command(data)

    async def say(self, event):
        await self.socket.send_multipart([self.client, event if isinstance(event, bytes) else codec.encode(event)])

    def die(self):
        self.socket.close(0)
        self.context.term()


@contextmanager
def ends():
    """A channel and an address where engines come and go."""
    with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as folder:
        address, context = f"ipc://{folder}/e", make_context()
        channel = engine_channel(context, address, "me", "frontend", SystemClock())
        yield channel, address
        channel.close()
        context.term()


class Received(asyncio.Queue):
    """What comes of a channel."""

    def __init__(self, channel):
        super().__init__()
        channel.open(self.put_nowait)


def run(scenario):
    async def go():
        with ends() as (channel, address):
            await scenario(channel, address)

    asyncio.run(asyncio.wait_for(go(), 20))


def run_with_engine(scenario):
    """scenario(channel, engine, received), once the engine has been greeted."""

    async def whole(channel, address):
        engine, received = Engine(address), Received(channel)
        try:
            await engine.hear()
            await scenario(channel, engine, received)
        finally:
            engine.die()

    run(whole)


def test_a_channel_waits_for_its_engine_and_for_the_next():
    async def scenario(channel, address):
        channel.send(Cancel(1, ["nobody is there"]))
        received, incarnations = Received(channel), []
        for life in (1, 2):
            engine = Engine(address)
            hello = await engine.hear()
            assert (hello.sender, hello.kind, engine.client) == ("me", "frontend", b"me")
            incarnations.append(hello.incarnation)
            await engine.say(ready(life=life))
            assert (await received.get()).peer.incarnation == life
            channel.send(Cancel(life, ["a"]))
            assert await next_cancel(engine, channel) == Cancel(life, ["a"])
            for i in range(100):
                await engine.say(Failed(str(i)))
            await asyncio.sleep(0.05)  # they are on their way
            engine.die()
            assert [(await received.get()).message for _ in range(100)] == [str(i) for i in range(100)]
            lost = time.monotonic()
            assert isinstance(await received.get(), ChannelLost)
            assert time.monotonic() - lost < GREETING_INTERVAL / 2
        assert incarnations[0] < incarnations[1]  # one for each connection

    run(scenario)


async def next_cancel(engine, channel):
    while isinstance(command := await engine.hear(), Hello):
        pass
    return command


def test_it_greets_again_and_again():
    async def scenario(channel, address):
        engine = Engine(address)
        channel.open(print)
        first, second = await engine.hear(), await engine.hear()
        assert first == second
        engine.die()

    run(scenario)


def test_rubbish_is_told_and_harms_nothing_after_it():
    async def scenario(channel, engine, received):
        await engine.say(b"rubbish")
        assert isinstance(await received.get(), msgspec.DecodeError)
        await engine.say(Failed("fine"))
        assert (await received.get()).message == "fine"

    run_with_engine(scenario)


def test_what_arrives_while_something_is_sent_is_not_overlooked():
    """ZMQ may take note of an arrival inside a send, and then its descriptor is silent about it."""

    async def scenario(channel, engine, received):
        for i in range(300):
            await engine.say(Failed(str(i)))
            begin = time.perf_counter()
            while time.perf_counter() - begin < 0.0003:  # it arrives, and the event loop does not look
                pass
            for _ in range(3):
                channel.send(Cancel(1, ["a"]))
            async with asyncio.timeout(GREETING_INTERVAL / 2):
                assert (await received.get()).message == str(i)

    run_with_engine(scenario)


def test_a_closed_channel_is_not_read_any_longer():
    """Its descriptors' numbers are the next socket's."""

    async def scenario(context):
        loop = asyncio.get_running_loop()
        before = set(loop._selector.get_map())
        channel = engine_channel(context, f"ipc:///tmp/penstock-{time.time_ns()}", "me", "frontend", SystemClock())
        Received(channel)
        assert len(set(loop._selector.get_map()) - before) == 2, "messages, and what becomes of the connection"
        channel.close()
        assert set(loop._selector.get_map()) == before

    with zmq.Context() as context:
        asyncio.run(scenario(context))


def test_one_process_has_channels_to_as_many_engines_as_its_open_files_allow():
    """With ZMQ's own limit of 1,023 sockets there would be 340."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        pytest.skip("this process may not open enough files")
    allow_connections()
    context = make_context()
    channels = []
    try:
        for i in range(500):
            channels.append(engine_channel(context, f"ipc:///tmp/penstock-{i}", "me", "master", SystemClock()))
    finally:
        for channel in channels:
            channel.close()
        context.term()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_message_that_cannot_be_handled_is_logged_and_none_is_handled_after_the_end(caplog):
    handled = []

    def handle(frames):
        handled.append(frames[0])
        assert frames != [b"bad"]
        if frames == [b"last"]:
            inbox.close()

    async def scenario(context):
        nonlocal inbox
        with context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
            ours.bind("inproc://here")
            theirs.connect("inproc://here")
            inbox = Inbox(ours, handle)
            for message in (b"bad", b"good", b"last", b"late"):
                theirs.send(message)
            inbox.open()
            await until(lambda: b"last" in handled)
            await asyncio.sleep(0.01)

    inbox = None
    with zmq.Context() as context:
        asyncio.run(scenario(context))
    assert handled == [b"bad", b"good", b"last"]
    assert caplog.text.count("a message could not be handled") == 1
