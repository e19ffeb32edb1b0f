"""The wire's engine end, over real sockets, with a model that counts."""

import contextlib
import threading
import time

import pytest
import zmq

from penstock.core.clock import SystemClock
from penstock.core.messages import (
    PROTOCOL,
    Cancel,
    Codec,
    Enqueue,
    Failed,
    Hello,
    Ready,
    Refused,
    Shutdown,
    StepReport,
)
from penstock.core.plan import StepResult
from penstock.engine.loop import Engine
from penstock.engine.server import EngineServer
from penstock.kv.pool import BlockPool
from penstock.sched.local import Limits, Scheduler
from tests.helpers.engines import make_request

READY = Ready(
    protocol=PROTOCOL, max_model_len=256, vocab_size=9999, num_blocks=8, token_budget=64, device="none", dtype="none"
)


class CountingRunner:
    """The next token is the last one plus one."""

    def __init__(self):
        self.pace = threading.Event()
        self.pace.set()

    def run(self, plan):
        assert self.pace.wait(20)
        drawn = [s.tokens[-1] + 1 for s in plan.sequences if s.sample]
        return StepResult(drawn, [None] * len(drawn))


class Frontend:
    def __init__(self, address):
        self.codec = Codec()
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def say(self, command):
        self.socket.send(self.codec.encode(command))

    def until(self, condition):
        """The first event that satisfies the condition."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.socket.poll(100):
                event = self.codec.event(self.socket.recv())
                if condition(event):
                    return event
        raise AssertionError("the event did not come")

    def tokens_of(self, name):
        got = []

        def done(event):
            for output in event.outputs if isinstance(event, StepReport) else []:
                assert output.request_id == name, "another's tokens"
                got.extend(output.tokens)
                if output.finish:
                    return True
            return False

        self.until(done)
        return got


@pytest.fixture
def served(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    limits = Limits(token_budget=64, max_sequences=4, max_model_len=256)
    runner = CountingRunner()
    engine = Engine(Scheduler(limits, BlockPool(8)), runner, SystemClock())
    server = EngineServer(address, SystemClock())
    thread = threading.Thread(target=server.run, args=(engine, READY), daemon=True)
    thread.start()
    clients = []

    def client():
        clients.append(Frontend(address))
        return clients[-1]

    yield client, engine, runner
    runner.pace.set()
    with contextlib.suppress(IndexError):
        clients[0].say(Shutdown())
    thread.join(20)
    assert not thread.is_alive()
    for c in clients:
        c.socket.close()
    server.close()


def test_tokens_go_to_the_frontend_that_asked(served):
    make, _, _ = served
    a, b = make(), make()
    for frontend, first in ((a, 10), (b, 500)):
        frontend.say(Hello())
        assert frontend.until(lambda e: isinstance(e, Ready)) == READY
        frontend.say(Enqueue(make_request(f"from{first}", [first], max_tokens=5)))
    assert a.tokens_of("from10") == [11, 12, 13, 14, 15]
    assert b.tokens_of("from500") == [501, 502, 503, 504, 505]


def test_refusals_cancellation_and_heartbeats(served):
    make, engine, runner = served
    a, b = make(), make()
    for frontend in (a, b):
        frontend.say(Hello())
        frontend.until(lambda e: isinstance(e, Ready))
    a.say(Enqueue(make_request("long", [1] * 300)))
    refusal = a.until(lambda e: isinstance(e, Refused))
    assert refusal.request_id == "long"
    assert "300 tokens" in refusal.message
    runner.pace.clear()
    a.say(Enqueue(make_request("mine", [1], max_tokens=200)))
    b.say(Cancel(["mine"]))  # not b's to cancel
    b.socket.send(b"\x93nonsense")
    runner.pace.set()
    a.until(lambda e: isinstance(e, StepReport) and e.outputs)
    a.say(Cancel(["mine", "unknown"]))
    idle = a.until(lambda e: isinstance(e, StepReport) and e.step_tokens == 0 and e.stats.running == 0)
    assert idle.stats.used_blocks == 0
    engine.check()


def test_another_protocol_is_refused(served):
    make, _, _ = served
    a = make()
    a.say(Hello(protocol=99))
    assert "99" in a.until(lambda e: isinstance(e, Failed)).message
