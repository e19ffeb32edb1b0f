"""kill -9 of the KV pool server's clients at any instant, and the KV pool server's own process."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from penstock.core.errors import Unavailable
from penstock.core.layout import KVLayout, attention_groups
from penstock.service.supervisor import STOP
from penstock.transfer.kv_pool_client import KVPoolClient, pool_status
from tests.helpers.waiting import eventually

LAYOUT = KVLayout(
    model="m",
    order="block",
    dtype="float32",
    groups=attention_groups((None,) * 1, 1, 8, "float32"),
    block_bytes=1 << 16,
)
QUOTA = 24
# an engine that never rests: it checks what it inherits and what it holds, then writes anew, publishes, holds what the
# other one offers, and gives back. A key is the content of its block, so that whatever is wrong is seen; one that
# begins with an odd byte is offered to others, and its block is never written again by whoever has it.
BUSY = """
import random, sys
from penstock.core.layout import KVGroup, KVLayout
from penstock.transfer import kv_pool_client, pool
path, name, incarnation = sys.argv[1], sys.argv[2], int(sys.argv[3])
layout = KVLayout(**%r)
print("imported", flush=True)
sys.stdin.readline()
pool = pool.shared_pool(path, name, incarnation)(layout, %d)
client, memory, records = pool.client, pool.memory, pool.client.records
def check(block, key):
    assert bytes(memory.block(block)) == key * (layout.block_bytes // len(key)), "a block is not what it was"
def offered(key):
    return key is not None and key[0] & 1
mine = dict.fromkeys(pool.blocks)
for record in pool.inherited:
    check(record.block, record.key)
    mine[record.block] = record.key
assert len(mine) == %d
print(len(pool.inherited), flush=True)
dice = random.Random(incarnation)
held = 0
while True:
    block = dice.choice(list(mine))
    move = dice.random()
    if move < 0.5 and not offered(mine[block]):
        records.clear(block)
        mine[block] = key = dice.randbytes(16)
        memory.block(block)[:] = key * (layout.block_bytes // len(key))
        records.put(block, key, dice.randbytes(16), memory.checksum(block))
    elif move < 0.7:
        record = records.get(dice.randrange(%d))
        if record is None or record.block in mine or not offered(record.key):
            continue
        if client.hold([(record.block, record.generation)], [block]):
            del mine[block]
            mine[record.block] = record.key
            check(record.block, record.key)
            held += 1
            if held == 1:
                print("held", flush=True)
    elif move < 0.8:
        if mine[block] is not None:
            check(block, mine[block])
    else:
        give = dice.sample(list(mine), dice.randint(1, 6))
        for given in give:
            del mine[given]
        mine.update(dict.fromkeys(client.exchange(give, len(give))))
"""


def layout_fields():
    return {name: getattr(LAYOUT, name) for name in LAYOUT.__slots__}


def start_server(path, parent=None, orphan_seconds=60.0):
    settings = {"path": path, "parent": parent or os.getpid(), "orphan_seconds": orphan_seconds}
    settings["heartbeat"] = f"{path}.heartbeat"
    settings |= {"log_level": "WARNING", "log_format": "text"}
    return subprocess.Popen([sys.executable, "-m", "penstock.cli.kv_pool", json.dumps(settings)])


def listening(path):
    try:
        pool_status(path)
    except Unavailable:
        return False
    return True


@pytest.fixture
def server(tmp_path):
    """(path, process), and whatever a test added to the list is killed."""
    path = str(tmp_path / "kv-pool")
    process = start_server(path, orphan_seconds=3.0)
    eventually(lambda: listening(path))
    yield path, process
    process.kill()
    process.wait()


def test_killed_at_any_instant_nothing_leaks(server):
    path, process = server
    open_files = pool_status(path).counts["open_files"]
    shm = set(os.listdir("/dev/shm"))
    code = BUSY % (layout_fields(), QUOTA, QUOTA, 2 * QUOTA)
    dice = random.Random(5)
    victims = dice.choices("ab", k=8)
    # all are started beforehand and attach when they are told to: imports may take longer than orphans wait
    spares = [
        subprocess.Popen(
            [sys.executable, "-c", code, path, name, str(dice.getrandbits(60))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in ("a", "b", *victims)
    ]  # fmt: skip
    processes, engines = list(spares), {}
    inherited, said = [], []

    def start(name):
        engine = engines[name] = spares.pop(0)
        engine.stdin.write("\n")
        engine.stdin.close()
        line = engine.stdout.readline()
        assert line, "it failed as it attached"
        inherited.append(int(line))

    def kill(name):
        assert engines[name].poll() is None, "it failed by itself"
        engines[name].kill()
        engines[name].wait()
        said.append(engines[name].stdout.read())
        engines[name].stdout.close()

    try:
        for spare in spares:
            assert spare.stdout.readline() == "imported\n", "it failed at start"
        start("a")
        start("b")
        for name in victims:
            time.sleep(dice.uniform(0.01, 0.08))  # the instant: any
            kill(name)
            assert pool_status(path).broken == ""
            start(name)
            assert pool_status(path).broken == ""
        assert max(inherited) > 0, "nothing was ever inherited"
        assert any(said), "nothing was ever held together"
        for name in engines:
            kill(name)
    finally:
        for engine in processes:
            engine.kill()
            engine.wait()
    # the orphans' time passes, and the pool goes with the last of them
    eventually(lambda: pool_status(path).counts["pools"] == 0)
    counts = pool_status(path).counts
    assert counts.pop("open_files") == open_files
    assert counts == {"free": 0, "orphaned": 0, "pools": 0, "clients": 0, "resident_bytes": 0}
    eventually(lambda: set(os.listdir("/dev/shm")) <= shm)  # other tests, beside this one, make and unlink theirs
    assert process.poll() is None


def test_asked_to_end_it_waits_for_its_clients(server):
    path, process = server
    client = KVPoolClient.attach(path, "a", 1, LAYOUT, 4)
    process.send_signal(STOP)
    block = client.exchange([], 1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.7)  # it looks twice a second
    assert client.exchange(block, 1)
    client.close()
    assert process.wait(20) == 0
    assert not os.path.exists(path)


def test_it_ends_with_its_parent(tmp_path):
    path = str(tmp_path / "kv-pool")
    process = start_server(path, parent=os.getpid() + 1)  # somebody who is not its parent
    assert process.wait(20) == 0
    assert not os.path.exists(path)


def test_a_path_that_cannot_be_listened_at_is_exit_code_2(server):
    path, _ = server
    assert start_server(path).wait(20) == 2


def test_a_killed_server_is_replaced_under_the_same_path(server):
    path, process = server
    client = KVPoolClient.attach(path, "a", 1, LAYOUT, 4)
    process.kill()
    process.wait()
    with pytest.raises(Unavailable):
        client.exchange([], 1)
    client.close()
    successor = start_server(path)
    eventually(lambda: listening(path))
    KVPoolClient.attach(path, "a", 2, LAYOUT, 4).close()
    successor.send_signal(STOP)
    assert successor.wait(20) == 0
