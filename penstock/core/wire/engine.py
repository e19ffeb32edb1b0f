"""Messages between an engine and the frontends and the master."""

from __future__ import annotations

from math import inf
from typing import Literal

import msgspec

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.layout import KVLayout
from penstock.core.memory import Part
from penstock.core.request import MediaSpan, Request, TokenOutput
from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder

Role = Literal["any", "prefill", "decode", "encode"]
Stage = Literal["prefill", "decode"]  # of a request
# Which stages of a request with images are together (xLLM 3.3): "E+P+D" encodes at instances of the role "encode",
# "EP+D" where its prompt is prefilled, "ED+P" where it is to decode, and "EPD" has all of it at one instance.
MediaRoute = Literal["E+P+D", "EP+D", "ED+P", "EPD"]


class Peer(msgspec.Struct, frozen=True):
    """One incarnation of an engine, and its address for other engines."""

    name: str
    incarnation: int
    address: str  # of its transport, such as unix:/run/a.sock or tcp:10.0.0.7:7001


class Leg(msgspec.Struct, frozen=True):
    """Of a request's route: a stage of it, and who runs that; None where it is open until the stage before it ends."""

    stage: Stage
    peer: Peer | None


class Source(msgspec.Struct, frozen=True):
    """Where leading blocks of a prompt can be had that an instance does not have.

    Attributes:
        peer: who has them on its device; None where a failed instance has left them in the host's KV pool.
        blocks: how many, from the first on; a peer may have fewer.
        ms: that it takes to bring what lacks, as predicted.
        worth_ms: that it may take until computing would have been quicker; inf where that is not known.
    """

    peer: Peer | None
    blocks: int
    ms: float
    worth_ms: float = inf

    @property
    def name(self) -> str:
        return "the KV pool" if self.peer is None else self.peer.name


class ImageSource(msgspec.Struct, frozen=True):
    """Who has, or is about to have, what the model makes of an image of a prompt.

    Attributes:
        digest: of the image; see `MediaSpan`.
        encodes: it is to look at it first, for which it is sent `Encode`; else it has it from before.
        patience_ms: that this may take; after it who prefills looks at it itself.
    """

    digest: bytes
    peer: Peer
    encodes: bool
    patience_ms: float


# --- commands


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A frontend or master registers, and repeats this every second.

    An engine answers the first with `Ready`. It drops the requests of a frontend that was silent for `LEASE` seconds,
    or that registers with another incarnation.
    """

    sender: str = "frontend"  # its name; also its ZMQ routing id
    incarnation: int = 0
    kind: Literal["frontend", "master", "probe"] = "frontend"
    protocol: int = PROTOCOL


class Enqueue(msgspec.Struct, tag=True, frozen=True):
    """Run a request here, up to the first stage of `route`, for which it is handed over.

    Where that is open, `Migrate` says to whom, or that it stays. Until then an instance of role "prefill" holds it,
    though not for long, and others run it on.

    Attributes:
        to: incarnation of the engine it is meant for.
        generation: which attempt this is.
        route: where it is to go on; empty where it stays.
        source: from where blocks are to be fetched before it runs; `Fetched` tells what came of that. None computes
            what is not in the cache.
        images: those whose pixels are not sent along, but are looked at elsewhere. It runs when what came of them is
            here; `Lacking` says of which nothing came.
    """

    to: int
    request: Request
    generation: int = 0
    route: list[Leg] = []
    source: Source | None = None
    images: list[ImageSource] = []


class Encode(msgspec.Struct, tag=True, frozen=True):
    """Look at images: another engine is about to ask for what comes of it, over its peer link.

    Attributes:
        request_id: whose they are.
        pixels: of each of `media`, as in `Request`.
    """

    to: int
    request_id: str
    media: list[MediaSpan]
    pixels: list[bytes]


class Pixels(msgspec.Struct, tag=True, frozen=True):
    """The answer to a `Lacking`: the request's images of which nothing came, to be looked at where it is.

    Attributes:
        generation: the attempt that is meant.
        images: (digest, pixels) of each.
    """

    to: int
    request_id: str
    generation: int
    images: list[tuple[bytes, bytes]]


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        generation: of attempts up to this one; None is all.
    """

    to: int
    request_ids: list[str]
    generation: int | None = None


class Migrate(msgspec.Struct, tag=True, frozen=True):
    """Hand a request over to a peer, wherever it stands: its blocks follow while it goes on here. `Stayed` says when
    nothing comes of it. To the engine itself it says that a request goes on here: it is not handed over, unless that
    may have come about.

    Attributes:
        generation: the attempt that is meant.
    """

    to: int
    request_id: str
    generation: int
    peer: Peer


class LinkPeer(msgspec.Struct, tag=True, frozen=True):
    """Connect to a peer before it is needed."""

    to: int
    peer: Peer


class UnlinkPeer(msgspec.Struct, tag=True, frozen=True):
    """A peer has gone, or will get no more from here."""

    to: int
    peer: Peer


class SetRole(msgspec.Struct, tag=True, frozen=True):
    """The role by which the master places requests here from now on. Running requests are not affected."""

    to: int
    role: Role
    generation: int  # of the decision; an older one is ignored


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Accept no new requests and finish the running ones; `Snapshot.draining` with nothing running or waiting is the
    end."""

    to: int


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Accept no new requests, finish the running ones, and then give memory back; `Slept` answers. One that sleeps
    already only ever sleeps deeper.

    Attributes:
        number: of this order, among the sender's.
        level: 1 forgets the KV cache and puts weights in the host's memory, 2 forgets both.
    """

    to: int
    number: int
    level: Literal[1, 2]


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """Take up memory again; `Slept` answers. With everything there again the engine accepts requests. A `Sleep` that
    still waits for running requests is given up.

    Attributes:
        number: as in `Sleep`.
        parts: what is to be there again.
    """

    to: int
    number: int
    parts: list[Part]


class AskCache(msgspec.Struct, tag=True, frozen=True):
    """Send every cached key, as a `CacheDelta` with `whole` for each tier."""

    to: int


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Check every invariant and answer with an `Inspection`."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Leg now; running requests are lost."""


Command = (
    Hello
    | Enqueue
    | Encode
    | Pixels
    | Cancel
    | Migrate
    | LinkPeer
    | UnlinkPeer
    | SetRole
    | Drain
    | Sleep
    | WakeUp
    | AskCache
    | Inspect
    | Shutdown
)
LEASE = 5.0  # seconds without a Hello after which a frontend counts as failed
AT_WORK = 0.2  # seconds between two StepReports of an engine with something to do, at most


# --- events


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The engine can serve.

    Attributes:
        peer: how other engines reach it; an empty address when it takes no part in hand-offs.
        root_key: parent of every first block's prefix key.
        max_model_len: prompt and output tokens of one sequence together.
        vocab_size: token ids are below it.
        num_blocks: KV blocks that it may hold: of the tokens of sequences of greatest length, as in `Snapshot`.
        search_blocks: the same of beam searches, which give nothing back that has left a window; 0 says nothing.
        token_budget: tokens in one step at most, at first: an engine that measures it while it runs begins with a small
            one.
        sampled_ids: of a modelled device, the first and the last token id that it may draw.
        max_sequences: that run at once.
        embedding_size: numbers in an embedding; 0 where it gives none.
        generates: whether it has a head to generate with.
        device_model, shape: inputs of step-time prediction (`sched.steptime`); None when not known.
        kv_pool: names the host's KV pool that its blocks are in; "" when they are its own.
        store: names the remote store that its blocks are copied to: who names the same loads what others have put
            there; "" where there is none.
        weights_from: where its weights came from, as `nn.loader.Source` has it; "warm" where a process of the warm pool
            got them from a peer; "" where it has none.
        weights_seconds: that this took.
        weights_at: where engines of other hosts are given its weights; "" where they are not.
        meets: names where it meets others in every step, as data-parallel groups do that share experts; "" nowhere.
    """

    peer: Peer
    role: Role = "any"
    layout: KVLayout | None = None
    root_key: bytes = b""
    max_model_len: int
    vocab_size: int
    num_blocks: int
    search_blocks: int = 0
    token_budget: int
    device: str
    dtype: str
    sampled_ids: tuple[int, int] | None = None
    max_sequences: int = 256
    embedding_size: int = 0
    generates: bool = True
    device_model: DeviceModel | None = None
    shape: ModelShape | None = None
    kv_pool: str = ""
    store: str = ""
    weights_from: str = ""
    weights_seconds: float = 0.0
    weights_at: str = ""
    meets: str = ""
    protocol: int = PROTOCOL


class TierStats(msgspec.Struct, frozen=True):
    """Of a tier below an engine's device: what is there now, and totals since the engine started."""

    name: str  # "host", "disk" or "remote"
    used_bytes: int = (
        0  # of KV blocks that are there, or on their way; where others use it too, of what it has put there
    )
    hit_tokens: int = 0  # of prompts, that were loaded and found
    stored_bytes: int = 0  # of KV blocks that were copied there
    loaded_bytes: int = 0  # of those that came from there
    loads: int = 0  # that have ended
    failed_loads: int = 0  # of these, that brought less than they should have
    late_loads: int = 0  # that took so long that who waited for them computed instead
    failed_stores: int = 0  # that were to bring KV blocks there, and did not
    expected: float = 0.0  # seconds that loads which brought all should have taken
    took: float = 0.0  # and did
    questions: int = 0  # about what is there, that have ended, where others use it too
    failed_questions: int = 0  # of these, that had no answer
    late_questions: int = 0  # that took so long that who waited for them computed instead


class EngineStats(msgspec.Struct, frozen=True):
    """Load now, and totals since the engine started."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # prompt tokens found
    steps: int
    busy: float = 0.0  # seconds that these took
    idle: float = 0.0  # seconds between them in which nothing was computed although there was work
    prefix_loads: int = 0  # of `prefix_hits`, those that came from tiers below the device
    prefix_fetches: int = 0  # of `prefix_hits`, those that were brought from another instance
    drafts: int = 0  # sequences' parts of steps with drafts in them
    draft_tokens: int = 0  # drafts in them
    accepted_tokens: int = 0  # of these, those that were right
    masked_steps: int = 0  # steps in which it was worked out which tokens may be drawn
    masking: float = 0.0  # seconds that these waited for it
    grammars: int = 0  # that were compiled
    compiling: float = 0.0  # seconds that this took, beside steps
    pulled_blocks: int = 0  # KV blocks that other engines handed over
    failed_pulls: int = 0  # of such, that brought nothing, or not what was meant
    migration_queue: int = 0  # sequences of other instances that wait for blocks
    migrations: int = 0  # for which blocks were reserved
    migration_wait: float = 0.0  # seconds that these waited for it
    interruptions: int = 0  # steps of offline work that ended early for online work
    asleep: int = 0  # the level at which it sleeps, or is about to; 0 while it takes requests
    tiers: tuple[TierStats, ...] = ()  # below the device, the quickest first
    expert_switches: int = 0  # of layers whose experts have moved between ranks
    split_steps: int = 0  # that were two micro-batches
    helped_pieces: int = 0  # of its contexts that other data-parallel groups have attended to, in all layers of rank 0
    encodes: int = 0  # images and videos that were looked at
    encoding: float = 0.0  # seconds that this took
    embedding_queries: int = 0  # that prompts needed, beyond what the prefix cache had
    embedding_hits: int = 0  # of these, whose embeddings were there
    embedding_bytes: int = 0  # of what was made of them, that are kept on the device; `embedding_room`: at most
    embedding_room: int = 0
    given_embedding_bytes: int = 0  # the same in memory, for other engines
    given_embeddings: int = 0  # what was made of one, that other engines have taken
    taken_embeddings: int = 0  # that other engines have made
    expert_imbalance: float = 0.0  # rows of experts that the busiest rank has over the mean; 0 where nobody looks


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """A step's outputs for this frontend. `step_tokens` are those of prompts, also what a cache had of them, and of
    outputs; 0 in the report that an idle engine sends, and after a step that ended early."""

    incarnation: int
    outputs: list[TokenOutput]
    stats: EngineStats
    step_tokens: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The engine refused a request: it is invalid, meant for an earlier incarnation, or the engine drains."""

    incarnation: int
    request_id: str
    message: str
    why: Literal["invalid", "stale", "draining"] = "invalid"


class Stayed(msgspec.Struct, tag=True, frozen=True):
    """A request is not handed over, after all: it goes on here, if it has not ended. What the engine says after this is
    not said by anyone else.

    Attributes:
        peer: to whom it is not handed over; None when that was open. This may cross a `Migrate` to another.
        here: whether the engine has it. One that does not has said before what became of it.
    """

    incarnation: int
    request_id: str
    generation: int
    reason: str
    peer: Peer | None = None
    here: bool = True


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """Blocks of a request have come from where its `Enqueue` said, or never will; now it queues to be computed.

    Attributes:
        tokens: of its prompt and of what was generated before, that came: 0 when nothing did, and all is computed.
        ms: that it took.
    """

    incarnation: int
    request_id: str
    generation: int
    tokens: int
    ms: float


class Lacking(msgspec.Struct, tag=True, frozen=True):
    """What was to be made of images elsewhere has not come, and will not be waited for: their pixels are needed here.

    Attributes:
        digests: of these.
        reason: why nothing came of one of them.
    """

    incarnation: int
    request_id: str
    generation: int
    digests: list[bytes]
    reason: str


class Slept(msgspec.Struct, tag=True, frozen=True):
    """The answer to a `Sleep` or a `WakeUp`, when it is done; or why it is not: then the engine is as it was before.

    Attributes:
        number: of the order.
        level: as in `EngineStats.asleep`.
    """

    incarnation: int
    number: int
    level: int
    error: str = ""


class Snapshot(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine's load for the master, about every 50 ms while it changes and twice a second while it does not.

    Attributes:
        sequence: counts up within an incarnation.
        asleep: as in `EngineStats`; it takes nothing new, as if it drained.
        waiting_tokens: tokens that are still to be computed for the waiting requests.
        prefill_tokens: the same, for those that run.
        running_tokens: tokens whose KV the running requests hold.
        free_blocks: that can be handed out, idle cached ones included.
        token_budget: tokens in one step at most, as it is now; see `Ready`.
        reserved_blocks: set aside for requests that are being handed over to it.
        migrating: requests that wait for the end of their hand-over from it.
        migration_queue: requests of other instances that wait for blocks here.
        migration_wait_ms: for how long the first of them has.
        ttft_ms, tpot_ms, interval_ms: recent means over the engine's own requests: arrival here to first token of those
            online, time per token after it, and time between the last two steps; None before there is one.
        fetch_ms: of one block from another instance, a recent mean, and fetch_wait_ms until the first of them came;
            None while there is none.
        embedding_mb_ms: of a million bytes of embeddings from another instance, likewise.
        load_ms: tier below the device -> of 64 tokens from there, as was measured lately, or is believed.
        factors: of its steps, learned from measured ones; see `sched.steptime.StepTime`.
        speed: of its latest steps, as a share of what they are without factors; None while there are too few.
        encode_ms: of an image's token, a recent mean; None before there was one.
        encodes: images that it has looked at.
    """

    incarnation: int
    sequence: int
    role: Role
    role_generation: int
    draining: bool
    running: int
    waiting: int
    migrating: int
    waiting_tokens: int
    prefill_tokens: int
    running_tokens: int
    free_blocks: int
    reserved_blocks: int
    num_blocks: int
    token_budget: int
    asleep: int = 0
    migration_queue: int = 0
    migration_wait_ms: float = 0.0
    ttft_ms: float | None
    tpot_ms: float | None
    interval_ms: float | None
    fetch_ms: float | None = None
    fetch_wait_ms: float | None = None
    embedding_mb_ms: float | None = None
    load_ms: dict[str, float] = {}
    factors: dict[str, float]
    speed: float | None = None
    encode_ms: float | None = None
    encodes: int = 0


class CacheDelta(msgspec.Struct, tag=True, frozen=True):
    """Prefix keys that were added to and removed from a tier of the prefix cache.

    Attributes:
        sequence: counts up by one within an incarnation, in each tier for itself; a gap is a reason to `AskCache`.
        tier: "device", where blocks are computed with, or one below it from which they are loaded first: "host", "disk"
            or "remote". What lies in several is told in each. Of "remote" an instance tells what it has put there.
            "embeddings" has digests instead, of images whose embeddings it gives to others.
        whole: `added` is everything in this tier and replaces what was known of it; other tiers are not affected.
    """

    incarnation: int
    sequence: int
    added: list[bytes]
    removed: list[bytes]
    tier: str = "device"
    whole: bool = False


class LinkFailed(msgspec.Struct, tag=True, frozen=True):
    """A link to a peer was refused or lost; `message` holds both sides' values."""

    incarnation: int
    peer: Peer
    message: str


class Inspection(msgspec.Struct, tag=True, frozen=True):
    """An engine's resources, after all its `check`s passed; `broken` names one that failed."""

    incarnation: int
    counts: dict[str, int]  # requests, held_blocks, idle_blocks, free_blocks, leases, ranges_used, ..., open_files
    broken: str = ""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine is about to exit with an error, or refuses this sender.

    Attributes:
        requests: by one of which it was broken, as far as it can tell: those in its step.
    """

    message: str
    requests: list[str] = []


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """The engine ends now, as it was told to: it has not failed."""

    incarnation: int


Event = (
    Ready
    | StepReport
    | Refused
    | Stayed
    | Fetched
    | Lacking
    | Slept
    | Snapshot
    | CacheDelta
    | LinkFailed
    | Inspection
    | Failed
    | Stopped
)

decode_command = decoder(Command).decode
decode_event = decoder(Event).decode
