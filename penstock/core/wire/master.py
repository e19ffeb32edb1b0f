"""Between frontends, which own the clients' requests, and the master, which only decides where they run."""

from __future__ import annotations

import msgspec

from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder
from penstock.core.wire.engine import Peer


class Join(msgspec.Struct, tag=True, frozen=True):
    """A frontend makes itself known, and says again every second that it lives; the master answers with `Joined`.

    What a frontend placed is forgotten when it is not heard for `LEASE` seconds, or its next incarnation is heard.
    """

    sender: str
    incarnation: int = 0
    protocol: int = PROTOCOL


class Place(msgspec.Struct, tag=True, frozen=True):
    """Where should this sequence run?

    One that was interrupted asks again: what it has generated is to be read like its prompt, and its next token has the
    deadline of a first one.

    Attributes:
        prompt_tokens: to be read: of the prompt, and what was generated before.
        max_tokens: to be generated after these, at most.
        keys: prefix keys of the full blocks of what is to be read, where the master wants them.
        waited: seconds since it arrived at the frontend; for an interrupted one so many that its deadline is right.
        exclude: instances that it should not be given, because they just failed it.
        ttft_ms, tpot_ms, offline: see `core.request.Request`.
        chat: the conversation that it belongs to; "" when that is not known.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    keys: list[bytes]
    priority: int = 0
    generation: int = 0
    waited: float = 0.0
    exclude: list[str] = []
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    offline: bool = False
    chat: str = ""


class Begun(msgspec.Struct, tag=True, frozen=True):
    """The first tokens of these sequences have come, from where they were placed last."""

    request_ids: list[str]


class Outcome(msgspec.Struct, frozen=True):
    """How a sequence ended that got tokens.

    Attributes:
        ttft_ms: from its client's request to its first token.
        tpot_ms: mean time per token after it; None when there was none.
        queue_ms: from its client's request to its being sent to an engine.
        tokens: that it got.
    """

    request_id: str
    ttft_ms: float
    tpot_ms: float | None
    queue_ms: float
    tokens: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """These sequences are over, however they ended.

    Attributes:
        outcomes: of those that ended well.
    """

    request_ids: list[str]
    outcomes: list[Outcome] = []


FrontendMessage = Join | Place | Begun | Ended


class Joined(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        incarnation: of the master.
        wants_keys: whether its policy looks at prefix keys; hashing and sending them is not free.
        waiting: sequences in its queue, of all frontends.
    """

    incarnation: int
    protocol: int = PROTOCOL
    wants_keys: bool = False
    waiting: int = 0


class Placed(msgspec.Struct, tag=True, frozen=True):
    """Run it on `prefill`; with `decode`, that instance takes over after the prompt.

    Attributes:
        ttft_ms, tpot_ms: the targets that it has from now on: those it came with, or what its priority was worth.
        predicted_ttft: seconds from its client's request to its first token; None when the policy does not predict.
    """

    request_id: str
    generation: int
    prefill: Peer
    decode: Peer | None = None
    policy: str = ""
    reason: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    predicted_ttft: float | None = None


class NoPlace(msgspec.Struct, tag=True, frozen=True):
    """No instance can take it now."""

    request_id: str
    generation: int
    message: str
    retry_after: float = 1.0


class Queued(msgspec.Struct, tag=True, frozen=True):
    """It waits at the master until it has a place."""

    request_id: str
    generation: int


MasterMessage = Joined | Placed | NoPlace | Queued

decode_from_frontend = decoder(FrontendMessage).decode
decode_from_master = decoder(MasterMessage).decode
