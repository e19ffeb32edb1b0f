"""Between frontends, which own the clients' requests, and the master, which only decides where they run."""

from __future__ import annotations

import msgspec

from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder
from penstock.core.wire.engine import Peer


class Join(msgspec.Struct, tag=True, frozen=True):
    """A frontend makes itself known, and says again every second that it lives; the master answers with `Joined`.

    What a frontend placed is forgotten when it is not heard for `LEASE` seconds, or its next life is.
    """

    sender: str
    incarnation: int = 0
    protocol: int = PROTOCOL


class Place(msgspec.Struct, tag=True, frozen=True):
    """Where should this sequence run?

    Attributes:
        keys: prefix keys of the prompt's full blocks, where the master wants them.
        waited: seconds since it arrived at the frontend.
        exclude: instances that it should not be given, because they just failed it.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    keys: list[bytes]
    priority: int = 0
    generation: int = 0
    waited: float = 0.0
    exclude: list[str] = []


class Ended(msgspec.Struct, tag=True, frozen=True):
    """These sequences are over, however they ended."""

    request_ids: list[str]


FrontendMessage = Join | Place | Ended


class Joined(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        incarnation: of the master.
        wants_keys: whether its policy looks at prefix keys; hashing and sending them is not free.
    """

    incarnation: int
    protocol: int = PROTOCOL
    wants_keys: bool = False


class Placed(msgspec.Struct, tag=True, frozen=True):
    """Run it on `prefill`; with `decode`, that instance takes over after the prompt."""

    request_id: str
    generation: int
    prefill: Peer
    decode: Peer | None = None
    policy: str = ""
    reason: str = ""


class NoPlace(msgspec.Struct, tag=True, frozen=True):
    """No instance can take it now."""

    request_id: str
    generation: int
    message: str
    retry_after: float = 1.0


MasterMessage = Joined | Placed | NoPlace

decode_from_frontend = decoder(FrontendMessage).decode
decode_from_master = decoder(MasterMessage).decode
