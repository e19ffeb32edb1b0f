"""What policies over many instances see, and what they answer.

Decisions are made over one immutable `ClusterView`, which includes all earlier decisions: a load counts from its
dispatch, not from the next report. Times are seconds of the view's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from math import inf
from typing import Literal, NamedTuple, Protocol, TypeVar

from msgspec import Struct, field

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire import engine
from penstock.core.wire.engine import Role
from penstock.sched.steptime import StepTime

Stage = engine.Stage
Key = tuple[str, str]  # of a sequence: its frontend, and its id there
_NOTHING: Mapping[str, int] = {}
T = TypeVar("T")


class Random(Protocol):
    """A seeded generator, such as `random.Random`."""

    def choice(self, candidates: Sequence[T], /) -> T: ...
    def random(self) -> float: ...


class InstanceLoad(Struct, frozen=True, kw_only=True):
    """One instance that may be given work, with everything that was sent to it already counted. A
    view: `peers` and `unlinked` change with the cluster.

    Attributes:
        role: which work it is meant for now. One of "decode" that still prefills prompts, or one of "prefill" on which
            sequences still decode, is turning: it finishes what it has (xLLM's roles P->D and D->P).
        times: predicts its steps, with the factors that were learned from measured ones.
        token_budget: tokens in one step at most.
        max_sequences: that run at once.
        max_model_len: prompt and output tokens of one sequence together.
        num_blocks: KV blocks that it may hold.
        free_blocks: of those neither held nor reserved, by the newest report.
        prefilling: sequences whose prompts it is still to compute.
        pending_tokens: prompt tokens that are still to be computed there.
        requests: sequences that wait, run, or will decode there.
        decoding: those of them whose first token was sampled.
        held_tokens: tokens whose KV is there or will be.
        free_at: when the online prompts that it has will be prefilled, as predicted; in the past when it has none.
        idle_at: the same, of all prompts.
        available_at: as `free_at`, by RTP-LLM's equation (1): the latest end of its online prompts, each one's
            start, when it was sent or the one before it ended, and its predicted prefill; no report corrects it.
        ttft, tpot: the strictest targets of its online sequences in flight, seconds; inf without any.
        offline_requests, offline_tokens: what of `requests` and `held_tokens` is offline work.
        interval: seconds between two decode steps, as measured lately; None before there is a measurement.
        ttft_measured: seconds from an online prompt's arrival there to its first token, likewise.
        fetches: whether it can be sent KV that another instance has.
        fetch_ms: of one KV block from another instance, likewise; fetch_wait_ms: until the first of them comes.
        load_ms: tier below its device -> of one KV block from there, likewise, or as the instance believes.
        encoding_tokens: of images that it is to look at for others.
        encode_ms: of an image's token, as measured lately; None before there is a measurement.
        meets: names where it meets others in every step, and waits for them; "" nowhere.
        peers: instances that it can hand a request over to.
        unlinked: failed peer links: name -> reason.
    """

    name: str
    role: Role = "any"
    times: StepTime
    token_budget: int = 8192
    max_sequences: int = 256
    max_model_len: int = 0
    num_blocks: int = 0
    free_blocks: int = 0
    prefilling: int = 0
    pending_tokens: int = 0
    requests: int = 0
    decoding: int = 0
    held_tokens: int = 0
    free_at: float = -inf
    idle_at: float = -inf
    available_at: float = -inf
    ttft: float = inf
    tpot: float = inf
    offline_requests: int = 0
    offline_tokens: int = 0
    interval: float | None = None
    ttft_measured: float | None = None
    fetches: bool = False
    fetch_ms: float | None = None
    fetch_wait_ms: float | None = None
    load_ms: Mapping[str, float] = field(default_factory=dict)
    encoding_tokens: int = 0
    encode_ms: float | None = None
    meets: str = ""
    peers: Set[str] = frozenset()
    unlinked: Mapping[str, str] = field(default_factory=dict)

    @property
    def decode_seconds(self) -> float:
        """Predicted time of a step in which every sequence of this instance decodes."""
        return self.times.step_ms(decodes=self.requests, kv_tokens=self.held_tokens) / 1e3

    def queued_seconds(self, tokens: int, cached: int = 0) -> float:
        """Predicted time by which a prompt makes a queue of prompts longer: short ones are prefilled together, so they
        pay for their tokens and not each for a step. Arguments as for `prefill_seconds`."""
        if tokens >= self.token_budget:
            return self.prefill_seconds(tokens, cached)
        alone = self.prefill_seconds(tokens)
        together = self.prefill_seconds(self.token_budget) * tokens / self.token_budget
        return min(alone, together) + (self.prefill_seconds(tokens, cached) - alone if cached else 0.0)

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        """Predicted time to prefill a prompt in chunks beside what decodes here, without waiting.

        Args:
            tokens: to compute.
            cached: before them, found in the prefix cache.
        """
        return (
            self.times.prefill_ms(
                tokens,
                cached,
                budget=self.token_budget,
                decodes=self.decoding,
                kv_tokens=self.held_tokens if self.decoding else 0,
            )
            / 1e3
        )

    def load_seconds(self, demand: Demand) -> float:
        """Predicted time to bring what of a prompt lies below the device, each part from its tier; one of which the
        instance has said nothing counts as its host's memory. Meanwhile other sequences are prefilled and decoded."""
        ms = 0.0
        for tier, tokens in demand.loads.get(self.name, _NOTHING).items():
            each = self.load_ms.get(tier)
            ms += self.times.load_ms(tokens) if each is None else each * tokens / BLOCK_TOKENS
        return ms / 1e3

    def begins_at(self, now: float, demand: Demand) -> float:
        """When it begins to prefill a prompt, as predicted: the prompts before it are prefilled by then, what of it
        lies below the device is there, and its images are seen."""
        begins = max(now + demand.brought_in.get(self.name, 0.0), self.free_at)
        if demand.images_in:
            begins = max(now + demand.images_in.get(self.name, 0.0), begins)
        if self.name in demand.loads:
            return max(now + self.load_seconds(demand), begins)
        return begins


class Holder(NamedTuple):
    """Somebody who has KV of a prompt.

    Attributes:
        name: of a peer; "" for the KV pool of the instance that is asked about.
        tokens: leading ones of the prompt.
        free_at: when it has sent what others have been told to fetch from it, as predicted; in the view's clock.
    """

    name: str
    tokens: int
    free_at: float = -inf


class Demand(Struct, frozen=True, kw_only=True):
    """A sequence that needs a place.

    Attributes:
        key: unique in the cluster.
        max_tokens: 0 for an embedding, which needs no decode instance: one that is named is not used.
        arrived: when its client sent it, in the view's clock; the past.
        ttft, tpot: its targets in seconds; inf without.
        priority: lower runs first.
        offline: it has no targets, and uses the capacity that other requests leave.
        chat: the conversation that it belongs to; "" when that is not known.
        hits: instance -> leading prompt tokens in its cache; other instances have none.
        loads: instance -> tier below its device -> how many of these are to be loaded from there; other instances have
            none.
        lenders: few of the instances that have most of it on their devices, from whom others can fetch that.
        exclude: instances that it should not be given.
        interrupted: it ran before, on an instance that was lost.
        brought: instance -> leading prompt tokens that it will have when it has brought what it lacks from elsewhere,
            where that is the sooner; before it is placed, only of interrupted ones.
        brought_in: instance -> seconds that this takes.
        image_tokens: of the prompt, that stand for images.
        images_at: instance -> how many of its images it has looked at before, or is about to.
        images_in: instance -> seconds until what is seen in all of them is there, where it prefills.
    """

    key: Key
    prompt_tokens: int
    max_tokens: int
    arrived: float = 0.0
    ttft: float = inf
    tpot: float = inf
    priority: int = 0
    offline: bool = False
    chat: str = ""
    hits: Mapping[str, int] = field(default_factory=dict)
    loads: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lenders: Sequence[Holder] = ()
    exclude: Set[str] = frozenset()
    interrupted: bool = False
    brought: Mapping[str, int] = field(default_factory=dict)
    brought_in: Mapping[str, float] = field(default_factory=dict)
    image_tokens: int = 0
    images_at: Mapping[str, int] = field(default_factory=dict)
    images_in: Mapping[str, float] = field(default_factory=dict)

    @property
    def deadline(self) -> float:
        """Of its first token."""
        return self.arrived + self.ttft

    @property
    def tokens(self) -> int:
        """That it may come to at most."""
        return self.prompt_tokens + self.max_tokens

    def to_compute(self, instance: str) -> int:
        """Prompt tokens that are not in an instance's cache, and not brought there; the last one always is to be
        computed."""
        there = self.hits.get(instance, 0)
        if self.brought:
            there = max(there, self.brought.get(instance, 0))
        return max(1, self.prompt_tokens - there)

    def to_load(self, instance: str) -> int:
        """Prompt tokens that an instance has in its cache, but not on its device."""
        return sum(self.loads.get(instance, _NOTHING).values())


class Rates(Struct, frozen=True, kw_only=True):
    """Of online sequences over the last `window` seconds.

    Attributes:
        arrivals, completions: counts.
        attained: of the completed, those that kept their targets.
        prompt_tokens: mean of what arrived; 0 without any.
        output_tokens: mean of what was completed and generated any; 0 without any.
    """

    window: float = 10.0
    arrivals: int = 0
    completions: int = 0
    attained: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0


class ClusterView(Struct, frozen=True, kw_only=True):
    """A moment of the cluster.

    Attributes:
        instances: those that may be given sequences now: not those of the role "encode", unless there are no others.
        encoders: those of the role "encode" that may be given images now.
        queue: online sequences without a place, in order of arrival.
        offline: the first of those that are offline.
        rates: recent rates.
        shortest: no instance's `max_model_len` is less; 0 says nothing.
    """

    now: float
    instances: Sequence[InstanceLoad]
    queue: Sequence[Demand] = ()
    offline: Sequence[Demand] = ()
    rates: Rates = Rates()
    shortest: int = 0
    encoders: Sequence[InstanceLoad] = ()


class Move(Struct, frozen=True, kw_only=True):
    """Change an instance's role; its running requests continue."""

    name: str
    role: Role
    reason: str


class Way(Struct, frozen=True, kw_only=True):
    """How the KV of a prompt comes to be on an instance; see `sched.cluster.reuse`.

    Attributes:
        how: computed, fetched from a peer, or remapped from the host's KV pool; what is not there then is computed.
        source: the peer; "" without one.
        tokens: leading ones that need not be computed.
        bring_ms: until what is brought has come.
        ms: until the next token, as predicted; `recompute_ms`: the same if nothing were brought.
    """

    how: Literal["recompute", "fetch", "remap"]
    source: str
    tokens: int
    bring_ms: float
    ms: float
    recompute_ms: float


class ImageWay(Struct, frozen=True):
    """Where what is seen in images of a prompt comes from.

    Attributes:
        at: an instance.
        how: it is to look at them, or has done so before.
        images, tokens: of them.
    """

    at: str
    how: Literal["looks", "looked"]
    images: int
    tokens: int


class Decision(Struct, frozen=True, kw_only=True):
    """Where a sequence runs, and why.

    Attributes:
        key: of the demand.
        prefill: the instance that prefills the prompt.
        decode: the one that takes over after it; None without a hand-off.
        open: who decodes is decided when the prompt ends, by a `MigrationPolicy`; `decode` is None.
        reason: a class of reasons, and after a colon the details, if any: "no-decode: d0 is not linked".
        costs: what the policy held against each candidate, the chosen one included, by stage and name; lower is
            better.
        predicted_ttft: seconds from the client's arrival; None when the policy does not predict.
        moves: done before the sequence is sent.
        way: how the prompt's KV comes to be at `prefill`; the master's addition. None where nobody knows who has it.
        media_route, images: where what is seen in its images comes from, and which stages are together for that; the
            same. "" and none where it has no images.
    """

    key: Key
    prefill: str
    decode: str | None
    policy: str
    reason: str
    costs: Mapping[Stage, Mapping[str, float]]
    predicted_ttft: float | None = None
    moves: Sequence[Move] = ()
    open: bool = False
    way: Way | None = None
    media_route: str = ""
    images: Sequence[ImageWay] = ()


class Later(Struct, frozen=True):
    """Nothing can be decided now.

    Attributes:
        at: when to ask again although nothing has happened by then; inf for never.
        moves: done now.
    """

    at: float = inf
    moves: Sequence[Move] = ()


class DispatchPolicy(Protocol):
    """Decides for one sequence at a time. It is asked when one arrives, and again after each decision and whenever
    something changes, until it answers `Later`; so it never needs to count what it has just decided.

    Attributes:
        wants_keys: whether it uses `Demand.hits` and `loads`; otherwise prefix keys are not computed.
    """

    name: str
    wants_keys: bool

    def decide(self, view: ClusterView, rng: Random) -> Decision | Later:
        """Decide over a non-empty queue. At least one instance is long enough for each demand in it, besides those that
        it excludes; see `fitting`."""


class Resident(Struct, frozen=True, kw_only=True):
    """A sequence that has its first token.

    Attributes:
        at: the instance that it is at, which may be given no work now. It is counted there as one that decodes.
        since: when the master heard of its first token.
    """

    demand: Demand
    at: str
    since: float

    @property
    def due(self) -> float:
        """The deadline of its second token."""
        return self.since + self.demand.tpot


class Migration(Struct, frozen=True, kw_only=True):
    """Where a sequence goes on.

    Attributes:
        key: of the demand.
        to: an instance, perhaps the one that it is at.
        reason: as of `Decision`.
        moves: done before.
    """

    key: Key
    to: str
    reason: str
    moves: Sequence[Move] = ()


class MigrationPolicy(Protocol):
    """Decides where sequences decode whose prompts have ended and whose `Decision` left that open. Asked like a
    `DispatchPolicy`, so that it sees what it has decided; what was decided is counted at its new place at once."""

    name: str

    def migrate(self, view: ClusterView, prefilled: Sequence[Resident]) -> Migration | Later:
        """
        Args:
            prefilled: at least one, in order of their first tokens.
        """
        ...


class MediaPolicy(Protocol):
    """Decides which stages of requests with images are together. Asked on every tick of the master; what it answers is
    for requests that are placed from then on. One that moves instances between roles is a `RolePolicy` as well.

    Attributes:
        why: it chooses what it does; "" while that is what was set.
    """

    why: str

    def observe(self, now: float, demand: Demand, images: Sequence[int], seen: int) -> None:
        """An online request has come, with images or without.

        Args:
            images: tokens of each of its images that is to be looked at.
            seen: tokens of all others, of which somebody has what was seen.
        """
        ...

    def began(self, now: float, key: Key) -> None:
        """An online request has its first token."""
        ...

    def ended(self, now: float, key: Key, tokens: int | None) -> None:
        """An online request has ended, after so many; None where that was an error, or its client's will."""
        ...

    def choose(self, view: ClusterView) -> engine.MediaRoute | None:
        """None is "E+P+D" while there are instances of the role "encode", and otherwise "EP+D"."""
        ...


class Balancer(Protocol):
    """Moves what runs, away from where it does badly. Asked on every tick of the master."""

    name: str

    def balance(self, view: ClusterView, residents: Callable[[str], Sequence[Resident]]) -> Sequence[Migration]:
        """
        Args:
            residents: of an instance, those that are not being handed over.
        """
        ...


class PrioritySLO(Protocol):
    """The targets that a priority implies, for requests without any."""

    def observe(self, priority: int, ttft: float, tpot: float | None, queued: float) -> None:
        """A sequence ended without an error. All in seconds; `queued`: from its arrival to its being sent to an
        instance."""

    def target(self, priority: int, ahead: int) -> tuple[float, float]:
        """TTFT and TPOT in seconds, of a sequence that comes now.

        Args:
            ahead: online sequences of the same priority without a place.
        """
        ...


class RolePolicy(Protocol):
    """Which instance has which role. Asked on every tick of the master.

    Attributes:
        dynamic: whether it ever moves one: then all are linked with all.
    """

    name: str
    dynamic: bool

    def decide(self, view: ClusterView) -> Sequence[Move]: ...


class Tally(Struct, frozen=True):
    """Online sequences that came and went in a short while.

    Attributes:
        at: when it began, in seconds.
        arrivals, completions: counts.
        prompt_tokens: of all that arrived.
        attained: of the completed, those that kept their targets.
    """

    at: float
    arrivals: int = 0
    prompt_tokens: int = 0
    completions: int = 0
    attained: int = 0


class Fleet(Struct, frozen=True, kw_only=True):
    """What scaling may change, and what it is for.

    Attributes:
        absent: names of instances that could be started.
        starting: name -> the role that it will have; also of those that start again after a failure.
        draining: names of those that drain. They hold their devices until they have stopped.
        silent: names of those that serve and are not in the view, as nothing was heard of them lately.
        lacking: roles without which no request is served, and of which no instance is there.
        devices: name -> how many devices it takes, where that is not one.
        least: instances that serve.
        most: instances that hold devices, those that start or drain included.
        budget: devices that they may take together.
        start_seconds: from an order until an instance serves, as was measured lately or is believed.
        complete: whether all instances are known: a new master has not heard of all, and misses none.
        lately: what came and went since the last question, in order.
    """

    absent: Sequence[str] = ()
    starting: Mapping[str, Role] = field(default_factory=dict)
    draining: Set[str] = frozenset()
    silent: Set[str] = frozenset()
    lacking: Sequence[Role] = ()
    devices: Mapping[str, int] = field(default_factory=dict)
    least: int = 1
    most: int = 1
    budget: float = inf
    start_seconds: float = 0.0
    complete: bool = True
    lately: Sequence[Tally] = ()


class Start(Struct, frozen=True, kw_only=True):
    name: str
    role: Role
    reason: str


class Stop(Struct, frozen=True, kw_only=True):
    """Drain an instance, and stop it when it has no requests left."""

    name: str
    reason: str


class Restart(Struct, frozen=True, kw_only=True):
    """Drain an instance, and start it again."""

    name: str
    reason: str


FleetChange = Start | Stop | Move | Restart


class Verdict(Struct, frozen=True, kw_only=True):
    """What was found about a stage, and what follows.

    Attributes:
        role: of the stage.
        serving, starting: its instances.
        more: instances that are wished for; below 0 those that it can do without.
        reason: what was seen.
        outcome: a class, and after a colon the details: "starts: engine-3", "cooldown: it has grown 2.0 s ago".
    """

    role: Role
    serving: int
    starting: int
    more: int
    reason: str
    outcome: str

    @property
    def kind(self) -> str:
        """The class of what follows."""
        return self.outcome.partition(":")[0]


class Scaled(Struct, frozen=True):
    """Changes, and for each stage why these, or why none."""

    changes: Sequence[Start | Stop | Move] = ()
    verdicts: Sequence[Verdict] = ()


class ScalingPolicy(Protocol):
    """How many instances there are.

    Attributes:
        interval: seconds between two questions; inf for never.
    """

    name: str
    interval: float

    def decide(self, view: ClusterView, fleet: Fleet) -> Scaled: ...


def fitting(view: ClusterView, demand: Demand) -> Sequence[InstanceLoad]:
    """Instances that could hold a sequence, except those it excludes."""
    tokens = demand.tokens
    if tokens <= view.shortest and not demand.exclude:
        return view.instances
    return [i for i in view.instances if tokens <= i.max_model_len and i.name not in demand.exclude]
