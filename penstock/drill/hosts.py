"""Hosts that are namespaces of this machine: their cables can be cut, and their disks can be full or gone.

A namespace lives as long as its processes. Each host has one that only waits for its standard input to end, which it
does with this process, whatever ends that. With the last process of a host its cable and its mounts are gone. Of this
machine itself nothing is changed but for one link to them, which goes with the switch at its other end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.core.errors import PenstockError

NET = "198.18."  # for tests of networks (RFC 2544): nobody else's
LINK = "drill"  # begins the name of the one between this machine and hosts
LAST = 254  # this machine's number, in the hosts' network
NOBODY = "02:00:00:00:00:00"  # a link address that no host has
ROOM = 1 << 30  # bytes of a host's disk, of which only those that are used take memory
ATTEMPTS = 20  # at making a disk as small as what is on it, while that grows
EMPTY = "size=4k"  # of what is mounted in the place of a folder that is away


class Space:
    """Namespaces that a process keeps, which ends with this one.

    Args:
        kinds: "net" or "mount", or both. Raises PenstockError where that is not allowed.

    Attributes:
        enter: the first words of a command line, with which the rest runs there.
    """

    def __init__(self, *kinds: str) -> None:
        flags = [f"--{kind}" for kind in kinds]
        try:
            self._keeper = subprocess.Popen(
                ["unshare", *flags, "--", "cat"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # ^C is the drill's
            )  # fmt: skip
        except OSError as error:
            raise PenstockError(f"unshare: {error.strerror}") from None
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(b"\n")
            self._keeper.stdin.flush()
        if not self._keeper.stdout.readline():  # what comes back comes from there
            why = self._keeper.communicate()[1].decode(errors="replace").strip()
            raise PenstockError(f"namespaces ({', '.join(kinds)}) cannot be made: {why}")
        self.pid = self._keeper.pid
        self.enter = ("nsenter", f"--target={self.pid}", *flags, "--wd", "--")

    def run(self, *words: str) -> None:
        """Run a command there. Raises PenstockError when it fails."""
        _run(*self.enter, *words)

    def seen(self, path: Path) -> Path:
        """Where this process finds a file of it."""
        return Path(f"/proc/{self.pid}/root{path}")

    def close(self) -> None:
        self._keeper.communicate()


class Hosts:
    """Use it as a context: what was made is gone at its end.

    Args:
        count: of hosts; a single one has no cable, and is reached as this machine is.
        disk: folder that is a file system of each host's own; None for this machine's.
    """

    def __init__(self, count: int, disk: Path | None = None) -> None:
        self._count, self._disk = count, disk
        self._stack = contextlib.ExitStack()
        self._spaces: list[Space] = []
        self._switch: Space | None = None
        self.addresses = ["127.0.0.1"] * count

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            kinds = ["net"] * (self._count > 1) + ["mount"] * (self._disk is not None)
            for _ in range(self._count if kinds else 0):
                self._spaces.append(_kept(stack, *kinds))
            if self._count > 1:
                self._connect(stack)
            if self._disk is not None:
                for space in self._spaces:
                    space.run("mount", "-t", "tmpfs", "-o", f"size={ROOM}", "penstock", str(self._disk))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def _connect(self, stack: contextlib.ExitStack) -> None:
        """Cables from each host to a switch, and from there to this machine."""
        self._switch = switch = _kept(stack, "net")
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        taken = _run("ip", "-o", "-4", "addr")
        net = next(f"{NET}{number}." for number in range(256) if f"{NET}{number}." not in taken)
        ours = f"{LINK}{switch.pid}"
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", "out", "netns", str(switch.pid))
        stack.callback(subprocess.run, ["ip", "link", "del", ours], capture_output=True, check=False)
        _run("ip", "addr", "add", f"{net}{LAST}/24", "dev", ours)
        _run("ip", "link", "set", ours, "up")
        switch.run("ip", "link", "set", "out", "master", "switch", "up")
        for number, space in enumerate(self._spaces):
            self.addresses[number] = f"{net}{number + 1}"
            cable = _cable(number)
            far = ("peer", "name", "eth0", "netns", str(space.pid))
            switch.run("ip", "link", "add", cable, "type", "veth", *far)
            switch.run("ip", "link", "set", cable, "master", "switch", "up")
            space.run("ip", "addr", "add", f"{self.addresses[number]}/24", "dev", "eth0")
            space.run("ip", "link", "set", "eth0", "up")
            space.run("ip", "link", "set", "lo", "up")

    def enter(self, host: int) -> tuple[str, ...]:
        """The first words of a command line, with which the rest runs there."""
        return self._spaces[host].enter if self._spaces else ()

    def seen(self, host: int, path: Path) -> Path:
        """Where this process finds a file of a host."""
        return path if self._disk is None else self._spaces[host].seen(path)

    # --- faults, each undone at the end of its context

    @contextlib.contextmanager
    def cut(self, one: int, other: int | None) -> Iterator[None]:
        """Nothing arrives any more, and nobody is told: between a host and another one, or all others with None."""
        assert self._switch is not None
        if other is None:
            self._switch.run("ip", "link", "set", _cable(one), "down")
            try:
                yield
            finally:
                self._switch.run("ip", "link", "set", _cable(one), "up")
            return
        with self._misled(one, other), self._misled(other, one):
            yield

    @contextlib.contextmanager
    def _misled(self, here: int, there: int) -> Iterator[None]:
        """What one host sends to another one goes nowhere."""
        space, entry = self._spaces[here], (self.addresses[there], "dev", "eth0")
        space.run("ip", "neigh", "replace", *entry, "lladdr", NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            space.run("ip", "neigh", "del", *entry)

    @contextlib.contextmanager
    def full(self, host: int) -> Iterator[None]:
        """Its disk has not a byte left."""
        try:
            self._fill(host)
            yield
        finally:
            self._resize(host, ROOM)

    def _fill(self, host: int) -> None:
        assert self._disk is not None
        for attempt in range(ATTEMPTS):
            disk = os.statvfs(self.seen(host, self._disk))
            try:
                self._resize(host, (disk.f_blocks - disk.f_bfree) * disk.f_frsize)
                return
            except PenstockError:  # more is on it by now
                if attempt == ATTEMPTS - 1:
                    raise

    def _resize(self, host: int, size: int) -> None:
        self._spaces[host].run("mount", "-o", f"remount,size={size}", str(self._disk))

    @contextlib.contextmanager
    def away(self, host: int, folder: Path) -> Iterator[None]:
        """A folder is empty, as where its file system is not mounted. What is open or mapped stays."""
        space = self._spaces[host]
        space.run("mount", "-t", "tmpfs", "-o", EMPTY, "away", str(folder))
        try:
            yield
        finally:
            space.run("umount", "--lazy", str(folder))


def why_not(*, cables: bool) -> str:
    """Why there can be no such hosts here; "" when there can.

    Args:
        cables: whether they have networks of their own; else only disks.
    """
    for program, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        if shutil.which(program) is None and (cables or program != "ip"):
            return f"there is no {program} ({package})"
    try:
        with Hosts(2 if cables else 1, None if cables else Path(tempfile.gettempdir())):
            return ""
    except PenstockError as error:
        return str(error)


def ends_with_us() -> tuple[str, ...]:
    """The first words of a command line, with which the rest is told to end when this process does, however."""
    return ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()


def _kept(stack: contextlib.ExitStack, *kinds: str) -> Space:
    space = Space(*kinds)
    stack.callback(space.close)
    return space


def _cable(host: int) -> str:
    """Its end at the switch."""
    return f"host{host}"


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PenstockError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        raise PenstockError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
