"""Engines and masters that say what a test tells them to say."""

from __future__ import annotations

import asyncio

from penstock.core.layout import KVLayout, attention_groups
from penstock.core.request import TokenOutput
from penstock.core.wire.engine import Cancel, EngineStats, Enqueue, Peer, Ready, Snapshot, StepReport

STATS = EngineStats(
    running=1, waiting=0, used_blocks=1, num_blocks=4, preemptions=0, prefix_queries=0, prefix_hits=0, steps=1
)
LAYOUT = KVLayout(
    model="m", order="block", dtype="float32", groups=attention_groups((None,) * 1, 1, 8, "float32"), block_bytes=4096
)


def ready(name="engine-0", life=1, role="any", layout=LAYOUT, address="unix:/somewhere", **changes) -> Ready:
    values = {"max_model_len": 100, "vocab_size": 4096, "num_blocks": 4, "token_budget": 64} | changes
    values = {"device": "cpu", "dtype": "float32", "root_key": b"root"} | values
    return Ready(peer=Peer(name, life, address), role=role, layout=layout, **values)


def snapshot(life=1, sequence=1, role="any", **changes) -> Snapshot:
    counts = ("running", "waiting", "migrating", "waiting_tokens", "prefill_tokens", "running_tokens")
    values = dict.fromkeys((*counts, "role_generation", "free_blocks", "reserved_blocks", "num_blocks"), 0)
    values |= {"ttft_ms": None, "tpot_ms": None, "interval_ms": None, "factors": {}, "draining": False}
    values |= {"token_budget": 64}
    return Snapshot(incarnation=life, sequence=sequence, role=role, **(values | changes))


class ScriptedChannel:
    """The other side of a channel. What it says arrives in the next turn of the event loop, once the channel is open.

    Attributes:
        silent: whether all that it said has arrived.
    """

    def __init__(self, name="engine-0", life=1) -> None:
        self.name, self.life = name, life
        self.sent: list = []
        self.closed = False
        self._said: list = []
        self._handle = None

    @property
    def silent(self) -> bool:
        return not self._said

    def open(self, handle) -> None:
        self._handle = handle
        asyncio.get_running_loop().call_soon(self._arrive)

    def send(self, command) -> None:
        self.sent.append(command)

    def close(self) -> None:
        self.closed = True

    def say(self, event) -> None:
        self._said.append(event)
        if self._handle is not None:
            asyncio.get_running_loop().call_soon(self._arrive)

    def _arrive(self) -> None:
        while self._said and not self.closed:
            self._handle(self._said.pop(0))

    def report(self, *outputs: TokenOutput) -> None:
        self.say(StepReport(self.life, list(outputs), STATS, 1))

    def enqueued(self):
        return [c.request for c in self.sent if isinstance(c, Enqueue)]

    def cancelled(self):
        return [r for c in self.sent if isinstance(c, Cancel) for r in c.request_ids]
