"""A KV pool server in a thread, and what tests write through its clients."""

import contextlib
import threading

from penstock.core.clock import ManualClock
from penstock.core.layout import KVLayout, attention_groups
from penstock.kv.keys import KEY_BYTES
from penstock.transfer.kv_pool_client import KVPoolClient, pool_status
from penstock.transfer.kv_pool_server import KVPoolServer

LAYOUT = KVLayout(
    model="m", order="block", dtype="float32", groups=attention_groups((None,) * 1, 1, 8, "float32"), block_bytes=4096
)
ROOT = b"r" * KEY_BYTES
EMPTY = {"free": 0, "orphaned": 0, "pools": 0, "clients": 0, "resident_bytes": 0}
BLOCKS = 1 << 20  # room in the KV pool server's pool for blocks of this size


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


class PoolServer:
    """A server in a thread, and everything that a test attached to it."""

    def __init__(self, path):
        self.path = path
        self.clock = ManualClock()
        self.server = KVPoolServer(path, orphan_seconds=60, clock=self.clock)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stopped.is_set, 0.005))
        self._thread.start()
        self._open = contextlib.ExitStack()
        self._lives = 0

    def attach(self, name, quota=8, layout=LAYOUT, incarnation=None):
        self._lives += 1
        client = KVPoolClient.attach(self.path, name, incarnation or self._lives, layout, quota)
        self._open.callback(client.close)
        return client

    def counts(self):
        report = pool_status(self.path)
        assert report.broken == ""
        report.counts.pop("open_files")
        return report.counts

    def blocks(self):
        return {state: n for state, n in self.counts().items() if state not in ("pools", "clients", "resident_bytes")}

    def stop(self):
        self._open.close()
        self._stopped.set()
        self._thread.join(20)
        self.server.close()


def write(client, block, number, parent=ROOT):
    """Fill a block and publish it."""
    client.memory.block(block)[:] = bytes([number % 251 + 1]) * LAYOUT.block_bytes
    client.records.put(block, key(number), parent, client.memory.checksum(block))


def write_chain(client, blocks, first=1):
    """Publish blocks as one sequence, head first."""
    parent = ROOT
    for number, block in enumerate(blocks, first):
        write(client, block, number, parent)
        parent = key(number)


def rest_of(client):
    """What it holds as (block, generation)."""
    return [(r.block, r.generation) for r in client.inherited]
