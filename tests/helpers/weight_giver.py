"""A process that gives a checkpoint's weights: python -m tests.helpers.weight_giver JSON.

It says where it gives them, unix and tcp, on a line. What `happens` to it does so when its third block is wanted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BLOCK = 16 << 10
SECRET = "of this deployment"
FATAL = 2  # the block with which it happens
HAPPENS = {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}


def make_small(monkeypatch) -> None:
    """Blocks of weights and heads, in this process."""
    from penstock.nn.models.decoder import Decoder
    from penstock.transfer import weights as wire

    monkeypatch.setattr(wire, "BLOCK", BLOCK)
    monkeypatch.setattr(Decoder.bound_logits, "__defaults__", (0, None))


def be_another_host(monkeypatch, name: str) -> None:
    """To NCCL, which has two processes on one GPU only where it takes them to be on two hosts."""
    from penstock.engine import weights
    from penstock.transfer import pair

    monkeypatch.setenv("NCCL_HOSTID", name)
    for room in (weights, pair):
        monkeypatch.setattr(room, "gpu_of", lambda _: name)


@contextlib.contextmanager
def givers(*each: dict[str, Any]) -> Iterator[list[list[str]]]:
    """Their addresses. `main` has the settings."""
    with contextlib.ExitStack() as stack:
        begun = []
        for settings in each:
            command = [sys.executable, "-m", "tests.helpers.weight_giver", json.dumps(settings)]
            begun.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            stack.callback(begun[-1].kill)
        yield [json.loads(process.stdout.readline()) for process in begun if process.stdout is not None]


def main(
    checkpoint: str,
    address: str,
    pair: str = "",
    mooncake: str = "",
    device: str = "cpu",
    happens: str = "",
    secret: str | None = None,
    *,
    maps: bool = True,
) -> None:
    """
    Args:
        happens: "dies", "stops", or "damaged": one bit of a tensor is another one than when it was loaded.
        maps: whether weights are in memory that processes map.
    """
    from penstock.cli.engine import preset_nccl
    from penstock.engine.weights import Offer, WeightManager
    from penstock.nn.loader import load
    from penstock.transfer import weights as wire

    preset_nccl()
    if torch.cuda.device_count() == 1:
        be_another_host(pytest.MonkeyPatch(), "giver")
    wire.BLOCK = BLOCK
    if not maps:
        WeightManager.maps = False  # type: ignore[assignment, method-assign]
    manager = WeightManager([f"unix:{address}", "tcp:127.0.0.1:0"], (), secret, None, mooncake, pair=pair)  # type: ignore[arg-type]
    manager.place = torch.device(device)
    loaded = load(Path(checkpoint), manager.place, peers=manager)
    manager.give(loaded.image)
    manager.serve(None)
    (offer,) = manager._offers.values()
    assert offer._known.wait(20)
    if happens == "damaged":
        with torch.no_grad():
            list(loaded.model.parameters())[-1].view(torch.uint8)[5] ^= 1
    elif happens:
        lending, send = Offer.lending, wire._send

        def reach(start: int) -> None:
            if start >= FATAL * BLOCK:
                os.kill(os.getpid(), HAPPENS[happens])

        @contextlib.contextmanager
        def lent(self: Offer) -> Iterator[Any]:
            with lending(self) as block:
                yield lambda start, stop: (reach(start), block(start, stop))[1]

        def sent(link: Any, fd: int, start: int, stop: int) -> None:
            reach(start)
            send(link, fd, start, stop)

        Offer.lending, wire._send = lent, sent  # type: ignore[method-assign]
    assert manager._server is not None
    print(json.dumps(manager._server.addresses), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
