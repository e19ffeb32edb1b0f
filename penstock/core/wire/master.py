"""Messages between the master, which decides where requests run, and frontends, which own them, or launchers, which run
the instances."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.core.request import ImagesSeen
from penstock.core.wire import PROTOCOL
from penstock.core.wire.codec import decoder
from penstock.core.wire.engine import ImageSource, Leg, Peer, Role, Source, Stage


class Endpoint(msgspec.Struct, frozen=True):
    """An instance of the deployment, and where its engine listens.

    Attributes:
        address: a ZMQ endpoint, such as ipc:///run/d0 or tcp://10.0.0.7:6000.
        role: what it is configured for.
        state: "stopped" when its engine does not run, and its launcher starts it when it is told to; "leaving" when it
            is to finish what it has and then to be stopped. A failed engine that is started again is "running".
        devices: that it takes while its engine runs.
        started: seconds from the order to start its newest engine until that could be reached; 0 until then.
        given_up: its engine has failed too often, and is not started again.
    """

    name: str
    address: str
    role: Role = "any"
    state: Literal["running", "stopped", "leaving"] = "running"
    devices: int = 1
    started: float = 0.0
    given_up: bool = False

    @property
    def holds_devices(self) -> bool:
        """Whether its devices are taken: while its engine starts, serves and drains."""
        return self.runs and not self.given_up

    @property
    def host(self) -> str:
        """Where its engine runs; "" on this host, where that needs no address."""
        return self.address.removeprefix("tcp://").rpartition(":")[0] if self.address.startswith("tcp:") else ""

    @property
    def runs(self) -> bool:
        """Whether its engine can be connected to, now or soon."""
        return self.state != "stopped"


class Join(msgspec.Struct, tag=True, frozen=True):
    """A frontend registers, and repeats this every second; the master answers with `Joined`.

    What a frontend placed is forgotten when it is not heard for `LEASE` seconds, or its next incarnation is heard.
    """

    sender: str
    incarnation: int = 0
    protocol: int = PROTOCOL


class PlacedImage(msgspec.Struct, frozen=True):
    """An image or a video of a prompt: its digest, and how many tokens stand for it."""

    digest: bytes
    tokens: int


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
        interrupted: it ran before, on an instance that was lost or may hang.
        hedged: it still runs there, on one that may hang: it gets a place only where there is room for it now.
        images: of its prompt, each once.
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
    interrupted: bool = False
    hedged: bool = False
    images: list[PlacedImage] = []


class Begun(msgspec.Struct, tag=True, frozen=True):
    """These sequences have their first token, from their latest placement."""

    request_ids: list[str]


class Settled(msgspec.Struct, tag=True, frozen=True):
    """A hand-off of this sequence is over, and it goes on at `instance`: where it was to go, or where it was. Or its
    frontend has not heard of the master, and has begun it there by itself.

    Attributes:
        generation: the attempt that goes on; what was asked for later ones is not wanted any more.
    """

    request_id: str
    generation: int
    instance: str


class Recovery(msgspec.Struct, frozen=True):
    """How an interrupted sequence went on elsewhere.

    Attributes:
        how: "fetch" or "remap" where KV was brought from a peer or the host's KV pool, "cache" where the instance had
            some itself, else "recompute".
        at: the instance; `source`: who had what was brought, "" without.
        tokens: that were not computed again.
        predicted_ms: from its new place to its next token; None where nobody predicts it.
        took_ms: the same, as it was; `paused_ms`: from the loss on.
        recompute_ms: the same, as predicted for computing all of it that the instance did not have.
    """

    how: str
    at: str
    source: str
    tokens: int
    predicted_ms: float | None
    took_ms: float
    paused_ms: float
    recompute_ms: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The latencies of a finished sequence.

    Attributes:
        ttft_ms: from its client's request to its first token.
        tpot_ms: mean time per token after it; None when there was none.
        queue_ms: from its client's request to its being sent to an engine.
        tokens: that it got.
        wait: what its engine says about its time before the first token.
        recoveries: how it went on after its instance was lost, each time.
        images: what became of those of its prompt; None where it has none, or that is not known.
        image_fallbacks: why it had to look at some where it was prefilled, each time.
    """

    request_id: str
    ttft_ms: float
    tpot_ms: float | None
    queue_ms: float
    tokens: int
    wait: str = ""
    recoveries: list[Recovery] = []
    images: ImagesSeen | None = None
    image_fallbacks: list[str] = []


class Ended(msgspec.Struct, tag=True, frozen=True):
    """These sequences have ended, in whatever way.

    Attributes:
        outcomes: of those that ended without an error.
        refused: of those that were given up because they break engines: id -> what happened.
    """

    request_ids: list[str]
    outcomes: list[Outcome] = []
    refused: dict[str, str] = {}


FrontendMessage = Join | Place | Begun | Settled | Ended


class AskMembers(msgspec.Struct, tag=True, frozen=True):
    """A frontend has missed a `Members`, or is new: send all."""


class AskOverview(msgspec.Struct, tag=True, frozen=True):
    """How is the deployment? `Overview` is the answer.

    Attributes:
        number: of the question, among those of this frontend.
    """

    number: int


class AskHistory(msgspec.Struct, tag=True, frozen=True):
    """Why did a request run where it did? `History` is the answer.

    Attributes:
        number: as in `AskOverview`.
        request: the client's id of it, or a sequence's.
    """

    number: int
    request: str


class EngineEnded(msgspec.Struct, tag=True, frozen=True):
    """How an incarnation of an engine ended, as its launcher saw it.

    Attributes:
        broken_by: the requests in the step that broke it, by one of them; empty where it was ended from outside.
    """

    name: str
    incarnation: int
    broken_by: list[str] = []


class HostOrder(msgspec.Struct, frozen=True):
    """What the launcher of a host that joined is to make of its instances. It is said again and again.

    Attributes:
        number: grows from one to the next, over all incarnations of who says it.
        acts: else it is only to find out whether it could.
        model: a folder, or a name of a hub.
        digest: of that checkpoint.
        policy: of the deployment; "" as before.
        undoes: number of the order before which all was as it is to be again; 0 when it was not told to change.
        limit: seconds that an instance has from its start until it takes requests.
        known: new instances of the host that all frontends know.
    """

    number: int
    acts: bool
    model: str
    digest: str
    policy: str = ""
    undoes: int = 0
    limit: float = 600.0
    known: list[str] = []


class HostProgress(msgspec.Struct, frozen=True):
    """How far the launcher of a host that joined is with an order.

    Attributes:
        number: of the newest order; 0 before the first.
        state: "able" or "unable" to do it, after it was asked; it "changes"; it has "changed"; it has "returned" to
            what it was.
        model: digest of what it serves; while it changes, of what it served.
        why: it is not able, or has returned.
        lines: what it would do, for people.
        doing: what it waits for, for people.
        introduces: a new instance that the frontends are to know.
    """

    number: int = 0
    state: Literal["able", "unable", "changes", "changed", "returned"] = "changed"
    model: str = ""
    why: str = ""
    lines: list[str] = []
    doing: str = ""
    introduces: str = ""


class HostReport(msgspec.Struct, tag=True, frozen=True):
    """A launcher registers its instances: when something of them changes, and every second.

    When it is not heard for `LEASE` seconds, they have left.

    Attributes:
        host: name of the launcher; no other has it.
        incarnation: of the launcher.
        instances: all that it runs or could start.
        troubles: of those that cannot serve, or may not be able to: name -> why, with the name of the process at fault.
        model: digest of what it serves, which is the same on every host, but for a change.
        other: in a change, what it served before, or what it becomes; "" without.
        ended: engines that have just done so.
        restarted: instances that were slow -> how often they were restarted for that, in a row, and how many minutes
            ago last: a new master learns it so.
        spread: its instances are on other hosts than it, and on several.
        began: it began the deployment, and has the say in it.
        orders: then, for those that joined, by host.
        progress: of one that joined.
    """

    host: str
    incarnation: int
    instances: list[Endpoint]
    troubles: dict[str, str] = {}
    model: str = ""
    protocol: int = PROTOCOL
    ended: list[EngineEnded] = []
    restarted: dict[str, tuple[int, int]] = {}
    spread: bool = False
    other: str = ""
    began: bool = False
    orders: dict[str, HostOrder] = {}
    progress: HostProgress | None = None


class StartTotals(msgspec.Struct, frozen=True):
    """Starts of instances by one path.

    Attributes:
        path: how they came to their weights, as `Ready.loaded` has it.
        seconds: that these took together, from the orders until they could be reached.
    """

    path: str
    count: int
    seconds: float


class FleetTotals(msgspec.Struct, frozen=True):
    """Of all instances, since the master began.

    Attributes:
        instance_seconds: for which they held devices: from their start until they had stopped.
        instances: that do now.
        changes: how many of "start", "stop" and "move" a scaling policy made, and of "restart" for being slow.
    """

    instance_seconds: float = 0.0
    instances: int = 0
    starts: list[StartTotals] = []
    changes: dict[str, int] = {}


class PrefixTotals(msgspec.Struct, frozen=True):
    """Prompts since the master began, and what an ideal cache would have found of them; see `kv.ideal`.

    Attributes:
        complete: whether `ideal_tokens` is exact; else it is a lower bound.
    """

    prompt_tokens: int = 0
    ideal_tokens: int = 0
    complete: bool = True


ToMaster = FrontendMessage | AskMembers | AskOverview | AskHistory | HostReport


class Joined(msgspec.Struct, tag=True, frozen=True):
    """
    Attributes:
        incarnation: of the master.
        wants_keys: whether its policy looks at prefix keys; hashing and sending them is not free.
        waiting: sequences in its queue, of all frontends.
        troubles: of instances, as the launchers said.
        members: number of the last `Members`.
        fleet: what the instances cost; None from the decoder of an older master.
        prefixes: of all frontends' prompts; None where the policy wants no keys.
    """

    incarnation: int
    protocol: int = PROTOCOL
    wants_keys: bool = False
    waiting: int = 0
    troubles: dict[str, str] = {}
    members: int = 0
    fleet: FleetTotals | None = None
    prefixes: PrefixTotals | None = None


class Members(msgspec.Struct, tag=True, frozen=True):
    """Instances that joined, or changed, and that left.

    Attributes:
        incarnation: of the master.
        sequence: counts up by one; a gap is a reason to `AskMembers`.
        left: name -> why.
        whole: `joined` is every instance that the master knows of; it has the number of the last one.
        complete: with `whole`, that all others have left; a new master may not have heard of them yet.
    """

    incarnation: int
    sequence: int
    joined: list[Endpoint]
    left: dict[str, str] = {}
    whole: bool = False
    complete: bool = False


class Placed(msgspec.Struct, tag=True, frozen=True):
    """Its stages run where its route says, each until the next takes over.

    Attributes:
        route: of one leg at least, no two of which are at the same instance.
        ttft_ms, tpot_ms: its targets from now on: its own, or those of its priority.
        predicted_ttft: seconds from its client's request to its first token; None when the policy does not predict.
        source: from where it is to bring KV that it lacks before it is prefilled; None computes that.
        next_ms: from now to the next token of an interrupted sequence, as predicted.
        recompute_ms: the same, if nothing were brought.
        images: who else looks at its images, or has done so; who prefills looks at all others.
    """

    request_id: str
    generation: int
    route: list[Leg]
    policy: str = ""
    reason: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    predicted_ttft: float | None = None
    source: Source | None = None
    next_ms: float | None = None
    recompute_ms: float | None = None
    images: list[ImageSource] = []

    def at(self, stage: Stage) -> Peer | None:
        """Who takes it over for a stage, or begins with it."""
        return next((leg.peer for leg in self.route if leg.stage == stage), None)


class Troubles(msgspec.Struct, tag=True, frozen=True):
    """What launchers say of their instances has changed.

    Attributes:
        troubles: all of it, as in `HostReport`.
    """

    troubles: dict[str, str]


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


class InstanceOverview(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the master sees it; what it reported, where it serves.

    Attributes:
        state: "ready", "suspect" when it has been silent, "draining", "sleeping", "absent" while it starts or
            restarts, "stopped".
        pending_tokens: prompt tokens that are still to be computed there.
        held_tokens: whose KV is there or will be.
        used_blocks: of `num_blocks`; those that only the prefix cache keeps are not used.
        migrating, migration_queue: sequences that leave it, and that wait for blocks to come to it.
        ttft_ms, tpot_ms, interval_ms, speed: see `Snapshot`.
        slow: that it is, how much, and what is done about it; "" when it is not.
        encodes, encode_ms: see `Snapshot`; image_tokens: of images that it is still to look at.
    """

    name: str
    role: Role
    state: str
    device: str = ""
    running: int = 0
    waiting: int = 0
    pending_tokens: int = 0
    held_tokens: int = 0
    used_blocks: int = 0
    num_blocks: int = 0
    migrating: int = 0
    migration_queue: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    interval_ms: float | None = None
    speed: float | None = None
    slow: str = ""
    encodes: int = 0
    encode_ms: float | None = None
    image_tokens: int = 0


class DecisionOverview(msgspec.Struct, frozen=True):
    """A sequence got a place.

    Attributes:
        at: when, UTC.
        waited_ms: from its client's request to then.
    """

    at: str
    request_id: str
    prefill: str
    decode: str | None
    policy: str
    reason: str
    waited_ms: float


class MoveOverview(msgspec.Struct, frozen=True):
    """An instance changed its role, or was started or stopped.

    Attributes:
        at: when, UTC.
        what: "move", "start", "stop" or "restart"; the last two have no role.
    """

    at: str
    what: str
    instance: str
    role: Role | None
    reason: str


class RelocationOverview(msgspec.Struct, frozen=True):
    """A sequence goes on at another instance: after its prompt, or while it decodes.

    Attributes:
        at: when that was decided, UTC.
        source, target: instances.
    """

    at: str
    request_id: str
    source: str
    target: str
    reason: str


class StageOverview(msgspec.Struct, frozen=True):
    """What a scaling policy found about a stage at its last look; see `sched.cluster.Verdict`."""

    role: Role
    serving: int
    starting: int
    more: int
    reason: str
    outcome: str


class Overview(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The deployment as the master sees it, of all frontends.

    Attributes:
        number: of the question.
        frontends: that are heard.
        waiting, offline_waiting: online and offline sequences in its queue.
        unplaceable: that no instance can take now.
        placed: that have a place and have not ended.
        window: seconds that the next five are about; they are of online sequences.
        arrivals, completions: how many came and ended.
        attained: of those that ended, how many kept their targets, or had none.
        prompt_tokens, output_tokens: means of what came, and of what ended.
        decisions, moves, relocations: the latest, the newest first; moves are of instances, relocations of sequences.
        fleet: what the instances cost.
        stages: what the scaling policy says of each; none where nothing is ever started or stopped.
        prefixes: as in `Joined`.
    """

    number: int = 0
    frontends: int
    waiting: int
    offline_waiting: int
    unplaceable: int
    placed: int
    window: float
    arrivals: int
    completions: int
    attained: int
    prompt_tokens: float
    output_tokens: float
    instances: list[InstanceOverview]
    decisions: list[DecisionOverview] = []
    moves: list[MoveOverview] = []
    relocations: list[RelocationOverview] = []
    fleet: FleetTotals = FleetTotals()
    stages: list[StageOverview] = []
    prefixes: PrefixTotals | None = None


class History(msgspec.Struct, tag=True, frozen=True):
    """What the master remembers of a request.

    Attributes:
        number: of the question.
        decisions: that it remembers, of all requests.
        sequences: JSON, a list, as `penstock explain --json` has it; empty where there is nothing.
    """

    number: int
    decisions: int
    sequences: bytes


# --- to launchers


class StartInstance(msgspec.Struct, tag=True, frozen=True):
    """Start an incarnation of the instance."""

    name: str
    role: Role


class StopInstance(msgspec.Struct, tag=True, frozen=True):
    """Stop the instance, which has no requests left."""

    name: str


class RestartInstance(msgspec.Struct, tag=True, frozen=True):
    """Stop the instance, which has no requests left, and start another incarnation of it.

    Attributes:
        times: how often it was slow and is restarted for that, in a row; 0 for other reasons.
    """

    name: str
    times: int = 0


class HostTaken(msgspec.Struct, tag=True, frozen=True):
    """The launcher's instances are part of this deployment: the answer to each of its reports.

    Attributes:
        ready: instances of the deployment that are given requests.
        givers: those of other launchers that may give its engines weights -> where, in the order to ask them.
        order: for one that joined, of the one that began the deployment, if any.
        model: digest of what that one serves; "" where it was not heard.
        hosts: for the one that began it, those that joined.
    """

    ready: list[str] = []
    givers: dict[str, str] = {}
    order: HostOrder | None = None
    model: str = ""
    hosts: dict[str, HostProgress] = {}


class HostRefused(msgspec.Struct, tag=True, frozen=True):
    """The launcher's instances cannot be part of this deployment."""

    message: str


ToLauncher = StartInstance | StopInstance | RestartInstance | HostTaken | HostRefused


class Relocate(msgspec.Struct, tag=True, frozen=True):
    """Have it handed over to `peer`, wherever it runs now, or go on there if that is where it is. `Settled` says what
    came of it.

    Attributes:
        reason: a class of reasons, and after a colon the details, if any.
    """

    request_id: str
    generation: int
    peer: Peer
    reason: str = ""


MasterMessage = Joined | Placed | NoPlace | Queued | Relocate | Members
FromMaster = MasterMessage | Overview | History | EngineEnded | Troubles

decode_to_master = decoder(ToMaster).decode
decode_from_master = decoder(FromMaster).decode
decode_to_launcher = decoder(ToLauncher).decode
