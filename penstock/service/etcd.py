"""etcd as the registry of a deployment: who is there, under leases, and which master leads.

    PREFIX/instances/NAME   an `Endpoint` as JSON, under its launcher's lease
    PREFIX/master           address of the master that leads, under its lease
    PREFIX/settings         what the files of all hosts have in common, as JSON (`deployment.Common`)

Only that goes there: loads, decisions and tokens go by message. Everybody talks to one member and goes on to the next
when it fails; what was known stays known meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.host_port import join_host_port, split_host_port
from penstock.core.wire.engine import LEASE
from penstock.core.wire.master import Endpoint
from penstock.service.deployment import Common
from penstock.service.policies import BUNDLES
from penstock.service.registry import LocalRegistry

T = TypeVar("T")
log = logging.getLogger("penstock.registry")
ADDRESS = re.compile(r"etcd://([^/]+)(?:/([\w.-]+))?")
TIMEOUT = 2.0  # seconds for an answer
RENEW = 0.5  # seconds between two renewals of a lease
READ_AGAIN = 2.0  # seconds between two readings of what is watched: a member may be cut off from the others
RETRY = 0.2  # seconds until the next member is asked
MASTER, INSTANCES, SETTINGS = "master", "instances/", "settings"
PATIENCE = 10.0  # seconds for what has to be read or written before anything starts


def read_etcd_address(address: str) -> tuple[list[tuple[str, int]], str]:
    """Host and port of each member, and the deployment's name. ValueError when it has another form."""
    found = ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is no etcd://HOST:PORT/NAME")
    return [split_host_port(member) for member in found[1].split(",")], found[2] or "default"


class Etcd:
    """
    Args:
        address: etcd://HOST:PORT,HOST:PORT,.../NAME with any number of members; NAME tells deployments apart.
    """

    def __init__(self, address: str) -> None:
        try:
            self._members, name = read_etcd_address(address)
        except ValueError:
            allowed = "etcd://HOST:PORT,HOST:PORT,.../NAME"
            raise ConfigError(f"cluster.registry: {address!r}, allowed is {allowed}", "registry") from None
        try:
            import aetcd
        except ImportError:
            raise ConfigError("cluster.registry: etcd needs the package aetcd (penstock[etcd])", "registry") from None
        self._client_of = aetcd.Client
        self._prefix = f"/penstock/{name}/".encode()
        self._at = 0
        self._absent = ""

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        """To a member, which may be another one each time. What fails meanwhile ends it, and is told once."""
        host, port = self._members[self._at % len(self._members)]
        client = self._client_of(f"[{host}]" if ":" in host else host, port, timeout=TIMEOUT)
        try:
            await client.connect()
            yield client
        except Exception as error:  # the library's errors have no common root
            self._at += 1
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if self._absent != why:
                log.warning("etcd at %s: %s", join_host_port(host, port), why)
            self._absent = why
            await asyncio.sleep(RETRY)
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), TIMEOUT)

    async def follow(self, under: str, changed: Callable[[Mapping[str, bytes]], None]) -> None:
        """Call `changed` with everything under a key, by the rest of its key, at first and whenever it changes."""
        prefix, known = self._prefix + under.encode(), None
        while True:
            async with self._client() as client:
                news = asyncio.Event()
                watch = await client.watch_prefix(prefix)
                reading = asyncio.create_task(_announce(watch, news))
                try:
                    while True:
                        news.clear()
                        there = await client.get_prefix(prefix)
                        found = {pair.key[len(prefix) :].decode(): pair.value for pair in there}
                        if found != known:
                            known = found
                            changed(found)
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(READ_AGAIN):
                                await news.wait()
                finally:
                    reading.cancel()

    async def read(self, key: str) -> bytes | None:
        """What is there now."""
        while True:
            async with self._client() as client:
                found = await client.get(self._prefix + key.encode())
                return None if found is None else bytes(found.value)

    async def write(self, key: str, value: bytes) -> None:
        """Put it there for good."""
        while True:
            async with self._client() as client:
                await client.put(self._prefix + key.encode(), value)
                return

    async def keep(self, wanted: Callable[[], Mapping[str, bytes]]) -> None:
        """Keep what `wanted` says under a lease, until cancelled; then it is removed."""
        lease: int | None = None
        put: dict[str, bytes] = {}
        try:
            while True:
                async with self._client() as client:
                    while True:
                        if lease is None or (await client.refresh_lease(lease)).TTL <= 0:
                            lease, put = (await client.lease(round(LEASE))).id, {}
                        current = dict(wanted())
                        for key in put.keys() - current.keys():
                            await client.delete(self._prefix + key.encode())
                        for key, value in current.items():
                            if put.get(key) != value:
                                await client.put(self._prefix + key.encode(), value, lease=lease)
                        put = current
                        await asyncio.sleep(RENEW)
        finally:
            if lease is not None:
                await self.end(lease)

    async def elect(self, address: str) -> int:
        """Wait until this master leads; returns its lease.

        Args:
            address: of this master.
        """
        key, lease = self._prefix + MASTER.encode(), None
        while True:
            async with self._client() as client:
                while True:
                    if lease is None or (await client.refresh_lease(lease)).TTL <= 0:
                        lease = (await client.lease(round(LEASE))).id
                    put = client.transactions.put(key, address.encode(), lease)
                    free = client.transactions.version(key) == 0
                    if (await client.transaction(compare=[free], success=[put], failure=[]))[0]:
                        return int(lease)
                    await asyncio.sleep(RENEW)

    async def stay(self, lease: int) -> None:
        """Renew a lease; returns when it is lost, or would be before this could be known."""
        clock = asyncio.get_running_loop().time
        renewed = clock()
        while clock() - renewed < LEASE - TIMEOUT:
            async with self._client() as client:
                while (await client.refresh_lease(lease)).TTL > 0:
                    renewed = clock()
                    await asyncio.sleep(RENEW)
                return

    async def end(self, lease: int) -> None:
        """Give a lease back: who waits for it need not wait for its end."""
        async with self._client() as client:
            await client.revoke_lease(lease)


async def _announce(watch: Any, news: asyncio.Event) -> None:
    with contextlib.suppress(Exception):  # the next reading finds it out
        async for _ in watch:
            news.set()
    news.set()


def read_settings(address: str) -> Common | None:
    """What the deployment's files have in common; None where nobody has begun it. ConfigError when no member
    answers."""
    return _in_time(_read_settings(Etcd(address)), address)


def write_settings(address: str, common: Common) -> None:
    """Say that for all hosts. ConfigError when no member answers, or a master leads by other settings."""
    _in_time(_write_settings(Etcd(address), common), address)


async def _read_settings(etcd: Etcd) -> Common | None:
    found = await etcd.read(SETTINGS)
    if found is None:
        return None
    try:
        common = msgspec.json.decode(found, type=Common)
        if common.policy not in BUNDLES:
            raise ValueError(f"policy: {common.policy!r}")
    except ValueError as error:
        raise ConfigError(f"cluster.registry: its settings are of another version of penstock: {error}") from None
    return common


async def _write_settings(etcd: Etcd, common: Common) -> None:
    if await etcd.read(MASTER) is not None:
        there = await _read_settings(etcd)
        if there is not None and (why := common.difference(there)):
            raise ConfigError(
                f"{why}, in the deployment that runs; allowed is the same, until its masters have stopped"
            )
    await etcd.write(SETTINGS, msgspec.json.encode(common))


def _in_time(work: Coroutine[Any, Any, T], address: str) -> T:
    try:
        return asyncio.run(asyncio.wait_for(work, PATIENCE))
    except TimeoutError:
        raise ConfigError(f"cluster.registry: {address!r}, no member answers for {PATIENCE:g} s", "registry") from None


class EtcdRegistry(LocalRegistry):
    """A master's.

    Attributes:
        loaded: set once it was read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loaded = asyncio.Event()

    def read(self, found: Mapping[str, bytes]) -> None:
        """Take what is under `INSTANCES`."""
        there = {}
        for name, value in found.items():
            with contextlib.suppress(msgspec.DecodeError):
                there[name] = msgspec.json.decode(value, type=Endpoint)
        for name in self.instances.keys() - there.keys():
            self.lapse(name, "its lease in etcd has ended")
        for endpoint in there.values():
            self.put(endpoint)
        self.loaded.set()


class EtcdHost:
    """A launcher's: keeps its instances registered, in a thread, and knows the master that leads.

    Attributes:
        instances: to be registered; replaced as a whole.
        master: its address; "" while there is none.
    """

    def __init__(self, address: str) -> None:
        self.instances: list[Endpoint] = []
        self.master = ""
        self._etcd = Etcd(address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="etcd", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._thread.start()

    def close(self) -> None:
        """Remove what is registered."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])
        self._thread.join(2 * TIMEOUT)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._work())

    async def _work(self) -> None:
        work = (self._etcd.keep(self._wanted), self._etcd.follow(MASTER, self._follow_master))
        self._tasks = [asyncio.create_task(each) for each in work]
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _wanted(self) -> Mapping[str, bytes]:
        return {INSTANCES + endpoint.name: msgspec.json.encode(endpoint) for endpoint in self.instances}

    def _follow_master(self, found: Mapping[str, bytes]) -> None:
        self.master = found.get("", b"").decode()
