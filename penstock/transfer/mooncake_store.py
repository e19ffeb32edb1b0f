"""Blocks in Mooncake Store: in the memory of many hosts, of which its master knows what lies where.

    mooncake_master --rpc_port=50051        # ships with the wheel, as `mooncake_client`, which only gives memory

The master evicts what was used longest ago, and forgets what a host had that it no longer hears from. It has all in its
memory: one that starts again has nothing to say, and engines put their blocks anew. Records go between our memory and
that of their owner directly, by Mooncake's transfer engine; whoever reaches its ports can read and write them.

Of a record that was read often here, a replica is asked for in the memory that this engine gives: hot blocks are where
they are used, and still there when their first owner has gone (xLLM, section 3.4).
"""

from __future__ import annotations

import ctypes
import socket
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.host_port import join_host_port, split_host_port
from penstock.core.sizes import size
from penstock.transfer.memory import PoolMemory
from penstock.transfer.mooncake import HOW_TO_INSTALL
from penstock.transfer.store_url import OPTION, StoreURL

SEGMENT = 1 << 30  # bytes by default
REPLICAS, HOT = 2, 3
COUNTED = 1 << 16  # keys whose reads are counted
REACHED_WITHIN = 2.0  # seconds
# of Mooncake's error codes, those by which nothing is known of a key: no connection to the master, no answer from it
UNREACHED = (-900, -901)
INVALID = -600
PROTOCOLS = ("tcp", "rdma")
RDMA_DEVICES = Path("/sys/class/infiniband")


def missing() -> str:
    """Why there is no Mooncake Store here; "" when there is."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"{error}; it needs {HOW_TO_INSTALL}"
    return ""


class MooncakeStore:
    """
    Args:
        master: "HOST:PORT".
        host: by which others reach the memory that is given; "" is the address from which the master is reached.
        segment: bytes of memory that this process gives to the store, and takes with it when it ends.
        replicas: of a block that was got `hot` times here.
        protocol: "tcp" or "rdma"; devices: those of RDMA, separated by commas, or "" for all.
        metadata: where Mooncake's engines find each other; "P2PHANDSHAKE" needs no server.
        disk: folder in which what lies in the segment is kept too, as the master orders; "" for none.
    """

    threads = 1
    batch = 1 << 10

    def __init__(
        self,
        master: str,
        namespace: str,
        *,
        host: str = "",
        segment: int = SEGMENT,
        replicas: int = REPLICAS,
        hot: int = HOT,
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        disk: str = "",
    ) -> None:
        self._master, self._namespace, self._host, self._segment = master, namespace, host, segment
        self._replicas, self._hot = replicas, hot
        self._way = metadata, protocol, devices
        self._disk = disk
        self._reads: OrderedDict[bytes, int] = OrderedDict()
        self._store: Any = None

    @classmethod
    def of_url(cls, url: StoreURL, namespace: str) -> MooncakeStore:
        try:
            host, port = split_host_port(url.host)
        except ValueError as error:
            raise url.wrong(f"mooncake://HOST:PORT of a mooncake_master ({error})") from None
        if url.path not in ("", "/"):
            raise url.wrong("mooncake://HOST:PORT without a path")
        url.option("persistence", _no_persistence, "")
        return cls(
            join_host_port(host, port),
            namespace,
            host=url.option("host", str, ""),
            segment=url.option("segment", _segment, SEGMENT),
            replicas=url.option("replicas", _count, REPLICAS),
            hot=url.option("hot", _count, HOT),
            protocol=url.option("protocol", _protocol, "tcp"),
            devices=url.option("devices", str, ""),
            metadata=url.option("metadata", str, "P2PHANDSHAKE"),
            disk=url.option("disk", str, ""),
        )

    def open(self, memory: PoolMemory) -> None:
        if reason := missing():
            raise ConfigError(f"{OPTION}: {reason}", OPTION)
        if self._way[1] == "rdma" and not any(RDMA_DEVICES.glob("*")):  # Mooncake would begin, and then bring nothing
            raise ConfigError(f"{OPTION}: protocol=rdma, allowed here is tcp: there is no RDMA device", OPTION)
        from mooncake.store import MooncakeDistributedStore

        address = self._address_here()
        host = self._host or address
        self._memory, self._store = memory, MooncakeDistributedStore()
        # its destructor waits for the master, half a minute where that is dead, and all of Python with it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
        metadata, protocol, devices = self._way
        status = self._store.setup(
            host,
            metadata,
            self._segment,
            0,  # bytes for copies, of which there are none: all goes between our memory and that of others
            protocol,
            devices,
            self._master,
            None,
            bool(self._disk),
            self._disk,
        ) or self._store.register_buffer(memory.address, memory.num_blocks * memory.block_bytes)
        if status == INVALID:
            raise ConfigError(
                f"{OPTION}: Mooncake refuses host={host}, segment of {self._segment / 2**30:.1f} GiB, "
                f"protocol={protocol}, devices={devices}, metadata={metadata} or disk={self._disk} (status {status})",
                OPTION,
            )
        if status:
            raise Unavailable(f"Mooncake cannot begin (status {status})")
        self._here = self._store.get_hostname()

    def write(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        return [status == 0 for status in self._known(self._store.batch_put_from(*self._arguments(keys, slots)))]

    def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        sizes = self._known(self._store.batch_get_into(*self._arguments(keys, slots)))
        for key, got in zip(keys, sizes, strict=True):
            if got == self._memory.block_bytes:
                self._count(key)
            elif got >= 0 or got == INVALID:  # of another length; as long as it is there, none is put in its place
                self.drop(key)
        return [got == self._memory.block_bytes for got in sizes]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [there == 1 for there in self._known(self._store.batch_is_exist([self._name(key) for key in keys]))]

    def drop(self, key: bytes) -> None:
        self._store.remove(self._name(key), True)

    def close(self) -> None:
        """Not where the master does not answer: closing it would wait for that, and all of Python with it."""
        if self._store is not None:
            self._address_here()  # which says at once that there is none
            self.has([bytes(1)])
            self._store.close()

    def _name(self, key: bytes) -> str:
        return f"penstock/{self._namespace}/{key.hex()}"

    def _arguments(self, keys: Sequence[bytes], slots: Sequence[int]) -> tuple[list[str], list[int], list[int]]:
        names, bytes_each = [self._name(key) for key in keys], self._memory.block_bytes
        return names, [self._memory.address + slot * bytes_each for slot in slots], [bytes_each] * len(keys)

    def _known(self, statuses: list[int]) -> list[int]:
        if any(status in UNREACHED for status in statuses):
            raise Unavailable(f"the mooncake_master at {self._master} does not answer")
        return statuses

    def _count(self, key: bytes) -> None:
        """It was read; have a replica made here when it is hot."""
        count = self._reads[key] = self._reads.pop(key, 0) + 1
        if len(self._reads) > COUNTED:
            self._reads.popitem(last=False)
        if count != self._hot or not self._segment:
            return
        name = self._name(key)
        if len(self._store.get_replica_desc(name)) < self._replicas:
            self._store.create_copy_task(name, [self._here])  # by others, in their time

    def _address_here(self) -> str:
        """That from which the master is reached. Raises Unavailable where it is not."""
        try:
            with socket.create_connection(split_host_port(self._master), REACHED_WITHIN) as probe:
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            raise Unavailable(f"no mooncake_master answers at {self._master}: {error}") from error


def _protocol(text: str) -> str:
    if text not in PROTOCOLS:
        raise ValueError(", ".join(PROTOCOLS))
    return text


def _segment(text: str) -> int:
    return 0 if text == "0" else size(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError("a number from 1 on")
    return int(text)


def _no_persistence(text: str) -> str:
    raise ValueError(
        "none of an engine's: mooncake_master --enable_offload=true keeps blocks on disk as they are put (eager), with "
        "--offload_on_evict=true when they have to leave memory (lazy), and without them not; disk=FOLDER says where"
    )
