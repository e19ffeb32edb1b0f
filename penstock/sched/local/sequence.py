"""A sequence: its tokens, and the count of computed ones, which covers prefill, decode and recompute. And the queue of
those that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from penstock.core.plan import BLOCK_TOKENS, POOLED_ONE, SequenceStep
from penstock.core.request import FinishReason, ImagesSeen, Pooling, Request, TokenLogprobs, TokenOutput
from penstock.kv.groups import WHOLE, Windows, first_seen, held_of, parent_of, spanned
from penstock.kv.keys import extend_keys, salted
from penstock.kv.pool import Hit, beginning_keys

_turn = attrgetter("turn")


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def standing_of(request: Request) -> tuple[bool, int]:
    """Preemption order: the greater gives way to the less."""
    return request.offline, request.priority


@dataclass(slots=True, eq=False)
class StoreHold:
    """On the blocks of a sequence that are being copied.

    Attributes:
        stores: under way.
        blocks: held for them since the sequence has freed them, and all before them too: a holder of a block holds its
            parents (`BlockPool`).
    """

    stores: int = 0
    blocks: list[int] = field(default_factory=list)


class Sequence:
    """One request in an engine. Times are seconds of the engine's clock.

    Attributes:
        rows: places that it takes among those that run at once.
        branching: it is a `BeamGroup`.
        rank: (offline, priority, order of arrival); the last one is preempted first.
        turn: its place among those whose prompts are to be prefilled, the least first; the policy says what it means.
        arrived: when its client sent it.
        added, started, answered: when it came to this engine, first ran, and had its first token, wherever that was
            sampled; None before that.
        ttft, tpot: its targets in seconds; inf without.
        first: what the deadlines of its tokens are counted from: when the first was sampled here. None before that:
            then its next token is due like a first one, also when others were generated elsewhere.
        tokens: the prompt and what was generated, here and before.
        windows: of the model's groups of layers; `groups` is how many they are.
        blocks: as a step has them (`core.plan.SequenceStep`).
        computed: the KV of tokens[:computed] is in `blocks`.
        in_flight: how many tokens of `computed` are still being computed, by a step whose outcome is counted already
            (`sched.local.steps`); when it samples a token, the last of `tokens` is a placeholder.
        special: it has parameters that most sequences' steps do not need.
        steered: what is drawn depends on which tokens came before, beyond what the model computes.
        prompt_logprobs: of the prompt, as far as it was computed; None when they are not wanted, or have left.
        pooling: of the prompt, whose embedding is all that is wanted; None generates.
        pooled: what the runner has brought for that; a sum grows by every step.
        root: parent of its first block's prefix key.
        keys: prefix keys of the leading full blocks of `tokens`, as far as they were needed.
        published: how many leading blocks of each group can be found by their key.
        dropped: for each group, how many leading blocks were given back, or never there, since no row to come sees
            them; in `blocks` the one after them stands in their places, so that whatever reads these reads nobody
            else's.
        cached_tokens: prompt tokens found in the prefix cache when the sequence was first admitted; None before that.
        migrates: it is meant to go on at another instance after its next token.
        moving: it is being handed over while it decodes: until that has ended nothing of it is given back.
        handoffs: how many were begun, here and before: it numbers their leases.
        transferring: place in `blocks` -> block, of those that are being sent there.
        kept: tier below the device -> how many leading blocks of each group were looked at for a copy there
            (`sched.local.offload`).
        store_hold: on its blocks, for copies that are being made; None as long as there were none.
        gave_way: it was preempted; `preemptions`: how often, here.
        asked: it was asked whether a tier that others fill has more of it.
        loads: how often it waited for copies; `loaded`: tier -> tokens that they brought.
        fetched: tokens that were brought from a peer, or from what a failed one has left.
        entered: totals of the engine's steps and prompt tokens when it came.
        lacking: how long it was the next to be admitted and there was no room, in seconds; `lacks`: since when.
        wait: see `Timing`; "" before its first token. images: the same; None where it has none.
    """

    __slots__ = (
        "added",
        "answered",
        "arrived",
        "asked",
        "blocks",
        "cached_tokens",
        "computed",
        "dropped",
        "entered",
        "fetched",
        "first",
        "gave_way",
        "groups",
        "handoffs",
        "images",
        "in_flight",
        "kept",
        "keys",
        "lacking",
        "lacks",
        "loaded",
        "loads",
        "migrates",
        "moving",
        "pooled",
        "pooling",
        "preemptions",
        "prompt_logprobs",
        "published",
        "rank",
        "request",
        "root",
        "special",
        "started",
        "steered",
        "store_hold",
        "tokens",
        "tpot",
        "transferring",
        "ttft",
        "turn",
        "wait",
        "windows",
    )

    rows: int = 1
    branching = False

    def __init__(self, request: Request, number: int, now: float, root: bytes = b"", windows: Windows = WHOLE) -> None:
        self.request = request
        self.rank = (*standing_of(request), number)
        self.turn: tuple[float, ...] = self.rank
        self.added, self.arrived = now, now - request.waited
        self.started: float | None = None
        self.answered: float | None = None
        self.ttft = inf if request.ttft_ms is None else request.ttft_ms / 1e3
        self.tpot = inf if request.tpot_ms is None else request.tpot_ms / 1e3
        self.first: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        params = request.params
        if params.prompt_logprobs is not None and not request.generated:  # else they left with the first token
            self.prompt_logprobs = []
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        self.steered = bool(penalised or request.bad_words or params.structured_outputs or params.thinking)
        self.pooling: Pooling | None = request.pooling
        self.pooled: list[float] = []
        self.special = bool(
            self.steered
            or params.min_tokens
            or self.prompt_logprobs is not None
            or self.pooling is not None
            or request.media
        )
        self.root = salted(root, request.cache_salt) if request.cache_salt else root
        self.tokens = [*request.prompt, *request.generated]
        self.computed = self.in_flight = 0
        self.windows, self.groups = windows, len(windows)
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self.published = 0
        self.dropped = [0] * len(windows)
        self.cached_tokens: int | None = None
        self.migrates = False
        self.moving = False
        self.handoffs = 0
        self.transferring: dict[int, int] = {}
        self.kept: dict[str, int] = {}
        self.asked = self.gave_way = False
        self.preemptions = 0
        self.loads, self.loaded = 0, dict[str, int]()
        self.fetched = 0
        self.store_hold: StoreHold | None = None
        self.entered = (0, 0)
        self.lacking = 0.0
        self.lacks: float | None = None
        self.wait = ""
        self.images = ImagesSeen(len(request.media)) if request.media else None

    @property
    def storing(self) -> bool:
        """Whether some of its blocks are being copied, so that they stay held when it lets go of them."""
        return self.store_hold is not None and self.store_hold.stores > 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def offline(self) -> bool:
        return self.rank[0]

    @property
    def standing(self) -> tuple[bool, int]:
        return self.rank[:2]

    @property
    def targeted(self) -> bool:
        """Whether any of its tokens has a deadline."""
        return not self.offline and min(self.ttft, self.tpot) < inf

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet: one while decoding, more during prefill."""
        return len(self.tokens) - self.computed

    @property
    def settled(self) -> int:
        """Tokens whose KV is in `blocks` by now, whatever is in flight."""
        return self.computed - self.in_flight

    @property
    def held(self) -> list[int]:
        """Those of its blocks that it holds."""
        return held_of(self.blocks, self.dropped) if any(self.dropped) else self.blocks

    @property
    def room(self) -> int:
        """Tokens whose KV has a place in `blocks`."""
        return len(self.blocks) // self.groups * BLOCK_TOKENS

    def missing(self, chunk: int, hit: Hit | None = None) -> int:
        """Blocks that it needs at once beyond those that it holds, for the tokens that it has.

        Args:
            chunk: tokens that a step computes of it at most.
            hit: what it would hold; by default what it does.
        """
        have, dropped = (len(self.blocks) // self.groups, self.dropped) if hit is None else (hit.length, hit.dropped)
        more = blocks_for(len(self.tokens)) - have
        if more <= 0:
            return 0
        return sum(
            [
                more if window is None else max(0, min(more, spanned(window, chunk) - (have - gone)))
                for window, gone in zip(self.windows, dropped, strict=True)
            ]
        )

    def seen_from(self, position: int) -> list[int]:
        """For each group, the index of the first block that rows from a position on see."""
        return [first_seen(window, position) for window in self.windows]

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def spent(self) -> tuple[float, float, str]:
        """Seconds that it waited, seconds from then to its first token, which it has, and what they went by."""
        assert self.started is not None
        assert self.answered is not None
        return self.started - self.added, self.answered - self.started, self.wait

    @property
    def reads_all(self) -> bool:
        """Whether every position is to be computed, whatever the prefix cache holds."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    def extend_keys(self, full_blocks: int) -> None:
        """Have the prefix keys of so many blocks."""
        extend_keys(self.keys, self.root, self.tokens, full_blocks, self.request.media)

    def beginning_keys(self, place: int, counts: Items[int]) -> list[bytes]:
        """The keys of the beginnings of its block at a place, so many tokens each; see `kv.pool.beginning_keys`."""
        if place > len(self.keys):
            self.extend_keys(place)
        media = self.request.media
        return beginning_keys(self.parent(place), self.tokens, place * BLOCK_TOKENS, counts, media)

    def parent(self, place: int) -> bytes:
        """Key of what comes before its block at a place, which must be known."""
        return self.keys[place - 1] if place else self.root

    # --- what it takes

    def cost(self, count: int) -> int:
        """Tokens that a step computes to bring it `count` positions further."""
        return count

    def blocks_until(self, end: int) -> int:
        """Blocks of all groups that hold positions [0, end)."""
        return blocks_for(end) * self.groups

    @property
    def upcoming(self) -> int:
        """Tokens whose place may be made ready while the last that it has is computed."""
        return int(not self.migrates and self.generated + 1 < self.request.max_tokens)

    @property
    def findable(self) -> int:
        """How many of its computed tokens others may find."""
        return self.computed

    def restart(self) -> None:
        """Reset it after preemption: it holds no blocks."""
        self.computed = self.published = 0
        self.kept.clear()
        self.pooled = []
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []

    # --- steps and results

    @property
    def due(self) -> float:
        """The deadline of its next token; inf without one."""
        if self.first is None:
            return self.arrived + self.ttft
        return self.first + self.tpot * self.generated

    def targets(self, count: int) -> list[int]:
        """Of the prompt's tokens that follow its next `count`: those whose log-probabilities are wanted."""
        if self.prompt_logprobs is None:
            return []
        return self.tokens[self.computed + 1 : min(self.computed + count + 1, len(self.request.prompt))]

    def step(self, count: int, drafts: Items[int] = ()) -> SequenceStep:
        """Its part of a step that brings it `count` positions further, and on by as many of the drafts as are right."""
        tokens, request, start = self.tokens, self.request, self.computed
        blocks = tuple(self.blocks)
        end = start + count
        sample = int(end == len(tokens) and self.pooling is None)
        own = tokens[start:end]
        if drafts:
            own += drafts
            end += len(drafts)
            sample += len(drafts)
        used = blocks_for(end) * self.groups
        step = SequenceStep(
            request.id,
            start,
            own,
            blocks if used == len(blocks) else blocks[:used],
            sample,
            request.params,
            request.seed,
            None,
            request.prompt,
            blocks[used:],
        )
        if end < len(tokens):
            step.following = tokens[end]
        if self.special:
            if sample and (self.steered or self.generated < request.params.min_tokens):
                step.generated = tokens[len(request.prompt) :]
                step.stop_ids, step.bad_words = request.stop_ids, request.bad_words
            step.targets = self.targets(count)
            if self.pooling == "mean" or end == len(tokens):
                step.pool = self.pooling
            step.media = request.media
        return step

    def pool(self, part: Items[float]) -> TokenOutput | None:
        """A step brought this. Returns the output, once the whole prompt is computed."""
        self.pooled = [a + b for a, b in zip(self.pooled, part, strict=True)] if self.pooled else [*part]
        if self.pending:
            return None
        count = len(self.tokens) * POOLED_ONE  # whole numbers as long as they need be: only this division rounds
        return TokenOutput(
            self.id,
            [],
            finish=FinishReason.STOP,
            cached_tokens=self.cached_tokens or 0,
            embedding=[x / count for x in self.pooled] if self.pooling == "mean" else self.pooled,
        )

    def start_clock(self, now: float) -> None:
        """Start its token clock: as if its last token had been sampled now, on time."""
        self.first = now if self.tpot == inf else now - self.tpot * (self.generated - 1)


@dataclass(slots=True)
class WantedBlock:
    """A block of a prefix that is to be brought to the device.

    Attributes:
        block: where it is there, or will be; None before that is known.
    """

    key: bytes
    parent: bytes
    block: int | None


def wanted_blocks(
    sequence: Sequence, keys: Items[Items[bytes]], tables: Items[Items[int | None]], end: int
) -> tuple[list[int], list[WantedBlock]]:
    """What the tokens after a prefix see of it, in order; and for each group, how many leading blocks nobody needs.

    Args:
        keys: for each group, of its blocks; those of the first name the prefix.
        tables: for each group, where its blocks are on the device.
        end: blocks of the prefix.
    """
    seen, chain = sequence.seen_from(end * BLOCK_TOKENS), keys[0]
    wanted = [
        WantedBlock(keys[group][i], parent_of(chain[i - 1] if i else sequence.root, group), tables[group][i])
        for i in range(end)
        for group in range(sequence.groups)
        if i >= seen[group]
    ]
    return seen, wanted


class WaitingQueue:
    """Waiting sequences hold no blocks. Turns are unique, and change only through `move`."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []  # the next is the first: of some thousands, that is taken in no time

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence:
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._sequences, sequence.turn, key=_turn)
        assert self._sequences[place] is sequence
        del self._sequences[place]

    def move(self, sequence: Sequence, turn: tuple[float, ...]) -> None:
        """Give a sequence another turn, whether it waits or is in prefill."""
        waits = not sequence.blocks
        if waits:
            self.remove(sequence)
        sequence.turn = turn
        if waits:
            self.add(sequence)

    def check(self) -> None:
        turns = [s.turn for s in self._sequences]
        assert turns == sorted(set(turns)), "the queue is out of order"
        for s in self._sequences:
            assert not s.blocks
            assert not s.transferring
            assert s.computed == 0
