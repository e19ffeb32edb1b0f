"""Where the wire ends: commands of frontends in, steps, events out. One thread; the engine is its only owner."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import zmq

from penstock.core.clock import Clock
from penstock.core.errors import UserError
from penstock.core.messages import (
    PROTOCOL,
    Cancel,
    Codec,
    Command,
    EngineStats,
    Enqueue,
    Event,
    Failed,
    Hello,
    Ready,
    Refused,
    Shutdown,
    StepReport,
)
from penstock.core.request import TokenOutput
from penstock.engine.loop import Engine

log = logging.getLogger("penstock.engine")
HEARTBEAT = 0.5  # seconds between signs of life while idle


class EngineServer:
    """Serves the frontends that said hello. Tokens go straight to the frontend that owns the request.

    Args:
        address: a ZMQ endpoint to bind, such as ipc:///run/engine.sock.
        clock: for heartbeats.
    """

    def __init__(self, address: str, clock: Clock) -> None:
        self._clock = clock
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a router drops what does not fit, and a token must not be dropped
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.bind(address)
        self._frontends: list[bytes] = []
        self._owner: dict[str, bytes] = {}
        self._stopping = False

    def run(self, engine: Engine, ready: Ready, orphaned: Callable[[], bool] = lambda: False) -> None:
        """Serve until told to shut down, or until `orphaned` says that nobody is left to serve."""
        self._engine, self._ready = engine, ready
        beat = looked = self._clock.now() - HEARTBEAT
        while not self._stopping:
            self._receive(wait=not engine.has_work)
            if engine.has_work:
                outputs, tokens = engine.step()
                self._report(outputs, tokens)
                beat = self._clock.now()
            now = self._clock.now()
            if now - beat >= HEARTBEAT:
                self._report([], 0)
                beat = now
            if now - looked >= HEARTBEAT:
                if orphaned():
                    log.info("nobody is left to serve")
                    return
                looked = now

    def fail(self, message: str) -> None:
        """Tell every frontend that this engine is about to end."""
        for frontend in self._frontends:
            self._send(frontend, Failed(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _receive(self, wait: bool) -> None:
        """Handle everything that has arrived; while idle, wait for it up to one heartbeat."""
        if wait:
            self._socket.poll(int(HEARTBEAT * 1000))
        while True:
            try:
                frontend, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                log.warning("a message that is not one frame was dropped")
                continue
            try:
                command = self._codec.command(data)
            except msgspec.DecodeError as error:
                log.warning("a message that is no command was dropped: %s", error)
                continue
            self._handle(frontend, command)

    def _handle(self, frontend: bytes, command: Command) -> None:
        match command:
            case Hello(protocol=protocol):
                if protocol != PROTOCOL:
                    self._send(frontend, Failed(f"protocol {protocol} of the frontend, {PROTOCOL} of the engine"))
                    return
                if frontend not in self._frontends:
                    self._frontends.append(frontend)
                self._send(frontend, self._ready)
            case Enqueue(request=request):
                try:
                    self._engine.add(request)
                except UserError as error:
                    self._send(frontend, Refused(request.id, str(error)))
                else:
                    self._owner[request.id] = frontend
            case Cancel(request_ids=request_ids):
                mine = [r for r in request_ids if self._owner.get(r) == frontend]
                self._engine.cancel(mine)
                for request_id in mine:
                    del self._owner[request_id]
            case Shutdown():
                self._stopping = True

    def _report(self, outputs: list[TokenOutput], step_tokens: int) -> None:
        """Send every frontend its outputs, and the load to all."""
        theirs: dict[bytes, list[TokenOutput]] = {frontend: [] for frontend in self._frontends}
        for output in outputs:
            owner = self._owner[output.request_id] if output.finish is None else self._owner.pop(output.request_id)
            theirs.setdefault(owner, []).append(output)
        stats = self._stats()
        for frontend, own in theirs.items():
            self._send(frontend, StepReport(own, stats, step_tokens))

    def _stats(self) -> EngineStats:
        scheduler = self._engine.scheduler
        counters = scheduler.counters
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            used_blocks=scheduler.pool.used,
            num_blocks=scheduler.pool.num_blocks,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            steps=self._engine.steps,
        )

    def _send(self, frontend: bytes, event: Event) -> None:
        self._socket.send_multipart([frontend, self._codec.encode(event)])
