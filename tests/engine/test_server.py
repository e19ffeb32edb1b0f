"""The wire's engine end, over real sockets, with a model that counts."""

import contextlib
import os
import threading
import time

import pytest
import zmq

from penstock.core.clock import ManualClock, SystemClock
from penstock.core.plan import StepResult
from penstock.core.wire import codec
from penstock.core.wire.engine import (
    AT_WORK,
    LEASE,
    CacheDelta,
    Cancel,
    Drain,
    Enqueue,
    Failed,
    Fetched,
    Hello,
    Inspect,
    Inspection,
    Peer,
    Ready,
    Refused,
    SetRole,
    Shutdown,
    Snapshot,
    Source,
    StepReport,
    Stopped,
    decode_event,
)
from penstock.engine.executor import InlineExecutor, MaskCosts
from penstock.engine.loop import Engine
from penstock.engine.server import REPORT_INTERVAL, SNAPSHOT, EngineServer
from penstock.kv.pool import BlockPool
from penstock.sched.local import Limits, Scheduler
from tests.helpers.engines import make_request
from tests.helpers.waiting import eventually

LIFE = 7
READY = Ready(
    peer=Peer("engine", LIFE, ""), max_model_len=256, vocab_size=9999, num_blocks=8, token_budget=64, device="none",
    dtype="none",
)  # fmt: skip


class JumpingClock(SystemClock):
    """Time that can be told to leap."""

    leap = 0.0

    def now(self):
        return super().now() + self.leap


class CountingRunner:
    """The next token is the last one plus one. Once it has sampled `halt` it waits for its pace."""

    def __init__(self):
        self.mask_costs = MaskCosts()
        self.sampled = []
        self.halt = None
        self.pace = threading.Event()
        self.pace.set()

    def counts(self):
        return {}

    def check(self):
        pass

    def prepare(self, plan):
        pass

    def run(self, plan):
        assert self.pace.wait(20)
        last = [s.tokens[-1] for s in plan.sequences if s.sample]
        self.sampled = [(self.sampled[-1 - token] if token < 0 else token) + 1 for token in last]
        if self.halt in self.sampled:
            self.pace.clear()
        return StepResult([[token] for token in self.sampled], [None] * len(last))


class NoPeers:
    """A transport over which nothing comes."""

    shares = False

    def __init__(self):
        self._event = os.eventfd(0)

    def fileno(self):
        return self._event

    def receive(self):
        return []

    def poll(self):
        return []

    def close(self):
        os.close(self._event)


class Frontend:
    def __init__(self, address, name):
        self.name = name
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def say(self, command):
        self.socket.send(codec.encode(command))

    def hello(self, **fields):
        self.say(Hello(self.name, **fields))
        return self.until(lambda e: isinstance(e, Ready))

    def ask(self, request, to=LIFE, **fields):
        self.say(Enqueue(to, request, **fields))

    def inspect(self):
        self.say(Inspect())
        return self.until(lambda e: isinstance(e, Inspection))

    def until(self, condition):
        """The first event that satisfies the condition."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.socket.poll(100):
                event = decode_event(self.socket.recv())
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


def make_engine(runner, clock, *, ahead=False):
    limits = Limits(token_budget=64, max_sequences=4, max_model_len=256)
    return Engine(Scheduler(limits, BlockPool(range(8))), InlineExecutor(runner, clock, ahead=ahead, short=0.0), clock)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def served(tmp_path, request):
    address = f"ipc://{tmp_path}/engine"
    runner, clock = CountingRunner(), JumpingClock()
    runner.clock = clock
    engine = make_engine(runner, clock, ahead=request.param)
    server, transport = EngineServer(address, clock), NoPeers()
    engine.beats = []
    thread = threading.Thread(
        target=server.run,
        args=(engine, READY),
        kwargs={"beat": engine.beats.append, "transport": transport},
        daemon=True,
    )
    thread.start()
    clients = []

    def client(name="a"):
        clients.append(Frontend(address, name))
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
    transport.close()


def test_tokens_go_to_the_frontend_that_asked(served):
    make, _, _ = served
    a, b = make("a"), make("b")
    for frontend, first in ((a, 10), (b, 500)):
        assert frontend.hello() == READY
        frontend.ask(make_request(f"from{first}", [first], max_tokens=5))
    assert a.tokens_of("from10") == [11, 12, 13, 14, 15]
    assert b.tokens_of("from500") == [501, 502, 503, 504, 505]


def test_steps_count_prompts_with_what_was_found_and_outputs(served):
    make, _, _ = served
    a = make()
    a.hello()
    for name in "first", "again":  # the second time some of its tokens are found
        a.ask(make_request(name, [1] * 40, max_tokens=3))
        counted = []

        def ended(event, counted=counted):
            if not isinstance(event, StepReport):
                return False
            counted.append(event.step_tokens)
            return any(output.finish for output in event.outputs)

        stats = a.until(ended).stats
        assert [tokens for tokens in counted if tokens] == [41, 1, 1]
    assert stats.prefix_hits >= 32


def test_what_was_fetched_is_told_before_the_tokens_that_came_of_it(served):
    """Or a recovery would be taken for one without."""
    make, _, _ = served
    a = make()
    a.hello()
    a.ask(make_request("r", [1] * 40, max_tokens=1), source=Source(None, 1, 1.0))
    first = a.until(lambda e: isinstance(e, Fetched) or (isinstance(e, StepReport) and e.outputs))
    assert isinstance(first, Fetched)
    assert first.tokens == 0, "no block is full that could be fetched"
    assert a.tokens_of("r") == [2]


def test_refusals_cancellation_and_idle_reports(served):
    make, engine, runner = served
    a, b = make("a"), make("b")
    a.hello()
    b.hello()
    a.ask(make_request("long", [1] * 300))
    refusal = a.until(lambda e: isinstance(e, Refused))
    assert (refusal.request_id, refusal.why) == ("long", "invalid")
    assert "300 tokens" in refusal.message
    runner.pace.clear()
    a.ask(make_request("mine", [1], max_tokens=200))
    b.say(Cancel(LIFE, ["mine"]))  # not b's to cancel
    b.socket.send(b"\x93nonsense")
    runner.pace.set()
    a.until(lambda e: isinstance(e, StepReport) and e.outputs)
    a.say(Cancel(LIFE, ["mine", "unknown"]))
    idle = a.until(lambda e: isinstance(e, StepReport) and e.step_tokens == 0 and e.stats.running == 0)
    assert idle.stats.used_blocks == 0
    engine.check()


def test_every_turn_and_every_step_is_a_beat(served):
    make, engine, _ = served
    a = make()
    a.hello()
    deadline = time.monotonic() + 20
    idle = len(engine.beats)
    while len(engine.beats) < idle + 2:  # also where there is nothing to do
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(engine.beats) == {0}
    a.ask(make_request("r", [1] * 40, max_tokens=5))
    a.tokens_of("r")
    begun = [beat for beat in engine.beats if beat]
    assert begun[0] == 40
    assert set(begun) == {40, 41, 2, 1} if engine.executor.ahead else {40, 1}


def test_a_step_that_hangs_is_no_beat_whatever_else_is_done(served):
    make, engine, runner = served
    a, b = make("a"), make("b")
    a.hello()
    runner.pace.clear()
    a.ask(make_request("r", [1] * 10, max_tokens=3))
    deadline = time.monotonic() + 20
    while engine.beats[-1] != (11 if engine.executor.ahead else 10):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    beats = len(engine.beats)
    if engine.executor.ahead:
        assert b.hello() == READY  # it is answered while the step is computed
    time.sleep(0.05)
    assert len(engine.beats) == beats
    runner.pace.set()
    assert a.tokens_of("r") == [2, 3, 4]


def test_who_leaves_during_a_step_gets_nothing_of_it(served):
    make, engine, runner = served
    a = make()
    a.hello()
    runner.halt = 54  # or all could be over before the next line has run
    runner.pace.clear()
    a.ask(make_request("goes", [100], max_tokens=200))
    a.ask(make_request("stays", [50], max_tokens=9))
    runner.pace.set()
    a.until(lambda e: isinstance(e, StepReport) and len(e.outputs) == 2)
    while runner.pace.is_set():
        time.sleep(0.001)
    a.say(Cancel(LIFE, ["goes"]))
    a.say(Hello("a"))
    if engine.executor.ahead:
        a.until(lambda e: isinstance(e, StepReport) and e.stats.running == 1)  # it has left while the step is computed
    runner.pace.set()
    reports = []
    a.until(lambda e: isinstance(e, StepReport) and (reports.append(e) or any(o.finish for o in e.outputs)))
    assert reports[-1].outputs[-1].tokens == [59]
    if engine.executor.ahead:
        assert {o.request_id for report in reports for o in report.outputs} == {"stays"}
    assert a.inspect().broken == ""


def test_another_protocol_is_refused(served):
    make, _, _ = served
    a = make()
    a.say(Hello("a", protocol=99))
    assert "99" in a.until(lambda e: isinstance(e, Failed)).message


def test_what_is_meant_for_another_incarnation_is_refused(served):
    make, _, runner = served
    a = make()
    a.hello()
    a.ask(make_request("late", [1]), to=LIFE - 1)
    refusal = a.until(lambda e: isinstance(e, Refused))
    assert (refusal.request_id, refusal.why, refusal.incarnation) == ("late", "stale", LIFE)
    runner.pace.clear()
    a.ask(make_request("mine", [1], max_tokens=3))
    a.say(Cancel(LIFE - 1, ["mine"]))
    runner.pace.set()
    assert a.tokens_of("mine") == [2, 3, 4]


def test_a_newer_attempt_takes_the_place_of_an_older_one(served):
    make, _, runner = served
    a = make()
    a.hello()
    runner.pace.clear()
    a.ask(make_request("r", [1], max_tokens=200))
    a.ask(make_request("r", [1], max_tokens=200))  # the same attempt twice
    a.ask(make_request("r", [5], max_tokens=2), generation=1)
    runner.pace.set()
    assert a.until(lambda e: isinstance(e, Refused)).request_id == "r"
    report = a.until(lambda e: isinstance(e, StepReport) and any(o.generation == 1 and o.finish for o in e.outputs))
    assert (report.outputs[-1].tokens, report.outputs[-1].start) == ([7], 1)


def test_nobody_works_for_a_frontend_that_has_gone(served):
    make, _, runner = served
    a, probe = make("a"), make("probe")
    a.hello()
    probe.hello(kind="probe")
    runner.halt = 50
    a.ask(make_request("endless", [1], max_tokens=200))
    for halt, leap in ((100, LEASE), (None, 2 * LEASE)):  # long steps, say; after the first it may still greet
        eventually(lambda: not runner.pace.is_set())
        runner.clock.leap, runner.halt = leap, halt
        probe.say(Hello("probe", kind="probe"))  # arrived meanwhile
        runner.pace.set()
    probe.until(lambda e: isinstance(e, StepReport) and e.stats.running == 0)
    assert runner.sampled[-1] < 200, "it went on to its end"
    found = probe.inspect()
    assert found.broken == ""
    assert found.counts["held_blocks"] == found.counts["owners"] == 0


def test_a_frontend_that_stood_still_with_the_engine_is_not_dropped(served):
    """Suspended and resumed together, say: its next greeting comes when it gets to it."""
    make, _, runner = served
    a, probe = make("a"), make("probe")
    a.hello()
    probe.hello(kind="probe")
    a.ask(make_request("long", [1], max_tokens=200))
    a.until(lambda e: isinstance(e, StepReport) and e.outputs)
    runner.pace.clear()
    runner.clock.leap = 2 * LEASE
    runner.pace.set()
    assert probe.inspect().counts["clients"] == 2
    a.say(Hello("a"))
    reports = []
    a.until(lambda e: reports.append(e) or (isinstance(e, StepReport) and any(o.finish for o in e.outputs)))
    assert not any(isinstance(event, Ready) for event in reports), "it was taken for a new one"


def test_the_next_incarnation_of_a_frontend_is_not_given_the_last_ones_requests(served):
    make, _, _ = served
    a = make("a")
    a.hello(incarnation=1)
    a.ask(make_request("old", [1], max_tokens=250))
    a.until(lambda e: isinstance(e, StepReport) and e.outputs)
    a.hello(incarnation=2)
    idle = a.until(lambda e: isinstance(e, StepReport) and e.stats.running == 0)
    assert not any(o.finish for o in idle.outputs)
    assert a.inspect().counts["owners"] == 0


def test_a_master_sees_load_and_cache(served):
    make, _, _ = served
    a, master = make("a"), make("master")
    a.hello()
    assert master.hello(kind="master") == READY
    assert master.until(lambda e: isinstance(e, CacheDelta)).whole
    a.ask(make_request("r", list(range(1, 130)), max_tokens=3))
    assert a.tokens_of("r") == [130, 131, 132]
    added = []
    while len(added) < 2:  # it may be told in two messages
        delta = master.until(lambda e: isinstance(e, CacheDelta))
        assert (delta.removed, delta.whole) == ([], False)
        added += delta.added
    assert len(added) == 2
    snapshot = master.until(lambda e: isinstance(e, Snapshot) and e.ttft_ms is not None and e.running == 0)
    assert snapshot.free_blocks == snapshot.num_blocks == 8
    assert (snapshot.role, snapshot.draining) == ("any", False)
    master.say(SetRole(LIFE, "decode", 2))
    master.say(SetRole(LIFE, "prefill", 1))  # decided earlier
    master.say(Drain(LIFE))
    changed = master.until(lambda e: isinstance(e, Snapshot) and e.draining)
    assert (changed.role, changed.role_generation) == ("decode", 2)
    a.ask(make_request("late", [1]))
    assert a.until(lambda e: isinstance(e, Refused)).why == "draining"


def test_an_engine_that_goes_idle_does_not_wait_long_to_say_so(tmp_path):
    address, clock = f"ipc://{tmp_path}/engine", ManualClock()
    engine = make_engine(CountingRunner(), clock)
    master = Frontend(address, "m")
    with contextlib.closing(EngineServer(address, clock)) as server:
        master.say(Hello("m", kind="master"))
        master.say(Shutdown())
        server.run(engine, READY)
        assert master.until(lambda e: isinstance(e, Stopped)).incarnation == LIFE, "it says goodbye"
        assert server._patience(stalled=False) == pytest.approx(
            SNAPSHOT
        )  # that somebody came may have changed the load
        clock.advance(SNAPSHOT)
        server._on_clock(clock.now())
        assert master.until(lambda e: isinstance(e, Snapshot)).sequence == 1
        assert server._patience(stalled=False) == pytest.approx(REPORT_INTERVAL - SNAPSHOT)
        server._tell_masters(clock.now())  # nothing, until there is something new
        engine.add(make_request("r", [1]))
        server._tell_masters(clock.now())
        changed = master.until(lambda e: isinstance(e, Snapshot))
        assert (changed.sequence, changed.waiting) == (2, 1)
    master.socket.close()


def test_an_engine_at_work_says_something_in_the_longest_step(tmp_path):
    address, clock = f"ipc://{tmp_path}/engine", ManualClock()
    engine = make_engine(CountingRunner(), clock)
    frontend = Frontend(address, "f")
    with contextlib.closing(EngineServer(address, clock)) as server:
        frontend.say(Hello("f"))
        frontend.say(Shutdown())
        server.run(engine, READY)
        frontend.until(lambda e: isinstance(e, Stopped))
        for waits, says in ((False, REPORT_INTERVAL), (True, AT_WORK)):
            if waits:
                engine.add(make_request("r", [1]))
            clock.advance(says - 0.01)
            server._on_clock(clock.now())
            assert server._beat < clock.now()
            clock.advance(0.02)
            server._on_clock(clock.now())
            assert server._beat == clock.now()
            assert frontend.until(lambda e: isinstance(e, StepReport)).step_tokens == 0
    frontend.socket.close()


class NoWay:
    """A carrier on which nothing comes, and nothing leaves."""

    shares = True

    def __init__(self):
        self.ends = os.pipe()

    def fileno(self):
        return self.ends[0]

    def receive(self):
        return []

    def poll(self):
        return []

    def send(self, peer, message):
        pass

    def close(self):
        for end in self.ends:
            os.close(end)


@pytest.mark.parametrize("busy", [False, True])
def test_time_passes_for_a_hand_off_in_progress_and_only_then(tmp_path, busy):
    address, clock, lease = f"ipc://{tmp_path}/engine", ManualClock(), 1.6
    engine = make_engine(CountingRunner(), clock)
    master = Frontend(address, "m")
    with contextlib.closing(NoWay()) as carrier, contextlib.closing(EngineServer(address, clock)) as server:
        master.say(Shutdown())
        server.run(engine, READY, transport=carrier, lease=lease)
        clock.advance(SNAPSHOT)
        server._on_clock(clock.now())
        if busy:
            request = make_request("r", [1])
            engine.scheduler.add(request, migrates=True)
            server._handoffs.begin(0.0, request, 0, "f", Peer("other", 1, ""))
            engine.scheduler.cancel("r")
        assert server._patience(stalled=False) == pytest.approx((lease / 20 if busy else REPORT_INTERVAL) - SNAPSHOT)
    master.socket.close()
