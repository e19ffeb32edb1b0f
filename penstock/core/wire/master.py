"""Messages between frontends, which own the clients' requests, and the master, which decides where they run; and from
launchers to the master, which passes them on."""

from __future__ import annotations

import msgspec

from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder
from penstock.core.wire.engine import Peer


class Join(msgspec.Struct, tag=True, frozen=True):
    """A frontend registers, and repeats this every second; the master answers with `Joined`.

    What a frontend placed is forgotten when it is not heard for `LEASE` seconds, or its next incarnation is heard.
    """

    sender: str
    incarnation: int = 0
    protocol: int = PROTOCOL


class Place(msgspec.Struct, tag=True, frozen=True):
    """Asks where a sequence is to run.

    For an interrupted sequence, the generated tokens are part of the prompt, and its next token has the deadline of a
    first one.

    Attributes:
        prompt_tokens: to be prefilled: of the prompt, and what was generated before.
        max_tokens: to be generated after these, at most; 0 for an embedding.
        keys: prefix keys of the full blocks of what is to be prefilled, where the master wants them.
        waited: seconds since it arrived at the frontend; for an interrupted one so many that its deadline is right.
        exclude: instances to avoid, because they just failed this sequence.
        ttft_ms, tpot_ms, offline: see `core.request.Request`.
        chat: the conversation that it belongs to; "" when that is not known.
        patience: seconds that it waits for an instance that could take it, when there is none.
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
    patience: float = 0.0


class Begun(msgspec.Struct, tag=True, frozen=True):
    """These sequences have their first token, from their latest placement."""

    request_ids: list[str]


class Settled(msgspec.Struct, tag=True, frozen=True):
    """A hand-off of this sequence is over, and it goes on at `instance`: where it was to go, or where it was."""

    request_id: str
    generation: int
    instance: str


class Outcome(msgspec.Struct, frozen=True):
    """The latencies of a finished sequence.

    Attributes:
        ttft_ms: from its client's request to its first token.
        tpot_ms: mean time per token after it; None when there was none.
        queue_ms: from its client's request to its being sent to an engine.
        tokens: that it got.
        wait: what its engine says about its time before the first token.
    """

    request_id: str
    ttft_ms: float
    tpot_ms: float | None
    queue_ms: float
    tokens: int
    wait: str = ""


class Ended(msgspec.Struct, tag=True, frozen=True):
    """These sequences have ended, in whatever way.

    Attributes:
        outcomes: of those that ended without an error.
    """

    request_ids: list[str]
    outcomes: list[Outcome] = []


FrontendMessage = Join | Place | Begun | Settled | Ended


class Troubles(msgspec.Struct, tag=True, frozen=True):
    """A launcher says which of its instances cannot serve, or may not be able to: when that changes, and every second.

    What it said is forgotten when it is not heard for `LEASE` seconds.

    Attributes:
        host: of the launcher.
        instances: name -> why, with the name of the process at fault.
    """

    host: str
    instances: dict[str, str]


ToMaster = FrontendMessage | Troubles


class Joined(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        incarnation: of the master.
        wants_keys: whether its policy looks at prefix keys; hashing and sending them is not free.
        waiting: sequences in its queue, of all frontends.
        troubles: of instances, as the launchers said.
    """

    incarnation: int
    protocol: int = PROTOCOL
    wants_keys: bool = False
    waiting: int = 0
    troubles: dict[str, str] = {}


class Placed(msgspec.Struct, tag=True, frozen=True):
    """Run it on `prefill`; with `decode`, that instance takes over after the prompt.

    Attributes:
        ttft_ms, tpot_ms: its targets from now on: its own, or those of its priority.
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
    """It waits in the master's queue."""

    request_id: str
    generation: int


class Relocate(msgspec.Struct, tag=True, frozen=True):
    """Have it handed over to `peer`, wherever it runs now. `Settled` says what came of it.

    Attributes:
        reason: a class of reasons, and after a colon the details, if any.
    """

    request_id: str
    generation: int
    peer: Peer
    reason: str = ""


MasterMessage = Joined | Placed | NoPlace | Queued | Relocate

decode_to_master = decoder(ToMaster).decode
decode_from_master = decoder(MasterMessage).decode
