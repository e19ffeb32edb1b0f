"""Batches run as far as the deployment takes them, whatever it answers."""

import asyncio
import json
import sqlite3
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import SystemClock
from penstock.obs.metrics import Metrics
from penstock.service.batch_runner import LEAST, MOST_PAUSE, TRIES, WINDOW, Answer, BatchRunner, Inflow
from penstock.service.batch_store import BatchStore
from penstock.service.frontend import Models
from tests.helpers.waiting import until

ENDPOINT = "/v1/completions"
OK = Answer(200, b'{"choices":[]}', 1.0, False)
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


# --- how many


def test_what_begins_brings_more():
    """A deployment that takes 100 at a time, each for half a second, gets them soon."""
    inflow, begun, running = Inflow(), 0, []
    for step in range(100):
        now = step * 0.05
        running = [end for end in running if end > now]
        room = inflow.room(now, instances=1, waiting=0, begun=begun)
        take = min(room, 100 - len(running))
        running += [now + 0.5] * take
        begun += take
    assert len(running) == 100


def test_what_waits_is_bounded_where_nothing_begins():
    inflow, waiting = Inflow(), 0
    for step in range(100):
        waiting += inflow.room(step * 0.05, instances=3, waiting=waiting, begun=0)
    assert waiting == 3 * LEAST


def test_a_refusal_is_heard():
    inflow = Inflow()
    assert inflow.room(1.0, instances=1, waiting=0, begun=0) == LEAST
    inflow.pause(1.0, 2.0)
    assert inflow.room(2.9, instances=1, waiting=0, begun=0) == 0
    assert inflow.room(3.0, instances=1, waiting=0, begun=0) == LEAST
    inflow.pause(3.0, 1e9)
    assert inflow.room(3.0 + MOST_PAUSE, instances=1, waiting=0, begun=0) == LEAST


@given(steps=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 50), st.integers(0, 500)), max_size=30))
def test_no_more_wait_than_began_lately(steps):
    inflow, now, begun, history = Inflow(), 0.0, 0, [(0.0, 0)]
    for passed, more, waiting in steps:
        now, begun = now + passed, begun + more
        history.append((now, begun))
        room = inflow.room(now, instances=2, waiting=waiting, begun=begun)
        # at each look since, and the one before
        lately = begun - min(
            [b for t, b in history if t > now - WINDOW] + [b for t, b in history if t <= now - WINDOW][-1:]
        )
        assert room == max(0, max(2 * LEAST, lately) - waiting)


# --- whole batches


class Deployment:
    """A frontend without one: it counts, and answers what it is told to.

    Attributes:
        answer: of (body, how often that was asked before).
    """

    served_names = ("m",)
    offline_room = 1000

    def __init__(self):
        self.clock = SystemClock()
        self.ready = True
        self.metrics = Metrics("m", [])
        self.offline = SimpleNamespace(held=0, queued=0, begun=0)
        self.asked, self.in_flight, self.most = {}, 0, 0
        self.answer = lambda body, before: OK
        self.gate = asyncio.Event()
        self.gate.set()

    def instance_states(self):
        return [{"state": "ready"}]

    async def ask(self, endpoint, body, tenant, request_id):
        assert endpoint == ENDPOINT
        asked = json.loads(body)
        assert asked["service_tier"] == "flex"
        before = self.asked.setdefault(asked["prompt"], [])
        before.append((tenant, request_id))
        work = self.offline
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        work.held += 1
        work.queued += 1
        try:
            try:
                await self.gate.wait()
            finally:
                work.queued -= 1
                work.begun += 1
            await asyncio.sleep(0)
            return self.answer(asked, len(before) - 1)
        finally:
            self.in_flight -= 1
            work.held -= 1


class Bench:
    def __init__(self, folder):
        self.store, self.view = BatchStore(folder), BatchStore(folder)  # of the runners, and of the test
        self.deployment = Deployment()
        self.models = Models([self.deployment])
        self.tasks = []

    def start(self, name="frontend-0"):
        runner = BatchRunner(self.store, self.models, self.deployment.ask, name, 1000, self.deployment.clock)
        self.tasks.append(asyncio.create_task(runner.run()))
        return self.tasks[-1]

    def create(self, count=20, seconds=600, lines=None, **options):
        upload = self.view.begin_upload()
        for i in range(count):
            body = {"prompt": f"p{i}"}
            line = {"custom_id": f"id-{i}", "method": "POST", "url": ENDPOINT, "body": body}
            upload.write(json.dumps(line).encode() + b"\n")
        for line in lines or ():
            upload.write(line)
        file = self.view.keep_upload(upload, owner="me", purpose="batch", filename="", keep_seconds=None)
        return self.view.create("me", ENDPOINT, file.id, window="", seconds=seconds, **options).id

    def batch(self, batch_id):
        return self.view.batch("me", batch_id)

    async def status(self, batch_id, *wanted):
        await until(lambda: self.batch(batch_id).status in wanted)
        return self.batch(batch_id)

    def lines(self, file_id):
        text = "" if file_id is None else self.view.path(file_id).read_text()
        return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)
    bench.store.check()
    for store in (bench.store, bench.view):
        store.close()


async def test_every_line_is_answered_once(bench):
    batch_id = bench.create(60)
    bench.start()
    batch = await bench.status(batch_id, "completed")
    assert (batch.total, batch.completed, batch.failed) == (60, 60, 0)
    assert {len(asked) for asked in bench.deployment.asked.values()} == {1}
    assert bench.deployment.asked["p3"] == [("me", f"batch_req_{batch_id.removeprefix('batch_')}-4")]
    found = bench.lines(batch.output_file_id)
    assert [*found] == [f"id-{i}" for i in range(60)]
    assert found["id-3"]["response"]["body"] == {"choices": []}
    assert batch.error_file_id is None


async def test_usage_and_metrics_are_those_of_the_answers(bench):
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 1}
    good = Answer(200, json.dumps({"usage": usage}).encode(), 1.0, False)
    wrong = Answer(400, b'{"error":{}}', 1.0, False)
    bench.deployment.answer = lambda body, before: wrong if body["prompt"] == "p1" else good
    bench.deployment.gate.clear()
    batch_id = bench.create(20)
    bench.start()

    def seen(name, **labels):
        return bench.deployment.metrics.registry.get_sample_value(f"penstock:{name}", {"model_name": "m", **labels})

    await until(lambda: seen("batch_lines", state="running") == LEAST)
    assert seen("batch_lines", state="queued") == 20 - LEAST
    bench.deployment.gate.set()
    batch = await bench.status(batch_id, "completed")
    assert (batch.input_tokens, batch.cached_tokens, batch.output_tokens, batch.reasoning_tokens) == (95, 38, 57, 19)
    assert seen("batch_lines_answered_total", outcome="completed") == 19
    assert seen("batch_lines_answered_total", outcome="failed") == 1
    await until(lambda: not seen("batch_lines", state="running") and not seen("batch_lines", state="queued"))


async def test_what_is_refused_waits_and_what_fails_is_told(bench):
    answers = {
        "p0": [Answer(429, b"{}", 0.01, False)] * 2 + [OK],
        "p1": [Answer(503, b"{}", 0.01, False)] * 2 + [OK],
        "p2": [Answer(400, b'{"error":{"code":"c"}}', 1.0, False)],
        "p3": [Answer(500, b"{}", 1.0, False), OK],
        "p4": [Answer(500, b"{}", 1.0, False)] * TRIES,
        "p5": [Answer(500, b"{}", 1.0, True)],
    }
    bench.deployment.answer = lambda body, before: answers.get(body["prompt"], [OK])[before]
    batch_id = bench.create(8)
    bench.start()
    batch = await bench.status(batch_id, "completed")
    assert (batch.completed, batch.failed) == (5, 3)
    errors = bench.lines(batch.error_file_id)
    assert {name: line["response"]["status_code"] for name, line in errors.items()} == {
        **{"id-2": 400, "id-4": 500, "id-5": 500},
    }
    assert errors["id-2"]["response"]["body"] == {"error": {"code": "c"}}
    assert {name: len(asked) for name, asked in bench.deployment.asked.items()} == {
        name: len(answers.get(name, [OK])) for name in bench.deployment.asked
    }


async def test_lines_in_flight_are_bounded_where_none_begins(bench):
    bench.deployment.gate.clear()
    batch_id = bench.create(100)
    bench.start()
    await until(lambda: bench.deployment.in_flight == LEAST)
    looked = bench.batch(batch_id).held_until
    await until(lambda: bench.batch(batch_id).held_until > looked)  # it has looked many times since
    assert bench.deployment.in_flight == LEAST
    bench.deployment.gate.set()
    assert (await bench.status(batch_id, "completed")).completed == 100
    assert bench.deployment.most > LEAST


async def test_nothing_begins_without_room_or_an_engine(bench):
    bench.deployment.ready = False
    batch_id = bench.create(3)
    bench.start()
    held = (await bench.status(batch_id, "in_progress")).held_until
    await until(lambda: bench.batch(batch_id).held_until > held)
    assert not bench.deployment.asked
    bench.deployment.ready, bench.deployment.offline_room = True, 0
    held = bench.batch(batch_id).held_until
    await until(lambda: bench.batch(batch_id).held_until > held)
    assert not bench.deployment.asked
    bench.deployment.offline_room = 1
    assert (await bench.status(batch_id, "completed")).completed == 3
    assert bench.deployment.most == 1


async def test_a_wrong_line_keeps_all_from_running(bench):
    batch_id = bench.create(3, lines=[b'{"custom_id": "id-1"}\n'])
    bench.start()
    batch = await bench.status(batch_id, "failed")
    assert json.loads(batch.errors)[0]["line"] == 4
    assert not bench.deployment.asked


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_what_is_answered_by_its_end_is_kept(bench, how):
    gates = {f"p{i}": i < 2 for i in range(10)}
    bench.deployment.answer = lambda body, before: OK if gates[body["prompt"]] else Answer(503, b"{}", 0.01, False)
    batch_id = bench.create(10, seconds=2 if how == "expired" else 600)
    bench.start()
    await until(lambda: bench.batch(batch_id).completed == 2)
    if how == "cancelled":
        bench.view.cancel("me", batch_id)
    batch = await bench.status(batch_id, how)
    assert (batch.total, batch.completed, batch.failed) == (10, 2, 8)
    assert bench.lines(batch.output_file_id).keys() == {"id-0", "id-1"}
    errors = bench.lines(batch.error_file_id)
    assert errors.keys() == {f"id-{i}" for i in range(2, 10)}
    assert {line["error"]["code"] for line in errors.values()} == {f"batch_{how}"}
    assert bench.deployment.in_flight == 0


async def test_a_draining_server_lets_go_at_once_and_another_goes_on(bench):
    bench.deployment.answer = lambda body, before: OK if body["prompt"] < "p3" else Answer(503, b"{}", 0.01, False)
    batch_id = bench.create(9)
    bench.start()
    await until(lambda: bench.batch(batch_id).completed == 3)
    bench.models.draining = True
    await until(lambda: bench.batch(batch_id).holder is None)
    assert bench.deployment.in_flight == 0
    bench.models.draining = False
    bench.deployment.answer = lambda body, before: OK
    bench.start("frontend-1")
    batch = await bench.status(batch_id, "completed")
    assert batch.completed == 9
    assert {len(bench.deployment.asked[f"p{i}"]) for i in range(3)} == {1}


async def test_of_two_one_runs_a_batch(bench):
    for i in range(2):
        bench.start(f"frontend-{i}")
    ids = [bench.create(30) for _ in range(3)]
    for batch_id in ids:
        assert (await bench.status(batch_id, "completed")).completed == 30
    assert {len(asked) for asked in bench.deployment.asked.values()} == {3}  # once for each batch


async def test_a_disk_that_fails_for_a_while_loses_nothing(bench, monkeypatch):
    record, fails = bench.store.record, [2]

    def failing(batch_id, holder, answers=()):
        if answers and fails[0]:
            fails[0] -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return record(batch_id, holder, answers)

    monkeypatch.setattr("penstock.service.batch_runner.TROUBLE", 0.01)
    monkeypatch.setattr(bench.store, "record", failing)
    batch_id = bench.create(10)
    bench.start()
    assert (await bench.status(batch_id, "completed")).completed == 10
    assert {len(asked) for asked in bench.deployment.asked.values()} == {1}
    assert fails == [0]
