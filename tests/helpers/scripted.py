"""Engines and masters that say what a test tells them to say."""

from __future__ import annotations

import asyncio

from penstock.core.layout import KVLayout
from penstock.core.request import TokenOutput
from penstock.core.wire.engine import Cancel, EngineStats, Enqueue, Peer, Ready, Snapshot, StepReport

STATS = EngineStats(
    running=1, waiting=0, used_blocks=1, num_blocks=4, preemptions=0, prefix_queries=0, prefix_hits=0, steps=1
)
LAYOUT = KVLayout(model="m", order="block", dtype="float32", layers=1, kv_heads=1, head_dim=8, block_bytes=4096)


def ready(name="engine-0", life=1, role="any", layout=LAYOUT, address="unix:/somewhere", **changes) -> Ready:
    values = {"max_model_len": 100, "vocab_size": 4096, "num_blocks": 4, "token_budget": 64} | changes
    values = {"device": "cpu", "dtype": "float32", "root_key": b"root"} | values
    return Ready(peer=Peer(name, life, address), role=role, layout=layout, **values)


def snapshot(life=1, sequence=1, role="any", **changes) -> Snapshot:
    counts = ("running", "waiting", "leaving", "waiting_tokens", "prefill_tokens", "running_tokens")
    values = dict.fromkeys((*counts, "role_generation", "free_blocks", "reserved_blocks", "num_blocks"), 0)
    values |= {"ttft_ms": None, "tpot_ms": None, "interval_ms": None, "factors": {}, "draining": False}
    values |= {"token_budget": 64}
    return Snapshot(incarnation=life, sequence=sequence, role=role, **(values | changes))


class ScriptedChannel:
    """A wire to an engine."""

    def __init__(self, name="engine-0", life=1) -> None:
        self.name, self.life = name, life
        self.sent: list = []
        self.events: asyncio.Queue = asyncio.Queue()
        self.closed = False

    def send(self, command) -> None:
        self.sent.append(command)

    async def receive(self):
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> None:
        self.closed = True

    def say(self, event) -> None:
        self.events.put_nowait(event)

    def report(self, *outputs: TokenOutput) -> None:
        self.say(StepReport(self.life, list(outputs), STATS, 1))

    def enqueued(self):
        return [c.request for c in self.sent if isinstance(c, Enqueue)]

    def cancelled(self):
        return [r for c in self.sent if isinstance(c, Cancel) for r in c.request_ids]
