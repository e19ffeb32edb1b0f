"""Measures step times of a model on this machine with the real engine, and fits the step-time model to them.

An engine's process serves synthetic traffic that resembles no workload: from one sequence at a
time to many, with prompts and outputs of any length. So the result is a property of model and machine, not of a
workload, and excludes HTTP and frontends.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.cli.devices import MeasuredSteps
from penstock.cli.run_folder import run_folder
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.plan import StepWork
from penstock.sched.steptime import DeviceModel, ModelShape, StepTime

if TYPE_CHECKING:
    from penstock.core.request import Request

CONCURRENCY = (1, 2, 4, 8, 16, 32)  # sequences at once
TURNS = 3  # of all of these, so that other load on the machine affects all alike
SECONDS = 1.0  # for each in a turn
WARM_UP = 10  # first steps, which are not counted
LEAST_STEPS = 20  # in that time, or it takes longer
LONGEST = 2048  # tokens of a sequence
KV_BYTES = 1 << 30
PATIENCE_MS = 60_000  # for one step
ROUNDS = 10  # of the fit; it settles in fewer
SHORTEST_MS, LEAST_ERROR = 1e-3, 0.01  # against division by zero
ACCIDENT = 1.5  # times what steps like it take: something else ran in between
# what a step's time is made of here, besides its overhead: one bound of each part; see `fit`
TERMS = ("gemm:compute", "lm_head:compute", "prefill_attention:compute", "decode_attention:memory")
Step = tuple[StepWork, float]  # what was in it, and ms until the next one could begin


def measure_steps(model: Path, seconds: float = SECONDS) -> tuple[list[Step], ModelShape]:
    """A step's time includes reading messages, scheduling, computing, sampling, bookkeeping, and reporting.

    Args:
        seconds: for each number of sequences in each turn.

    Raises:
        ConfigError: a model that cannot be served.
        Unavailable: the engine's process ended, or says nothing.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with run_folder() as folder:
        address = f"ipc://{folder}/engine"
        process = spawn.Process(target=_serve, args=(address, str(model), theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            answer = ours.recv()
            if isinstance(answer, str):
                raise ConfigError(answer, "model")
            shape, longest, vocab_size = answer
            _keep_busy(address, seconds, min(LONGEST, longest), vocab_size)
            return ours.recv()[WARM_UP:], shape
        except EOFError:
            raise Unavailable("the engine that was to be measured has ended") from None
        finally:
            process.join(10)
            process.kill()


# --- the engine's process


def _serve(address: str, model: str, pipe: Connection) -> None:
    """Sends what it serves, or its error; and at shutdown its steps' times."""
    from penstock.core.clock import SystemClock
    from penstock.core.wire.engine import Peer, Ready
    from penstock.engine.build import EngineOptions, build_engine
    from penstock.engine.server import EngineServer
    from penstock.engine.watched import WatchedEngine

    clock, parent = SystemClock(), os.getppid()
    try:
        options = EngineOptions(model=model, kv_cache_memory=KV_BYTES, prefix_cache=False, async_scheduling=False)
        built = build_engine(options, clock)
    except ConfigError as error:
        pipe.send(str(error))
        return
    limits = built.engine.scheduler.limits
    ready = Ready(
        peer=Peer("engine", 1, ""),
        max_model_len=limits.max_model_len,
        vocab_size=built.runner.vocab_size,
        num_blocks=built.engine.scheduler.kv.as_whole(built.engine.scheduler.pool.num_blocks),
        token_budget=limits.token_budget,
        device=str(built.runner.device),
        dtype=built.layout.dtype,
    )
    server, engine = EngineServer(address, clock), WatchedEngine(built.engine, clock)
    pipe.send((built.shape, limits.max_model_len, built.runner.vocab_size))
    server.run(engine, ready, orphaned=lambda: os.getppid() != parent)
    pipe.send(engine.taken)
    server.close()
    built.close()


# --- its frontend


def _keep_busy(address: str, seconds: float, longest: int, vocab_size: int) -> None:
    """Keep a given number of sequences running."""
    import zmq

    from penstock.core.clock import SystemClock
    from penstock.core.wire import codec
    from penstock.core.wire.engine import Enqueue, Failed, Hello, Refused, Shutdown, StepReport, decode_event

    rng, clock = np.random.default_rng(0), SystemClock()
    names, there = map(str, count()), 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        greeted = -math.inf
        for sequences in CONCURRENCY * TURNS:
            begin, done = clock.now(), 0
            while there > sequences or clock.now() < begin + seconds or done < LEAST_STEPS:
                if there > sequences:  # of the last turn
                    begin, done = clock.now(), 0
                if clock.now() > greeted + 1.0:
                    greeted = clock.now()
                    socket.send(codec.encode(Hello(sender="doctor")))
                for _ in range(sequences - there):
                    socket.send(codec.encode(Enqueue(1, _draw(next(names), longest, vocab_size, rng))))
                there = max(there, sequences)
                if not socket.poll(PATIENCE_MS):
                    raise Unavailable("the engine that was to be measured says nothing")
                event = decode_event(socket.recv())
                if isinstance(event, Refused | Failed):
                    raise Unavailable(f"the engine that was to be measured refuses: {event.message}")
                if isinstance(event, StepReport):
                    done += event.step_tokens > 0
                    there -= sum(output.finish is not None for output in event.outputs)
        socket.send(codec.encode(Shutdown()))


def _draw(name: str, longest: int, vocab_size: int, rng: np.random.Generator) -> Request:
    from penstock.core.request import Request
    from penstock.core.sampling import SamplingParams

    prompt = int(np.clip(rng.lognormal(math.log(longest / 10), 1.0), 2, longest * 3 // 4))
    output = int(np.clip(rng.lognormal(math.log(longest / 50), 0.8), 2, longest // 4))
    ids = rng.integers(0, vocab_size, prompt).tolist()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return Request(id=name, prompt=ids, params=params, seed=0, stop_ids=frozenset(), max_tokens=output)


# --- what it comes to


def fit(device: DeviceModel, steps: Sequence[Step], shape: ModelShape) -> tuple[DeviceModel, MeasuredSteps]:
    """The device with its overhead, and factors with which the mean error of `StepTime` over these steps is 0, but for
    accidents.

    The time is taken to be linear in what is in a step. Of parts whose bound by memory does not grow with it (reading
    the weights) that bound is left out: every step has it, so it is in the overhead. That is exact for models whose
    rows cost more than their weights, as on a CPU, and blurs the knee where a batch begins to be bound by arithmetic.
    """
    times = StepTime(device, shape)
    columns = np.array([[1.0, *(_term(times, work, term) for term in TERMS)] for work, _ in steps])
    measured = np.array([ms for _, ms in steps])
    values = _settle(columns, measured, absolute=True)
    predicted = np.maximum(columns @ values, SHORTEST_MS)
    kept = measured < ACCIDENT * predicted
    values = _settle(columns[kept], measured[kept], absolute=False)
    predicted = np.maximum(columns @ values, SHORTEST_MS)
    factors = dict(zip(TERMS, values[1:].tolist(), strict=True))
    factors |= {term.partition(":")[0] + ":memory": 0.0 for term in TERMS if term.endswith(":compute")}
    factors["decode_attention:compute"] = 0.0
    device = replace(device, overhead_ms=float(values[0]))
    noise = float(np.std(np.log(measured[kept] / predicted[kept])))
    return device, MeasuredSteps(shape=shape, factors=factors, noise=noise, count=len(steps))


def _settle(columns: np.ndarray, measured: np.ndarray, *, absolute: bool) -> np.ndarray:
    """Values for which columns @ values is what was measured.

    Args:
        absolute: the sum of relative errors is made small, which accidents hardly move; else that of their squares.
    """
    predicted, weights = measured, np.ones(len(measured))
    for _ in range(ROUNDS):
        # relative to what is predicted: relative to what was measured, long steps would count for too little
        values = _least_squares(columns * (weights / predicted)[:, None], weights * measured / predicted)
        predicted = np.maximum(columns @ values, SHORTEST_MS)
        if absolute:
            weights = 1 / np.sqrt(np.maximum(np.abs(measured / predicted - 1), LEAST_ERROR))
    return values


def _term(times: StepTime, work: StepWork, term: str) -> float:
    """ms that a factor is multiplied with."""
    part, _, bound = term.partition(":")
    roofline = times.parts(*work)[part]
    return roofline.compute_ms if bound == "compute" else roofline.memory_ms


def _least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """None of them negative: a term that would be is left out."""
    values = np.zeros(columns.shape[1])
    kept = np.ones(columns.shape[1], bool)
    while kept.any():
        found = np.linalg.lstsq(columns[:, kept], target, rcond=None)[0]
        if (found >= 0).all():
            values[kept] = found
            break
        kept[np.flatnonzero(kept)[found.argmin()]] = False
    return values
