"""The interfaces that both sides of a hand-off need from their engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.core.request import Request, TokenOutput
from penstock.core.wire.engine import Peer
from penstock.core.wire.handoff import PeerMessage
from penstock.kv.connector import Move, Moved
from penstock.kv.embeddings import Embedding


class IncomingMessage(Protocol):
    """A message that came from a peer, with whatever bytes came with it."""

    @property
    def peer(self) -> Peer: ...
    @property
    def message(self) -> PeerMessage: ...


class HandoffTransport(Protocol):
    """What moves messages and blocks; see `penstock.transfer`. `pull` takes what it delivered itself."""

    @property
    def shares(self) -> bool: ...
    def send(self, peer: Peer, message: PeerMessage) -> None: ...
    def stamp(self, block: int) -> tuple[int, int]: ...
    def pull(self, incoming: Any, into: int) -> int: ...
    def poll(self) -> list[Moved]: ...


class Orphans(Protocol):
    """Blocks that failed instances have left in the host's KV pool: a connector that finds them by key. See
    `penstock.transfer.orphans`."""

    def find(self, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """The (block, generation) of each; None where there is none."""
        ...

    def pull(self, moves: Sequence[Move], source: None = None) -> int: ...
    def poll(self) -> list[Moved]: ...


class Host(Protocol):
    """The engine around it."""

    def refuses(self, request: Request, frontend: str) -> str:
        """Why a request can never run here for that frontend; "" when it can."""
        ...

    def migrated(self, request_id: str) -> None:
        """Another engine has taken the request over."""
        ...

    def stayed(self, request_id: str, peer: Peer | None, reason: str) -> None:
        """A request is not handed over to a peer, if it was said to whom: it goes on here."""
        ...

    def joined(self, request: Request, frontend: str, generation: int) -> None:
        """A request was taken over; its tokens go to that frontend."""
        ...

    def failed(self, output: TokenOutput) -> None:
        """A request has failed here."""
        ...

    def fetched(self, request_id: str, tokens: int, ms: float) -> None:
        """So many tokens of a request were fetched; it waits for no more."""
        ...

    def embedded(self, digest: bytes, came: Embedding | None, why: str) -> None:
        """What another engine has made of an image is here; or it will not come, and why."""
        ...


def same_incarnation(one: Peer, other: Peer) -> bool:
    """Addresses may be written in several ways."""
    return (one.name, one.incarnation) == (other.name, other.incarnation)
