"""Runs batches in the idle capacity of a deployment: the lines of those that this process holds, as offline work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.service.batch_lines import Line, LineReader, answered, check_lines, request_id, tokens_of
from penstock.service.batch_store import Answered, Batch, BatchStore

if TYPE_CHECKING:
    from penstock.core.clock import Clock
    from penstock.service.frontend import Frontend, Models

LOOK = 0.5  # seconds between two looks for batches
TICK = 0.05  # between two looks at whether more lines may begin
RENEW = 2.0  # between two renewals of a lease
SWEEP = 600.0
LEAST = 4  # lines for each instance that may wait for their first token, however few begin
WINDOW = 1.0  # seconds, of the lines that began lately
MOST_PAUSE = 5.0  # seconds, after the deployment has refused a line
TROUBLE = 1.0  # seconds until a disk is tried again
AHEAD, AHEAD_BYTES = 256, 1 << 24  # lines that are read ahead, and bytes of them, of each batch
MOST_BATCHES = 64  # that one process runs at a time
TRIES = 3  # of a line that ends with an internal error
REFUSED = (429, 503)  # statuses that say nothing about the line

log = logging.getLogger("penstock.batches")


class Answer(NamedTuple):
    """
    Attributes:
        body: JSON.
        retry_after: seconds, where the status is one of REFUSED.
        final: asking again would not change it.
    """

    status: int
    body: bytes
    retry_after: float
    final: bool


Ask = Callable[[str, bytes, str, str], Awaitable[Answer]]  # of endpoint, body, tenant, request id


class Inflow:
    """How many more lines may begin.

    As many wait for their first token as began within the last second, and a few for each instance: a deployment that
    takes more gets more, and what does not fit it waits in a batch's file instead of its queue.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque([(float("-inf"), 0)])  # (when, how many had begun)
        self._until = float("-inf")

    def pause(self, now: float, seconds: float) -> None:
        """The deployment has refused a line."""
        self._until = max(self._until, now + min(seconds, MOST_PAUSE))

    def room(self, now: float, *, instances: int, waiting: int, begun: int) -> int:
        """
        Args:
            now: in seconds.
            instances: that serve.
            waiting: lines that have begun, and whose first token has not come.
            begun: whose first token has come, ever.
        """
        self._seen.append((now, begun))
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
        if now < self._until:
            return 0
        return max(0, max(LEAST * instances, begun - self._seen[0][1]) - waiting)


@dataclass(slots=True)
class _Model:
    """One that is served.

    Attributes:
        flying: lines that have begun.
    """

    frontend: Frontend
    inflow: Inflow = field(default_factory=Inflow)
    flying: int = 0

    def room(self) -> int:
        """Lines that may begin now."""
        frontend = self.frontend
        if not frontend.ready:
            return 0
        work = frontend.offline
        waiting = work.queued + max(0, self.flying - work.held)  # and those that are not even tokenised
        instances = sum(state["state"] == "ready" for state in frontend.instance_states())
        now = frontend.clock.now()
        room = self.inflow.room(now, instances=max(1, instances), waiting=waiting, begun=work.begun)
        return min(room, frontend.offline_room - max(0, self.flying - work.held))


@dataclass(slots=True)
class _Run:
    """A batch that this process holds.

    Attributes:
        model: whose capacity its lines fill.
        ahead: lines that are read and have not begun.
        flying: lines that have.
        answers: that are not kept yet.
        tries: of lines that have failed.
        left: how many are not answered.
    """

    batch: Batch
    model: _Model
    reader: LineReader
    left: int
    ahead: deque[Line] = field(default_factory=deque)
    flying: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answers: list[Answered] = field(default_factory=list)
    tries: Counter[int] = field(default_factory=Counter)
    fault: BaseException | None = None  # of ours

    @property
    def over(self) -> bool:
        return self.reader.ended and not (self.ahead or self.flying or self.answers)

    def landed(self, number: int, task: asyncio.Task[None]) -> None:
        del self.flying[number]
        if not task.cancelled():
            self.fault = self.fault or task.exception()


class BatchRunner:
    """
    Args:
        ask: has a line answered, as over HTTP.
        name: of this process; another run of it has another.
        longest: bytes of a line, at most.
    """

    def __init__(self, store: BatchStore, models: Models, ask: Ask, name: str, longest: int, clock: Clock) -> None:
        self._store, self._models, self._ask, self._longest, self._clock = store, models, ask, longest, clock
        self._by_model = [_Model(frontend) for frontend in models.frontends]
        self._holder = f"{name}-{secrets.token_hex(8)}"
        self._running: dict[str, asyncio.Task[None]] = {}
        self._runs: list[_Run] = []
        self._swept = float("-inf")

    async def run(self) -> None:
        """Until it is cancelled. While the server drains nothing is begun."""
        try:
            while True:
                try:
                    await self._look()
                except (OSError, sqlite3.Error) as error:
                    log.warning("batches cannot be looked for: %s", error)
                    await asyncio.sleep(TROUBLE)
                await asyncio.sleep(LOOK)
        finally:
            tasks = [*self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        now = self._clock.now()
        if now >= self._swept + SWEEP:
            self._swept = now
            await self._store.aside(self._store.sweep)
        while not self._models.draining and len(self._running) < MOST_BATCHES:
            batch = await self._store.aside(self._store.claim, self._holder, [*self._running])
            if batch is None:
                return
            task = asyncio.create_task(self._serve(batch))
            self._running[batch.id] = task
            task.add_done_callback(partial(self._over, batch.id))

    def _over(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._running[batch_id]

    async def _serve(self, batch: Batch) -> None:
        """Run it until it is over, or another holds it, or the server drains."""
        log.info("batch %s of %s goes on here, %s", batch.id, batch.endpoint, batch.status)
        try:
            checked = batch if batch.total else await self._checked(batch)
            if checked is not None:
                await self._go_on(checked)
        except (OSError, sqlite3.Error) as error:
            log.warning("batch %s cannot go on, and is tried again: %s", batch.id, error)
            await asyncio.sleep(TROUBLE)
        except Exception:
            log.exception("batch %s cannot go on, and is tried again", batch.id)
            await asyncio.sleep(TROUBLE)
        finally:
            with contextlib.suppress(OSError, sqlite3.Error):
                await self._store.aside(self._store.release, batch.id, self._holder)

    async def _checked(self, batch: Batch) -> Batch | None:
        """What it is when its input is good: its lines may run."""
        store = self._store
        wanted = threading.Event()
        wanted.set()
        path, served = store.path(batch.input_file_id), [frontend.served_names for frontend in self._models.frontends]
        try:
            work = asyncio.to_thread(check_lines, path, batch.endpoint, self._longest, served, wanted.is_set)
            found = await self._meanwhile(batch, work)
        finally:
            wanted.clear()
        if found is None:
            return None
        if found.errors:
            log.info("batch %s is refused: %s", batch.id, found.errors[0].message)
            await store.aside(store.refuse, batch.id, self._holder, found.errors)
            return None
        await store.aside(store.begin, batch.id, self._holder, found.total, found.model)
        return replace(batch, total=found.total, model=found.model)

    async def _go_on(self, batch: Batch) -> None:
        store = self._store
        done = await store.aside(store.answered, batch.id)
        reader = LineReader(store.path(batch.input_file_id), batch.endpoint, self._longest, done)
        run = _Run(batch, self._model(batch), reader, await store.aside(store.total, batch.id) - len(done))
        self._runs.append(run)
        status: str | None = None
        try:
            status = await self._run_lines(run)
        finally:  # of a batch that another holds by now, nothing is kept
            self._runs.remove(run)
            self._tell(run.model)
            for task in run.flying.values():
                task.cancel()
            await asyncio.gather(*run.flying.values(), return_exceptions=True)
            if run.answers:
                await store.aside(store.record, batch.id, self._holder, run.answers)
        if status is None:
            return
        await store.aside(store.finalize, batch.id, self._holder)
        await self._meanwhile(batch, asyncio.to_thread(store.finish, batch, self._holder, self._longest))
        if (ended := await store.aside(store.batch, batch.owner, batch.id)) is not None:
            log.info("batch %s is %s: %d lines, %d failed", ended.id, ended.status, ended.total, ended.failed)

    async def _run_lines(self, run: _Run) -> str | None:
        """Until all are answered, or no more are to run; then its status. None when this process stops, or has lost
        it."""
        store, batch, clock = self._store, run.batch, self._clock
        renewed = float("-inf")
        while True:
            now = clock.now()
            if run.answers or now >= renewed + RENEW:
                renewed = now
                status = await self._keep(run)
                if status != "in_progress" or store.now >= batch.expires_at:
                    return status
            if run.fault is not None:
                raise run.fault
            if self._models.draining:
                return None
            if run.over:
                return "in_progress"
            if len(run.ahead) < AHEAD and not run.reader.ended:
                run.ahead += await asyncio.to_thread(run.reader.next, AHEAD, AHEAD_BYTES)
            self._begin_lines(run)
            self._tell(run.model)
            await asyncio.sleep(TICK)

    async def _keep(self, run: _Run) -> str | None:
        """Have the store keep the answers, however long it cannot (`BatchStore.record`). Nothing begins meanwhile."""
        answers, run.answers = run.answers, []
        try:
            while True:
                try:
                    status = await self._store.aside(self._store.record, run.batch.id, self._holder, answers)
                    break
                except (OSError, sqlite3.Error) as error:
                    log.warning("answers of batch %s cannot be kept: %s", run.batch.id, error)
                    await asyncio.sleep(TROUBLE)
        except BaseException:
            run.answers = answers + run.answers
            raise
        if status is None:
            log.warning("batch %s is run by another process", run.batch.id)
        return status

    def _begin_lines(self, run: _Run) -> None:
        for _ in range(min(run.model.room(), len(run.ahead))):
            line = run.ahead.popleft()
            task = asyncio.create_task(self._run_line(run, line))
            run.flying[line.number] = task
            run.model.flying += 1
            task.add_done_callback(partial(self._landed, run, line.number))

    def _tell(self, model: _Model) -> None:
        """How many lines of all its batches wait, and run."""
        runs = [run for run in self._runs if run.model is model]
        running = sum(len(run.flying) for run in runs)
        model.frontend.metrics.set_batch_lines(sum(run.left for run in runs) - running, running)

    def _landed(self, run: _Run, number: int, task: asyncio.Task[None]) -> None:
        run.model.flying -= 1
        run.landed(number, task)

    def _model(self, batch: Batch) -> _Model:
        """Whose lines they are; of a model that is served no longer, or not named, any: they are refused one by one."""
        named = (each for each in self._by_model if batch.model in each.frontend.served_names)
        return next(named, self._by_model[0])

    async def _run_line(self, run: _Run, line: Line) -> None:
        batch = run.batch
        answer = await self._ask(batch.endpoint, line.request(), batch.owner, request_id(batch.id, line.number))
        if answer.status in REFUSED:
            run.model.inflow.pause(self._clock.now(), answer.retry_after)
            run.ahead.appendleft(line)
            return
        if answer.status >= 500 and not answer.final:
            run.tries[line.number] += 1
            if run.tries[line.number] < TRIES:
                run.ahead.append(line)
                return
        record = answered(batch.id, line, answer.status, answer.body)
        failed = answer.status != 200
        run.answers.append(Answered(line.number, failed, record, tokens_of(answer.body)))
        run.left -= 1
        run.model.frontend.metrics.observe_batch_line(failed)

    async def _meanwhile(self, batch: Batch, work: Awaitable[Any]) -> Any:
        """What comes of work that takes long, with the batch held on to; None where another holds it by then."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=RENEW)
            if await self._store.aside(self._store.record, batch.id, self._holder) is None and not task.done():
                return None
        return await task
