"""Hand-made moments of a cluster, and what was recorded of them."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.core.wire.master import Outcome
from penstock.sched.cluster import ClusterView, Decision, Demand, InstanceLoad, Later, Migration, Move
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.service.recorder import FlightRecorder

TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])


def load(name, **changes):
    defaults = {"times": TIMES, "max_model_len": 16384, "num_blocks": 1000, "free_blocks": 1000}
    return InstanceLoad(name=name, **{**defaults, **changes})


def demand(request_id, frontend="f", **changes):
    return Demand(**{"key": (frontend, request_id), "prompt_tokens": 1000, "max_tokens": 100, **changes})


def decision(demand, prefill, decode=None, costs=None, **changes):
    held = {"prefill": costs or {prefill: 1.0}}
    return Decision(
        key=demand.key,
        prefill=prefill,
        decode=decode,
        policy="least-loaded",
        reason="colocated",
        costs=held,
        **changes,
    )


def outcome(request_id, ttft_ms=50.0):
    return Outcome(request_id, ttft_ms=ttft_ms, tpot_ms=8.0, queue_ms=2.0, tokens=100)


def an_afternoon(recorder: FlightRecorder) -> None:
    """Two instances, a busy and a free one. The first request goes to the busy one; the second waits, asks for two
    outputs, and is handed over; the third is cancelled."""
    first = demand("one-0badc0de", arrived=9.99, ttft=0.5)
    busy = load("busy", requests=4, decoding=2, pending_tokens=4000, held_tokens=6000, free_at=10.3, idle_at=10.3)
    free = load("free", role="prefill", peers={"busy"}, unlinked={"far": "its layout is another"})
    view = ClusterView(now=10.0, instances=(busy, free), queue=(first,))
    costs = {"busy": 1.0, "free": 2.0}
    chosen = decision(first, "busy", costs=costs, predicted_ttft=0.4)
    recorder.decided(10.0, view, first, "one-0badc0de", "f", chosen)

    outputs = [demand(f"two-0-12345678-{i}", arrived=10.1, hits={"free": 640}) for i in range(2)]
    for number, output in enumerate(outputs):
        recorder.held(10.1, output, f"two-0-12345678-{number}", "f", Later(at=10.15))
    for number, output in enumerate(outputs):
        move = Move(name="free", role="prefill", reason="it is needed there")
        view = ClusterView(now=10.2, instances=(replace(busy, requests=5), free), queue=tuple(outputs[number:]))
        chosen = decision(output, "free", "busy", costs, moves=(move,))
        chosen = replace(chosen, reason="hand-off", costs={**chosen.costs, "decode": {"busy": 3.5}})
        recorder.moved(10.2, move)
        recorder.decided(10.2, view, output, f"two-0-12345678-{number}", "f", chosen)
    recorder.ended(10.45, "one-0badc0de", "f", outcome("one-0badc0de", ttft_ms=350.0))
    recorder.relocated(10.46, "busy", Migration(key=("f", "two-0-12345678-1"), to="busy", reason="stays"))
    recorder.relocated(10.47, "busy", Migration(key=("f", "two-0-12345678-1"), to="free", reason="slow: it [is]"))
    recorder.moved(10.5, Move(name="busy", role="decode", reason="it decodes"))
    for number in range(2):
        recorder.ended(11.0, f"two-0-12345678-{number}", "f", outcome(f"two-0-12345678-{number}"))

    third = demand("three-aaaaaaaa", "g", arrived=11.5, offline=True, exclude=frozenset({"busy"}))
    view = ClusterView(now=11.5, instances=(busy, free), offline=(third,))
    recorder.decided(11.5, view, third, "three-aaaaaaaa", "g", decision(third, "free"))
    recorder.ended(11.6, "three-aaaaaaaa", "g", None)
