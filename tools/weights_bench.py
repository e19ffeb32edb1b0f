"""How fast weights come from another host, beside the bare link: between two network namespaces, as root, in turn.

    python tools/weights_bench.py [--mib 512] [--rounds 5] [--tls CERTIFICATE KEY CA]

The bare link is a file that one process sends and another reads and forgets, under TLS too where that is asked for;
`kept` is that with what is read written to new memory, which on a virtual machine may be what takes longest; `gloo` are
weights by torch.distributed, which has no TLS. Shares are of the medians; `cpu` seconds of a core for a GiB, of who
takes and of who gives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from penstock.core.wire.weights import Weights
from penstock.drill.hosts import Hosts
from penstock.nn.image import mapped
from penstock.transfer.tls import TLS
from penstock.transfer.weights import Landing, WeightServer, digests

MIB = 1 << 20
WEIGHTS, BARE = 7001, 7002  # ports, in namespaces of their own
KEY, SECRET = "bench", "of the bench"


class Random:
    """Weights, as `transfer.weights.Given`."""

    def __init__(self, size: int) -> None:
        self.fd: int | None
        self.fd = self.file = os.memfd_create("bench")
        self.start, part = 0, os.urandom(16 * MIB)
        for at in range(0, size, len(part)):
            os.pwrite(self.file, part[: size - at], at)
        memory = mmap.mmap(self.file, size, prot=mmap.PROT_READ)
        self.address, self.gpu, self.device = 0, "", torch.device("cpu")  # the first is Mooncake's alone
        self._memory = mapped(self.file, 0, size)
        self._said = Weights({"weights": ("uint8", [size], 0)}, size, 0, digests(memoryview(memory)) or [])

    def describe(self) -> Weights:
        return self._said

    @contextlib.contextmanager
    def lending(self) -> Iterator[Callable[[int, int], torch.Tensor]]:
        yield lambda start, stop: self._memory[start:stop]


def cpu() -> float:
    times = os.times()
    return times.user + times.system


def give(host: str, size: int, tls: TLS | None) -> None:
    given = Random(size)
    # its threads have it
    WeightServer([f"tcp:{host}:{WEIGHTS}"], {KEY: given}, SECRET, tls, pair="gloo")

    def send(sock: socket.socket) -> None:
        with sock, open(os.dup(given.file), "rb", buffering=0) as file:
            if sock.recv(1) == b"c":
                sock.sendall(str(cpu()).encode())
            elif tls is None:
                sock.sendfile(file)
            else:
                with tls.over_waiting(sock, dialled=False) as link:
                    for at in range(0, size, MIB):
                        link.sendall(os.pread(given.file, min(MIB, size - at), at))

    with socket.create_server((host, BARE)) as listener:
        print("up", flush=True)
        while True:
            threading.Thread(target=send, args=(listener.accept()[0],), daemon=True).start()


def asked(host: str, word: bytes) -> socket.socket:
    sock = socket.create_connection((host, BARE))
    sock.sendall(word)
    return sock


def take(what: str, host: str, size: int, tls: TLS | None) -> None:
    """Prints GB/s, and the CPU seconds of both sides."""
    theirs, ours, began = float(asked(host, b"c").recv(64)), cpu(), time.monotonic()
    if what == "weights":
        Landing().pull(f"tcp:{host}:{WEIGHTS}", KEY, SECRET, tls)
    elif what == "gloo":
        Landing().receive(f"tcp:{host}:{WEIGHTS}", KEY, "gloo", SECRET)
    else:
        sock, buffer = asked(host, b"f"), memoryview(bytearray(MIB))
        link = sock if tls is None else tls.over_waiting(sock, dialled=True)
        fd = os.memfd_create("kept") if what == "kept" else -1
        while count := link.recv_into(buffer):
            if fd >= 0:
                os.write(fd, buffer[:count])
    took = time.monotonic() - began
    print(json.dumps([size / 1e9 / took, cpu() - ours, float(asked(host, b"c").recv(64)) - theirs]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", nargs=3, metavar=("CERTIFICATE", "KEY", "CA"))
    parser.add_argument("--as", dest="part", nargs=2, help=argparse.SUPPRESS)  # of a process: which one, and the giver
    options = parser.parse_args()
    size, tls = options.mib * MIB, None if options.tls is None else TLS(*options.tls)
    ways = ("link", "kept", "weights", "gloo")[: 4 if tls is None else 3]
    if options.part is not None:
        what, host = options.part
        give(host, size, tls) if what == "give" else take(what, host, size, tls)
        return
    with Hosts(2) as hosts:
        place = hosts.addresses[0]

        def process(host: int, what: str) -> list[str]:
            return [*hosts.enter(host), sys.executable, *sys.argv, "--as", what, place]

        found: dict[str, list[list[float]]] = defaultdict(list)
        with subprocess.Popen(process(0, "give"), stdout=subprocess.PIPE) as giver:
            assert giver.stdout is not None
            giver.stdout.readline()
            for _ in range(options.rounds):
                for what in ways:
                    found[what].append(json.loads(subprocess.check_output(process(1, what))))
            giver.kill()
    middle = {what: [statistics.median(column) for column in zip(*rows, strict=True)] for what, rows in found.items()}
    for what, (rate, taker, gave) in middle.items():
        rates = [row[0] for row in found[what]]
        cpus = f"cpu {taker * 1024 / options.mib:.2f} and {gave * 1024 / options.mib:.2f}"
        print(f"{what}: {rate:.2f} GB/s ({min(rates):.2f} to {max(rates):.2f}), {cpus}")
    for what in ("link", "kept"):
        print(f"weights by {what}: {middle['weights'][0] / middle[what][0]:.0%}")


if __name__ == "__main__":
    main()
