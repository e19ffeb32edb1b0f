"""What scheduling the next step while one runs is worth: output tokens per second, and what the engine waits between
steps, with and without it.

    python tools/async_bench.py [--model demo] [--sequences 1 16 64] [--threads 1 2] [--rounds 5] [--tokens 128]

For each number of threads there are two engine processes, each behind the wire that frontends use: one schedules in
turn, the other ahead, with --always also where steps are so short that an engine would not. They are asked one after
the other, so that whatever else the machine does befalls both alike. "idle" is time between steps in which nothing is
computed although there is work, as a share of the steps' own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import zmq
from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.wire import codec
from penstock.core.wire.engine import EngineStats, Enqueue, Failed, Hello, Ready, Refused, StepReport, decode_event
from penstock.engine.loop import SHORT

PROMPT = 32  # tokens
SILENCE_MS = 120_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one round: output tokens per second, and seconds between steps per second of them."""

    rate: float
    idle: float


class Served:
    """An engine in a process of its own."""

    def __init__(self, stack: ExitStack, context: zmq.Context[Any], threads: int, *how: Any) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp"))
        address = f"ipc://{folder}/engine"
        os.environ["OMP_NUM_THREADS"] = str(threads)  # the process inherits it
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(address, *how), daemon=True)
        process.start()
        stack.callback(process.terminate)
        self.socket = stack.enter_context(context.socket(zmq.DEALER))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._greeted = self._named = 0.0
        self._stats: EngineStats | None = None
        self._greet()
        ready = self._next()
        assert isinstance(ready, Ready)

    def ask(self, sequences: int, tokens: int) -> Figures:
        """As many at once, each until it has so many tokens."""
        while self._stats is None or self._stats.running:
            self._report()
        before, begin, left = self._stats, time.perf_counter(), sequences
        for i in range(sequences):
            self._named += 1
            params = SamplingParams(temperature=0.0)
            prompt = [(i * 31 + k) % 200 + 5 for k in range(PROMPT)]
            request = Request(
                id=f"r{self._named}", prompt=prompt, params=params, seed=i, stop_ids=frozenset(), max_tokens=tokens
            )
            self.socket.send(codec.encode(Enqueue(1, request)))
        while left:
            left -= sum(output.finish is not None for output in self._report().outputs)
        took, after = time.perf_counter() - begin, self._stats
        return Figures(sequences * tokens / took, (after.idle - before.idle) / (after.busy - before.busy))

    def _report(self) -> StepReport:
        event = self._next()
        while not isinstance(event, StepReport):
            event = self._next()
        self._stats = event.stats
        return event

    def _next(self) -> Any:
        if time.monotonic() > self._greeted + 1.0:
            self._greet()
        if not self.socket.poll(SILENCE_MS):
            raise SystemExit("the engine says nothing")
        event = decode_event(self.socket.recv())
        if isinstance(event, Failed | Refused):
            raise SystemExit(event.message)
        return event

    def _greet(self) -> None:
        self._greeted = time.monotonic()
        self.socket.send(codec.encode(Hello(sender="bench")))


def serve(address: str, model: str, ahead: bool, short: float) -> None:
    from penstock.core.clock import SystemClock
    from penstock.core.wire.engine import Peer
    from penstock.engine.build import EngineOptions, build_engine
    from penstock.engine.server import EngineServer
    from penstock.service.checkpoint import find_checkpoint

    clock, parent = SystemClock(), os.getppid()
    options = EngineOptions(
        model=str(find_checkpoint(model)), device="cpu", max_model_len=1024, kv_cache_memory=1 << 30,
        max_num_batched_tokens=512, prefix_cache=False, async_scheduling=ahead,
    )  # fmt: skip
    built = build_engine(options, clock)
    built.engine.short = short
    limits = built.engine.scheduler.limits
    ready = Ready(
        peer=Peer("engine", 1, ""),
        max_model_len=limits.max_model_len,
        vocab_size=built.runner.vocab_size,
        num_blocks=built.engine.scheduler.pool.num_blocks,
        token_budget=limits.token_budget,
        device="cpu",
        dtype=built.layout.dtype,
    )
    EngineServer(address, clock).run(built.engine, ready, orphaned=lambda: os.getppid() != parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--always", action="store_true", help="schedule ahead however short steps are")
    args = parser.parse_args()
    table = Table("threads", "sequences", "scheduling", "tokens/s", "idle", "tokens/s, ahead / in turn")
    for threads in args.threads:
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            short = 0.0 if args.always else SHORT
            engines = {ahead: Served(stack, context, threads, args.model, ahead, short) for ahead in (False, True)}
            for sequences in args.sequences:
                found: dict[bool, list[Figures]] = {False: [], True: []}
                for i in track(range(args.rounds + 1), f"{threads} threads, {sequences} sequences", transient=True):
                    for ahead, engine in engines.items():
                        figures = engine.ask(sequences, args.tokens)
                        if i:  # the first one pays for one-time work
                            found[ahead].append(figures)
                ratio = statistics.median(
                    there.rate / here.rate for here, there in zip(found[False], found[True], strict=True)
                )
                for ahead, rounds in found.items():
                    rate = statistics.median(f.rate for f in rounds)
                    idle = statistics.median(f.idle for f in rounds)
                    name = "ahead" if ahead else "in turn"
                    shown = f"{ratio:.3f}" if ahead else ""
                    table.add_row(str(threads), str(sequences), name, f"{rate:.0f}", f"{idle:.1%}", shown)
    Console().print(table)


if __name__ == "__main__":
    main()
