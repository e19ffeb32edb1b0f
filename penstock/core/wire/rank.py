"""Messages between rank 0 of an engine and its other ranks, over one socket each that keeps messages apart. Plans go
through shared memory."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.memory import Part
from penstock.core.parallel import Switch
from penstock.core.wire.codec import decoder
from penstock.core.wire.weights import PairWay

MAX_MESSAGE = 64 << 10  # bytes


class OpenCache(msgspec.Struct, tag=True, frozen=True):
    """Make the KV cache, and run the plans that come. Its blocks are in the memfd whose descriptor comes with this, of
    which all ranks have their parts; on a device they are in its own memory.

    Attributes:
        num_blocks: the same on all ranks.
        max_model_len: of a sequence.
    """

    num_blocks: int
    max_model_len: int


class Rest(msgspec.Struct, tag=True, frozen=True):
    """Give memory back; see `Worker.sleep`. `Opened` answers it and `Resume`, with which an empty plan comes."""

    level: int


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Take up memory again; see `Worker.wake_up`."""

    parts: list[Part]


class WeightSources(msgspec.Struct, tag=True, frozen=True):
    """Where weights may come from; see `engine.weights.Neighbours`. The first message to a rank that may ask others.

    Attributes:
        secret: of the deployment.
        tls: arguments of `transfer.tls.TLS`; None without.
        mooncake: this host's address for Mooncake to read at; "" without.
        pair: the way by torch.distributed; "" without it.
        public: "tcp:host:0", where other hosts reach this one; "" without any.
    """

    own: str
    sockets: str
    givers: str | None = None
    within: float = 0.0
    secret: str | None = None
    tls: dict[str, str] | None = None
    mooncake: str = ""
    pair: PairWay | Literal[""] = ""
    public: str = ""


class Gives(msgspec.Struct, tag=True, frozen=True):
    """Its weights may be given to others. Where they are mapped, there come with it the file that they are in, and one
    with what is in that, which may be longer than a message: a `Weights`.

    Attributes:
        key: see `AskWeights`.
        mapped: whether processes can map them; else they are in a device's memory.
        at: where it gives them by itself, by torch.distributed; none where it does not.
    """

    key: str
    mapped: bool = True
    at: list[str] = []


class LoadExperts(msgspec.Struct, tag=True, frozen=True):
    """Load experts for another placement of a layer; see `sched.parallel.rebalancing.Prepare`. `Brought` answers it, of
    ranks that have the layer.

    Attributes:
        layer: counted among those that have experts, of all stages.
        loads: (rank among those that share the layer, expert).
    """

    version: int
    layer: int
    loads: list[tuple[int, int]]


class DropExperts(msgspec.Struct, tag=True, frozen=True):
    """What was loaded for this version is not needed."""

    version: int
    layer: int


class CountExperts(msgspec.Struct, tag=True, frozen=True):
    """Say what was counted; `Counted` answers it, for each layer.

    Attributes:
        number: of the question.
    """

    number: int


class Brought(msgspec.Struct, tag=True, frozen=True):
    """The experts of `LoadExperts` are there, or they are not, for the reason that `error` gives.

    Attributes:
        rank: among those that share the layer.
    """

    rank: int
    version: int
    error: str = ""


class SwitchExperts(msgspec.Struct, tag=True, frozen=True):
    """From group 0 to the others: do it before the step that it will say, in the memory that all share. `Holds` answers
    it."""

    switch: Switch


class Holds(msgspec.Struct, tag=True, frozen=True):
    """A group knows of a switch."""

    version: int


class Counted(msgspec.Struct, tag=True, frozen=True):
    """Of a layer, since it was loaded.

    Attributes:
        number: of the question.
        counts: rows that each expert has had.
        loads: those that each rank has computed.
    """

    number: int
    layer: int
    counts: list[int]
    loads: list[int]


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The weights are there.

    Attributes:
        room: bytes that the rank's part of the KV cache may take.
    """

    room: int


class Opened(msgspec.Struct, tag=True, frozen=True):
    """Plans can come."""


class Computed(msgspec.Struct, tag=True, frozen=True):
    """The last stage has computed the next plan: an `Answer` lies in the memory that ranks share.

    Attributes:
        size: bytes of it.
    """

    size: int


class Logged(msgspec.Struct, tag=True, frozen=True):
    """A line for the log, as `logging` has it."""

    logger: str
    level: int
    text: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The rank ends, because of an error.

    Attributes:
        field: the option that is wrong, or None where it is something else that has failed.
    """

    text: str
    wrong_option: bool = False
    field: str | None = None


class Joins(msgspec.Struct, tag=True, frozen=True):
    """From an engine of a data-parallel group to that of group 0, and back, with the memory that all share.

    Attributes:
        group: of the sender.
        process: its id.
        what: it computes; the same of all.
    """

    group: int
    process: int
    what: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A group cannot join."""

    why: str


class Leaves(msgspec.Struct, tag=True, frozen=True):
    """A group will begin nothing any more; from group 0: no group will."""


FromRank = Gives | Loaded | Opened | Computed | Brought | Counted | Logged | Ended
decode_from_rank = decoder(FromRank).decode
ToRank = WeightSources | OpenCache | Rest | Resume | LoadExperts | DropExperts | CountExperts
decode_to_rank = decoder(ToRank).decode
FromGroup = (
    Joins | Refused | Leaves | LoadExperts | DropExperts | CountExperts | SwitchExperts | Brought | Counted | Holds
)
decode_from_group = decoder(FromGroup).decode
