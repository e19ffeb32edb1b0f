"""The local scheduler: properties under random histories, and the rules one by one."""

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.errors import InvalidRequest, PromptTooLong
from penstock.core.plan import BLOCK_TOKENS, POOLED_ONE, SequenceStep, StepPlan, StepResult, verified
from penstock.core.request import FinishReason, Hypothesis, MediaSpan, Request, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.kv.groups import WHOLE, Windows, most_held
from penstock.kv.pool import BlockPool
from penstock.kv.shared_tier import SharedTier
from penstock.kv.tier import Tier
from penstock.sched.local import LOCAL_POLICIES, Limits, Scheduler
from penstock.sched.local.beams import BeamSearch
from penstock.sched.local.lane import Lane
from penstock.sched.local.offload import Load, Offload, Order, Question, Store
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.local.sequence import blocks_for
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from tests.helpers.proposers import guessing, heads

STOP = 999
DRAWN = SamplingParams()
ALONE = st.sampled_from([0, 0, 0, 0, 0, 1, 3, 100])  # tokens of a request that runs alone until it has brought them
TIMES = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])


def next_token(tokens: list[int]) -> int:
    """A model: the next token is a function of all tokens before it, and sometimes it ends the text."""
    h = hash(tuple(tokens)) & 0xFFFF
    return STOP if h % 37 == 0 else h % 50


def hidden(tokens: list[int]) -> int:
    """The same model's hidden state after these tokens, a single number."""
    return hash((*tokens, -1)) & 0xFFFF


def embedded(prompt: list[int], pooling: str) -> list[float]:
    states = [hidden(prompt[: i + 1]) for i in range(len(prompt))]
    return [float(states[-1])] if pooling == "last" else [sum(states) / len(states)]


def likeliest(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The same model, asked for several next tokens: what ends the text is sometimes among them."""
    scores = {token: -1.0 - (hash((*tokens, token)) & 0xFFFF) / 1e4 for token in [*range(30), STOP]}
    scores[STOP] -= 4.0
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:count]


class Engine:
    """Runs plans against a memory of what every block holds, so that a wrong block id is noticed.

    With `ahead` the next step is scheduled while one is in flight, whose work is done only when it ends.
    """

    def __init__(self, scheduler: Scheduler, ahead: bool = False, windows: Windows = WHOLE) -> None:
        self.scheduler = scheduler
        self.ahead, self.windows = ahead, windows
        self.flying: list[StepPlan] = []
        self.sampled: list[int] = []  # in the last step that ended
        self.computed: Counter[str] = Counter()  # tokens of each request
        self.cells: dict[tuple[int, int], list[int]] = {}  # (block, offset) -> all tokens up to and with it
        self.out: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.hypotheses: dict[str, list[Hypothesis]] = {}
        self.embeddings: dict[str, list[float]] = {}
        self.now = 0.0
        self.moves: list[Order] = []  # between the device and the tiers below it, under way
        self.copies: dict[tuple[str, int], list[list[int]]] = {}  # tier and slot -> the block's cells
        self.store: dict[bytes, list[list[int]]] = {}  # the same of what engines share, by key
        self.seen: dict[bytes, int] = {}  # embeddings, by digest, and of how many tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.flying or self.moves)

    def step(self) -> StepPlan:
        if not self.begin() and not self.flying:
            self.move(0)
            return StepPlan(())
        if self.ahead:
            self.begin()
        return self.end()

    def send(self) -> None:
        """Begin what the scheduler wants to be moved. What is loaded is unknown until it is there."""
        orders = self.scheduler.offload.take_orders() if self.scheduler.offload is not None else []
        for order in orders:
            for block, *_ in order.moves if isinstance(order, Load) else ():
                self.clear(block)
        self.moves += orders

    def move(self, place: int, good: float = 1.0, seconds: float = 1e-3) -> None:
        """Let one of the moves end.

        Args:
            good: share of it that is what it should be.
            seconds: that it is said to have taken.
        """
        order = self.moves.pop(place)
        if isinstance(order, Question):
            there = sum(1 for _ in takewhile(lambda move: move.key in self.store, order.moves))
            self.scheduler.answered(order.number, there if good else 0, seconds)
            self.send()
            return
        if order.tier == "remote":
            self.move_remote(order, good, seconds)
            return
        if isinstance(order, Store):
            for block, slot, *_ in order.moves:  # at the last moment: who overwrites a block before it shows it
                self.copies[order.tier, slot] = [self.cells[block, i] for i in range(BLOCK_TOKENS)]
            self.scheduler.stored(order.number, whole=good > 0)
            return
        count = int(good * len(order.moves))
        for block, slot, *_ in order.moves[:count]:
            for i, past in enumerate(self.copies[order.tier, slot]):
                self.cells[block, i] = past
        self.scheduler.loaded(order.number, count, seconds)
        self.send()

    def move_remote(self, order: Store | Load, good: float, seconds: float) -> None:
        if isinstance(order, Store):
            for move in order.moves[: int(good * len(order.moves))]:
                self.store[move.key] = [self.cells[move.block, i] for i in range(BLOCK_TOKENS)]
            self.scheduler.stored(order.number, whole=good == 1.0)
            return
        most = int(good * len(order.moves))
        came = [*takewhile(lambda move: move.key in self.store, order.moves[:most])]
        for move in came:
            for i, past in enumerate(self.store[move.key]):
                self.cells[move.block, i] = past
        self.scheduler.loaded(order.number, len(came), seconds)
        self.send()

    def clear(self, block: int) -> None:
        for i in range(BLOCK_TOKENS):
            self.cells.pop((block, i), None)

    def make_ready(self, plan: StepPlan) -> None:
        for block in plan.fresh_blocks:
            self.clear(block)
        for digest in plan.forgotten:
            self.seen.pop(digest, None)
        for encode in plan.encodes:
            assert encode.pixels == encode.span.digest
            self.seen[encode.span.digest] = encode.span.length
        assert sum(self.seen.values()) <= self.scheduler.encodes.room
        for source, target, tokens in plan.copies:
            kept = [self.cells[source, i] for i in range(tokens)]
            self.clear(target)
            self.cells |= {(target, i): past for i, past in enumerate(kept)}

    def begin(self) -> StepPlan | None:
        most = max(2, self.scheduler.stages)
        if self.flying and not (self.ahead and len(self.flying) < most and self.scheduler.look_ahead()):
            return None
        plan = self.scheduler.schedule(self.now)
        self.now += 0.01
        self.send()
        if plan.empty:
            assert self.flying or self.moves or not self.scheduler.has_work
            return None
        limits = self.scheduler.limits
        assert sum(len(s.tokens) for s in plan.sequences) <= limits.token_budget
        assert len(plan.sequences) <= limits.max_sequences
        assert len({s.request_id for s in plan.sequences}) == len(plan.sequences)
        encoded = sum(each.span.length for each in plan.encodes[1:])
        assert encoded <= limits.encode_budget
        prompts = [s for s in plan.sequences if s.branches is None and len(s.tokens) > max(1, s.sample)]
        assert not (plan.encodes and prompts)
        together = [self.scheduler.sequence(s.request_id) for s in plan.sequences]
        if any(s.request.alone > (0 if s.branching else s.generated) for s in together):
            assert len(together) == 1
            assert not self.flying
        if self.ahead:
            self.scheduler.launch(plan)
        self.flying.append(plan)
        self.check_flights()
        return plan

    def check_flights(self) -> None:
        """Nothing that a step in flight may touch is to be had."""
        pool = self.scheduler.pool
        for plan in self.flying:
            regions = [s.branches.blocks for s in plan.sequences if s.branches is not None]
            for blocks in [plan.fresh_blocks, *(s.blocks for s in plan.sequences), *regions]:
                assert all(map(pool.holders, blocks)), "a block is anybody's while a step may touch it"
            for source, target, _ in plan.copies:
                assert pool.holders(source), "a block is anybody's while it is copied"
                assert pool.holders(target), "a block is anybody's while a step may touch it"

    def end(self) -> StepPlan:
        plan = self.flying.pop(0)
        self.make_ready(plan)
        sampled, candidates, pooled, pasts = [], {}, {}, {}
        for s in plan.sequences:
            if s.branches is not None:
                candidates[s.request_id] = self.branch(s)
                continue
            groups = len(self.windows)
            tables = [s.blocks[group::groups] for group in range(groups)]
            past = self.read(tables[0], s.start - 1) if s.start else []
            for span in s.media:
                if s.start < span.start + span.length and span.start < s.start + len(s.tokens):
                    assert span.digest in self.seen, "rows of an image that nobody has looked at"
            self.computed[s.request_id] += len(s.tokens)
            for i, token in enumerate(s.tokens):
                past = [*past, self.sampled[-1 - token] if token < 0 else token]
                position = s.start + i
                for table in tables:
                    self.cells[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = past
                if i >= len(s.tokens) - s.sample:
                    sampled.append(next_token(past))
            if s.pool is not None:
                states = [hidden(past[: s.start + i + 1]) for i in range(len(s.tokens))]
                pooled[s.request_id] = [float(states[-1])] if s.pool == "last" else [sum(states) * POOLED_ONE]
            # every block of the past that can be seen holds exactly this sequence's past
            for window, table in zip(self.windows, tables, strict=True):
                for position in range(0 if window is None else max(0, s.start + 1 - window), s.start):
                    assert self.read(table, position) == past[: position + 1]
            if s.candidates:
                candidates[s.request_id] = [likeliest(past, s.candidates)]
            pasts[s.request_id] = past[: len(past) - s.sample + 1]
        self.sampled = sampled
        runs = verified(plan.sequences, sampled)
        asking = [s for s in plan.sequences if s.sample]
        proposed = {
            s.request_id: drafted([*pasts[s.request_id], *run], s.proposes)
            for s, run in zip(asking, runs, strict=True)
            if s.proposes
        }
        result = StepResult(runs, [None] * len(runs), candidates=candidates, pooled=pooled, proposed=proposed)
        outputs = self.scheduler.update(plan, result)
        self.collect(outputs)
        self.send()
        self.check_flights()
        return plan

    def interrupt(self) -> None:
        """All that is in flight ends early: the first has written something, and those behind it nothing."""
        for place, plan in enumerate(self.flying[:]):
            self.flying.pop(0)
            self.make_ready(plan)
            for s in plan.sequences if not place and self.windows == WHOLE else ():
                for position in range(s.start, s.start + (0 if s.branches else len(s.tokens) // 2)):
                    self.cells[s.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = ["half"]
            self.collect(self.scheduler.update(plan, StepResult([], [], interrupted=True)))
            self.check_flights()
        self.send()

    def branch(self, s: SequenceStep) -> list[list[tuple[int, float]]]:
        """A step of a beam search, in the blocks of every group of layers."""
        groups = len(self.windows)
        found = [
            self.branch_in(s, window, s.blocks[group::groups], s.branches.blocks[group::groups])
            for group, window in enumerate(self.windows)
        ]
        assert all(each == found[0] for each in found)
        return found[0]

    def branch_in(self, s: SequenceStep, window, prompt, region) -> list[list[tuple[int, float]]]:
        """First all rows write, then each finds its past by its own integers."""
        branches, count = s.branches, len(s.branches.rows[0])
        assert len(s.tokens) == len(branches.rows) <= branches.width
        places = [[i * branches.width + row for i, row in enumerate(past)] for past in branches.rows]
        for row, (token, past) in enumerate(zip(s.tokens, places, strict=True)):
            before = self.read(region, past[-1]) if past else self.read(prompt, s.start - 1)
            place = count * branches.width + row
            self.cells[region[place // BLOCK_TOKENS], place % BLOCK_TOKENS] = [*before, token]
        found = []
        for row, past in enumerate(places):
            whole = self.read(region, count * branches.width + row)
            for position in range(0 if window is None else max(0, s.start + 1 - window), s.start - count):
                assert self.read(prompt, position) == whole[: position + 1]
            for i, place in enumerate(past):
                assert self.read(region, place) == whole[: s.start - count + i + 1]
            found.append(likeliest(whole, s.candidates))
        return found

    def read(self, blocks, position: int) -> list[int]:
        return self.cells[blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS]

    def collect(self, outputs: list[TokenOutput]) -> None:
        for o in outputs:
            assert o.request_id not in self.finished, "output after the end"
            self.out.setdefault(o.request_id, []).extend(o.tokens)
            if o.hypotheses is not None:
                self.hypotheses[o.request_id] = o.hypotheses
            if o.embedding is not None:
                assert o.finish is FinishReason.STOP
                self.embeddings[o.request_id] = o.embedding
            if o.finish is not None:
                self.finished[o.request_id] = o.finish


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens, out = list(prompt), []
    while len(out) < max_tokens:
        out.append(next_token(tokens))
        tokens.append(out[-1])
        if out[-1] == STOP:
            break
    return out


def drafted(tokens: list[int], most: int) -> list[int]:
    """What the model's draft head proposes, nearly always the right tokens."""
    return [token if hash((*tokens, i)) % 5 else 0 for i, token in enumerate(expected(tokens, most))]


def searched(request: Request) -> list[Hypothesis]:
    """The results of a beam search by itself, without any engine."""
    search = BeamSearch(request, request.max_tokens)
    paths: list[list[int]] = [[]]
    while not search.over:
        search.advance([likeliest([*request.prompt, *path], search.looked_at) for path in paths])
        paths = [[beam.token for beam in live.path()] for live in search.live]
    return search.results()


def make(
    num_blocks=16,
    budget=96,
    sequences=4,
    prefix_cache=True,
    model_len=None,
    policy="fcfs",
    ahead=False,
    slots=0,
    on_disk=0,
    shared=False,
    block_seconds=None,
    speculation=None,
    windows=WHOLE,
    scarce=0.0,
    tails=4,
    stages=1,
    media_tokens=1 << 20,
    encode_budget=1 << 20,
) -> Engine:
    """
    Args:
        num_blocks: for each group of layers.
        slots, on_disk: of tiers in the host's memory and on a disk; 0 is none.
        shared: whether there is one that others use too.
        block_seconds: of the first, of which the others take three and five times as much; see `Lane`. With it, steps
            are predicted.
        scarce: the share that is missing of what the longest sequence does not need at once.
    """
    model_len = model_len or num_blocks * BLOCK_TOKENS
    num_blocks *= len(windows)
    num_blocks -= int(scarce * (num_blocks - most_held(windows, model_len, BLOCK_TOKENS)))
    limits = Limits(token_budget=budget, max_sequences=sequences, max_model_len=model_len, encode_budget=encode_budget)
    paced = LOCAL_POLICIES[policy](TIMES, StepLimit.asked(None))
    pool = BlockPool(range(num_blocks), windowed=windows[0] is not None)
    lanes = [Lane(Tier(slots), block_seconds, mirrors=True)] if slots else []
    if on_disk:
        lanes.append(Lane(Tier(on_disk, "disk"), block_seconds and 3 * block_seconds))
    if shared:
        lanes.append(Lane(SharedTier(), block_seconds and 5 * block_seconds))
    scheduler = Scheduler(
        limits,
        pool,
        prefix_cache=prefix_cache,
        policy=paced,
        offload=Offload(pool, lanes) if lanes else None,
        speculation=speculation,
        windows=windows,
        tail_interval=tails,
        stages=stages,
        media_tokens=media_tokens,
    )
    if block_seconds is not None:
        scheduler.predict_by(TIMES)
    return Engine(scheduler, ahead or stages > 1, windows)


def request(name: str, prompt: list[int], max_tokens: int = 5, priority: int = 0, params=DRAWN, **promise) -> Request:
    return Request(
        id=name,
        prompt=prompt,
        params=params,
        seed=0,
        stop_ids=frozenset([STOP]),
        max_tokens=max_tokens,
        priority=priority,
        **promise,
    )


def pictures(prompt: list[int], lengths: list[int]) -> dict[str, tuple]:
    """Media of a prompt, with some tokens between them; of three kinds, so that others have the same."""
    spans: list[MediaSpan] = []
    start = 3
    for length in lengths:
        if start + length <= len(prompt):
            digest = bytes([length, start % 3])
            spans.append(MediaSpan(start, length, digest))
            start += length + start % 5
    return {"media": tuple(spans), "pixels": tuple(span.digest for span in spans)}


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals with shared prefixes, cancellations and steps, in a pool that is often too small. Half the time
    steps are scheduled ahead, and whatever happens may happen while two are in flight. Often there is a tier below it
    all, to and from which copies travel, arrive in any order, and fail. Often there are drafts: right, wrong, or both.
    Often some layers, or all, see no further back than a window, and there are blocks for that only. Some requests run
    alone. Often the model is computed in stages. Some prompts have images, of whose embeddings not all fit.
    """

    @initialize(
        num_blocks=st.integers(2, 10),
        budget=st.integers(5, 200),
        sequences=st.integers(1, 5),
        prefix=st.sampled_from([True, True, False]),
        policy=st.sampled_from(sorted(LOCAL_POLICIES)),
        ahead=st.booleans(),
        slots=st.sampled_from([0, 0, 1, 3, 8, 20]),
        on_disk=st.sampled_from([0, 0, 2, 8, 30]),
        shared=st.booleans(),
        block_seconds=st.sampled_from([None, None, 1e-6, 1e-4, 1e-3]),
        wrong=st.sampled_from([None, None, 0.0, 0.2, 1.0, "by a head"]),
        windows=st.sampled_from([*[WHOLE] * 6, (2,), (70,), (200,), (None, 70), (None, 2, 130), (200, 100)]),
        scarce=st.floats(0.0, 1.0),
        tails=st.sampled_from([4, 4, 0, 1, 7, 63]),
        stages=st.sampled_from([1, 1, 1, 2, 3, 4]),
        media_tokens=st.sampled_from([70, 100, 1 << 20]),
        encode_budget=st.sampled_from([0, 30, 1 << 20]),
    )
    def start(self, num_blocks, budget, sequences, prefix, wrong, **how):
        drafts = heads(4) if wrong == "by a head" else None if wrong is None else guessing(expected, wrong)
        self.engine = make(num_blocks, budget, sequences, prefix, speculation=drafts, **how)
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.searches: dict[str, Request] = {}
        self.pooling: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.longest = num_blocks * BLOCK_TOKENS

    @rule(
        prefix=st.sampled_from([0, 1, 63, 64, 65, 128, 200]),
        family=st.integers(0, 1),
        own=st.integers(1, 90),
        max_tokens=st.integers(1, 80),
        priority=st.integers(0, 2),
        ttft_ms=st.sampled_from([None, 1.0, 100.0, 1000.0]),
        tpot_ms=st.sampled_from([None, 1.0, 8.0, 50.0]),
        waited=st.sampled_from([0.0, 0.5, 20.0]),
        offline=st.booleans(),
        bad_words=st.sampled_from([(), (), (), ((1, 2),)]),
        alone=ALONE,
        images=st.lists(st.sampled_from([1, 9, 30, 70]), max_size=4),
    )
    def arrive(self, prefix, family, own, max_tokens, priority, images, **promise):
        name = f"r{len(self.requests)}"
        prompt = ([family * 7 + 1] * prefix + [len(self.requests) % 3 + 1] * own)[: self.longest - 1]
        max_tokens = min(max_tokens, self.longest - len(prompt))
        self.requests[name] = (prompt, max_tokens)
        promise |= pictures(prompt, images)
        self.engine.scheduler.add(request(name, prompt, max_tokens, priority, **promise), now=self.engine.now)
        self.engine.send()

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        turns=st.lists(st.tuples(st.sampled_from([8, 9]), st.integers(0, 70), st.booleans()), min_size=1, max_size=3),
        max_tokens=st.integers(1, 80),
        priority=st.integers(0, 2),
    )
    def go_on(self, data, turns, max_tokens, priority):
        """From what was asked before, and was perhaps answered: the next turns of a chat, or the same prompt again."""
        before = data.draw(st.sampled_from(sorted(self.requests)))
        for token, own, answered in turns:
            said = self.engine.out.get(before, []) if answered else []
            prompt = [*self.requests[before][0], *said, *[token] * own][: self.longest - 1]
            name = f"r{len(self.requests)}"
            self.requests[name] = (prompt, min(max_tokens, self.longest - len(prompt)))
            self.engine.scheduler.add(request(name, prompt, self.requests[name][1], priority), now=self.engine.now)
            self.engine.send()

    @rule(
        prefix=st.sampled_from([0, 63, 64, 128]),
        own=st.integers(1, 90),
        width=st.integers(1, 5),
        max_tokens=st.integers(1, 60),
        priority=st.integers(0, 2),
        offline=st.booleans(),
        alone=ALONE,
        images=st.lists(st.sampled_from([1, 9, 30, 70]), max_size=4),
    )
    def search(self, prefix, own, width, max_tokens, priority, images, **promise):
        name = f"r{len(self.requests)}"
        prompt = ([1] * prefix + [len(self.requests) % 3 + 1] * own)[: self.longest - 1]
        max_tokens = min(max_tokens, self.longest - len(prompt))
        params = SamplingParams(use_beam_search=True, n=width)
        asked = request(name, prompt, max_tokens, priority, params, **promise, **pictures(prompt, images))
        scheduler = self.engine.scheduler
        room = (scheduler.pool.num_blocks // len(self.engine.windows) - blocks_for(len(prompt))) * BLOCK_TOKENS
        if width > scheduler.limits.max_sequences or width * (max_tokens - 1) > room:
            with pytest.raises(InvalidRequest) as refused:
                scheduler.add(asked, now=self.engine.now)
            assert refused.value.field in ("n", "max_tokens")
            return
        self.requests[name] = (prompt, max_tokens)
        self.searches[name] = asked
        scheduler.add(asked, now=self.engine.now)
        self.engine.send()

    @rule(
        prefix=st.sampled_from([0, 1, 63, 64, 65, 128, 200, 640]),
        own=st.integers(1, 90),
        pooling=st.sampled_from(["last", "mean"]),
        priority=st.integers(0, 2),
        ttft_ms=st.sampled_from([None, 1.0, 1000.0]),
        offline=st.booleans(),
        alone=ALONE,
        images=st.lists(st.sampled_from([1, 9, 30, 70]), max_size=4),
    )
    def embed(self, prefix, own, pooling, priority, images, **promise):
        name = f"r{len(self.requests)}"
        prompt = ([1] * prefix + [len(self.requests) % 3 + 1] * own)[: self.longest]  # as long as anything may be
        self.requests[name] = (prompt, 0)
        self.pooling[name] = pooling
        asked = request(name, prompt, 0, priority, pooling=pooling, **promise, **pictures(prompt, images))
        self.engine.scheduler.add(asked, now=self.engine.now)
        self.engine.send()

    @rule(data=st.data())
    def cancel(self, data):
        alive = [r for r in self.requests if r not in self.engine.finished and r not in self.cancelled]
        if alive:
            name = data.draw(st.sampled_from(alive))
            assert self.engine.scheduler.cancel(name)
            self.cancelled.add(name)

    @rule(count=st.integers(1, 40))
    def steps(self, count):
        for _ in range(count):
            if not self.engine.has_work:
                return
            self.engine.step()
            self.engine.scheduler.check()

    @precondition(lambda self: self.engine.moves)
    @rule(pick=st.integers(0), good=st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.5]))
    def move(self, pick, good):
        self.engine.move(pick % len(self.engine.moves), good)

    @precondition(lambda self: self.engine.store)
    @rule(data=st.data())
    def others_use_the_store(self, data):
        """Something goes, without a word."""
        del self.engine.store[data.draw(st.sampled_from(sorted(self.engine.store)))]

    @precondition(lambda self: self.engine.scheduler.offload is not None)
    @rule(data=st.data(), away=st.booleans(), full=st.booleans())
    def outage(self, data, away, full):
        lane = data.draw(st.sampled_from(self.engine.scheduler.offload.lanes))
        lane.away, lane.full = away, full

    @precondition(lambda self: any(isinstance(order, Load | Question) for order in self.engine.moves))
    @rule(data=st.data())
    def give_up(self, data):
        loads = [order.number for order in self.engine.moves if isinstance(order, Load | Question)]
        self.engine.scheduler.give_up(data.draw(st.sampled_from(loads)))

    @precondition(lambda self: self.engine.ahead)
    @rule()
    def begin(self):
        self.engine.begin()

    @precondition(lambda self: self.engine.flying)
    @rule()
    def end(self):
        self.engine.end()

    @precondition(lambda self: self.engine.flying)
    @rule(first=st.booleans())
    def interrupt(self, first):
        if not first:
            self.engine.end()
        self.engine.interrupt()

    @invariant()
    def consistent(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check()
            self.engine.check_flights()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        work = sum(len(p) + m for p, m in self.requests.values())
        for number in range(20 * work + 10):
            if self.engine.moves and not number % 16:
                self.engine.move(0)  # copies end by themselves, also while there are steps, and hold blocks until then
            if not self.engine.has_work:
                break
            self.engine.step()
            scheduler.check()
        assert not self.engine.has_work, "somebody starves"
        assert scheduler.pool.used == 0, "a block leaked"
        for name, (prompt, max_tokens) in self.requests.items():
            if name in self.cancelled:
                continue
            if name in self.pooling:
                assert self.engine.embeddings[name] == embedded(prompt, self.pooling[name])
                assert not self.engine.out[name]
            elif name in self.searches:
                assert self.engine.hypotheses[name] == searched(self.searches[name])
            else:
                assert self.engine.out[name] == expected(prompt, max_tokens)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=25)


def test_in_stages_where_the_one_whose_turn_it_is_gives_way_another_goes_on():
    engine = make(num_blocks=6, budget=5, sequences=2, stages=2)
    beam = SamplingParams(use_beam_search=True, n=1)
    searches = [request("long", [1] * 193, 3, params=beam), request("short", [2], 2, params=beam)]
    for search in searches:
        engine.scheduler.add(search)
    run(engine)
    assert engine.hypotheses == {search.id: searched(search) for search in searches}


def test_in_stages_a_prompt_that_is_favoured_and_on_its_way_is_in_no_other_step():
    engine = make(num_blocks=2, budget=5, sequences=1, stages=2, policy="slack")
    engine.scheduler.add(request("a", [1], 1))
    engine.scheduler.add(request("b", [1, 2], 2, waited=20.0))
    run(engine)
    assert engine.out == {"a": expected([1], 1), "b": expected([1, 2], 2)}


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


@pytest.mark.parametrize(("ahead", "prefix_cache"), [(False, True), (True, True), (True, False)])
def test_what_left_the_window_is_given_back(ahead, prefix_cache):
    """A long sequence holds what the window and a step cover. What it gave back is found as long as it is there, and
    goes from the sequence's end to its beginning."""
    engine = make(num_blocks=16, budget=128, windows=(100,), ahead=ahead, prefix_cache=prefix_cache)
    scheduler, most, prompt = engine.scheduler, 0, [i % 7 + 1 for i in range(640)]
    scheduler.add(request("a", prompt, 300), now=0.0)
    while engine.has_work:
        engine.step()
        scheduler.check()
        if scheduler._queues.running and scheduler._queues.running[0].computed > 640:
            most = max(most, scheduler.pool.used)
    assert 3 <= most <= 3 + 2 * ahead
    assert engine.out["a"] == expected(prompt, 300)
    scheduler.add(request("b", prompt[:500], 3), now=0.0)
    run(engine)
    assert engine.out["b"] == expected(prompt[:500], 3)
    assert scheduler.counters.prefix_hits == (448 if prefix_cache else 0)
    if prefix_cache:
        scheduler.pool.release(
            scheduler.pool.allocate(scheduler.pool.unused + 3)
        )  # evicts what is furthest from the beginning
        scheduler.add(request("c", prompt[:500], 3), now=0.0)
        run(engine)
        assert scheduler.counters.prefix_hits == 2 * 448


def test_what_left_the_window_makes_room_for_the_chunk_that_goes_beyond_the_blocks_that_are_there():
    """In a pool of what a window and a chunk see, and no block more. A store holds others as long as it takes."""
    for alone in (0, 1):
        engine = make(num_blocks=6, budget=6, windows=(2,), scarce=1.0, ahead=True, slots=1, policy="fcfs")
        engine.scheduler.add(request("a", [1] * 300, 0, pooling="last", alone=alone))
        run(engine)
        assert engine.embeddings["a"] == embedded([1] * 300, "last")


@pytest.mark.parametrize(("ahead", "prefix_cache"), [(False, True), (True, True), (True, False)])
def test_of_mixed_layers_those_with_a_window_give_back_what_left_it(ahead, prefix_cache):
    """In a pool that has no room for all of a sequence in all layers. What goes on from its end finds it."""
    whole, held = 1024 // BLOCK_TOKENS, 5  # blocks of a group that sees all, and at most of one with the window
    engine = make(whole, 128, windows=(None, 100, 100), ahead=ahead, prefix_cache=prefix_cache, scarce=0.85)
    scheduler, most, prompt = engine.scheduler, 0, [i % 7 + 1 for i in range(640)]
    assert scheduler.pool.num_blocks == 28 < 2 * whole
    scheduler.add(request("a", prompt, 300), now=0.0)
    while engine.has_work:
        engine.step()
        scheduler.check()
        for sequence in scheduler._queues.running:
            most = max(most, scheduler.pool.used - len(sequence.blocks) // 3)
    assert 2 * 3 <= most <= 2 * (held + ahead)
    assert engine.out["a"] == expected(prompt, 300)
    further = [*prompt, *engine.out["a"], 5, 5]
    scheduler.add(request("b", further, 3), now=0.0)
    run(engine)
    assert engine.out["b"] == expected(further, 3)
    assert scheduler.counters.prefix_hits == (len(further) // BLOCK_TOKENS * BLOCK_TOKENS if prefix_cache else 0)
    assert scheduler.counters.preemptions == 0


def test_placeholders_of_other_media_share_nothing_from_there_on():
    engine, prompt = make(), [1] * 70 + [2] * 60 + [3] * 40
    for name, digest, cached in (("a", b"cat", 0), ("b", b"dog", 64), ("c", b"cat", 168)):
        media = (MediaSpan(70, 60, digest),)
        engine.scheduler.add(request(name, prompt, media=media, pixels=(digest,)))
        sequence = engine.scheduler.sequence(name)
        run(engine)
        assert sequence.cached_tokens == cached


def test_decodes_come_first_and_the_prompt_fills_the_rest():
    engine = make(budget=32)
    engine.scheduler.add(request("decoding", [1] * 10, 50))
    engine.step()
    engine.scheduler.add(request("prompt", [2] * 100, 5))
    plan = engine.step()
    assert [(s.request_id, len(s.tokens), s.sample) for s in plan.sequences] == [
        ("decoding", 1, True),
        ("prompt", 31, False),
    ]


def test_what_is_to_run_alone_is_nothing_of_others_steps_though_it_is_favoured():
    """Nor does it wait for ever when it is favoured only in the step of others."""
    engine = make(num_blocks=2, budget=16, sequences=2, prefix_cache=False, policy="slack")
    engine.scheduler.add(request("decoding", [1], 4))
    engine.step()
    engine.scheduler.add(request("behind", [1], 1, priority=1))
    engine.scheduler.add(request("alone", [2] * 64, 1, alone=1, waited=20.0))
    run(engine)  # `begin` asserts it of every step
    engine = make(num_blocks=2, budget=5, sequences=1, policy="slack")
    engine.scheduler.add(request("alone", [2], 1, priority=1, alone=1, waited=20.0))
    engine.scheduler.add(request("other", [1], 1))
    run(engine)
    assert set(engine.finished) == {"alone", "other"}


def test_lower_priority_value_runs_first_even_during_anothers_prefill():
    engine = make(budget=32)
    engine.scheduler.add(request("low", [1] * 300, priority=5))
    engine.step()
    engine.scheduler.add(request("high", [2] * 40, priority=-1))
    assert next(iter(engine.step().sequences)).request_id == "high"


def test_the_same_prompt_twice_hits_all_but_what_must_be_computed():
    engine = make()
    prompt = list(range(200))
    for name in ("first", "second"):
        engine.scheduler.add(request(name, prompt, 1))
        plans = []
        while engine.scheduler.has_work:
            plans.append(engine.step())
    assert plans[0].sequences[0].start == 196  # of the last block as far as to one of the sampled places
    assert engine.scheduler.counters.prefix_hits == 196
    assert engine.scheduler.counters.prefix_queries == 400


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 3, **how) -> StepPlan:
    """Its first step."""
    engine.scheduler.add(request(name, prompt, max_tokens, **how), now=engine.now)
    plan = engine.begin()
    engine.end()
    engine.scheduler.check()
    return plan


def chat(length: int = 100) -> list[int]:
    """What a first turn is, whose answer does not end early."""
    return next(p for i in range(99) if STOP not in expected(p := [*range(i, i + length)], 8))


def test_the_next_turn_of_a_chat_goes_on_in_the_block_that_the_last_one_ended_in():
    engine, prompt = make(budget=400), chat()
    ask(engine, "first", prompt)
    run(engine)
    engine.scheduler.check()
    said = expected(prompt, 3)
    plan = ask(engine, "next", [*prompt, *said, 7, 8])
    # the KV of the last token that was said was never computed
    assert (plan.sequences[0].start, plan.sequences[0].tokens) == (102, [said[-1], 7, 8])
    assert [copy[0] == copy[1] for copy in plan.copies] == [True]
    assert not plan.fresh_blocks
    assert engine.scheduler.sequence("next").cached_tokens == 102
    run(engine)
    assert engine.out["next"] == expected([*prompt, *said, 7, 8], 3)
    assert engine.scheduler.pool.unused == 14


def test_two_that_go_on_from_one_block_at_once_both_have_it():
    """The first takes it; what stands in it up to there goes on to be found, and the second copies that."""
    engine, prompt = make(budget=400), chat()
    ask(engine, "first", prompt)
    run(engine)
    further = {name: [*prompt, *expected(prompt, 3), *[token] * 5] for name, token in (("a", 7), ("b", 8), ("c", 9))}
    for name in "ab":
        engine.scheduler.add(request(name, further[name], 3), now=engine.now)
    plan = engine.begin()
    (_, mine, _), (source, target, tokens) = plan.copies
    assert (source, tokens) == (mine, 38)
    assert target in plan.fresh_blocks
    assert [s.start for s in plan.sequences] == [102, 102]
    assert engine.scheduler.pool.holders(source) == 2, "it is held while it is copied"
    engine.end()
    run(engine)
    ask(engine, "c", further["c"])
    assert engine.scheduler.sequence("c").cached_tokens == 100, "where they both go on is no sampled place"
    run(engine)
    assert all(engine.out[name] == expected(further[name], 3) for name in "abc")


def test_of_a_block_that_goes_on_otherwise_the_beginning_is_copied_and_the_rest_stays():
    engine, prompt = make(budget=400), chat()
    ask(engine, "first", prompt, 8)
    run(engine)
    plan = ask(engine, "fork", [*prompt[:90], *[7] * 30])
    assert [copy.tokens for copy in plan.copies] == [24]
    assert engine.scheduler.sequence("fork").cached_tokens == 88, "as far as to a sampled place"
    plan = ask(engine, "next", [*prompt, *expected(prompt, 8), 7])
    assert engine.scheduler.sequence("next").cached_tokens == 107
    assert plan.copies[0].source == plan.copies[0].target
    run(engine)
    assert engine.out["fork"] == expected([*prompt[:90], *[7] * 30], 3)


def test_a_prompt_is_found_while_it_is_answered_but_not_before_it_is_computed():
    engine, prompt = make(budget=100), chat()
    for name in "abc":
        engine.scheduler.add(request(name, prompt, 20), now=engine.now)
    run(engine)
    assert engine.scheduler.counters.prefix_hits == 96 + 96, "of both that came to run later"
    assert all(engine.out[name] == expected(prompt, 20) for name in "abc")


TURNS = st.tuples(
    st.integers(0),  # which text it goes on from
    st.integers(0, 200),  # as far as to there
    st.integers(1, 40),  # tokens of its own
    st.integers(1, 12),  # of its output
    st.sampled_from([0, 0, 1, 2, 30]),  # steps after it came
    st.sampled_from(["", "", "", "cancel", "interrupt", "fail"]),  # what happens then
    st.integers(0, 1),  # priority
)


@given(
    num_blocks=st.integers(2, 7),
    sequences=st.integers(1, 4),
    budget=st.sampled_from([8, 60, 300]),
    ahead=st.booleans(),
    tails=st.sampled_from([1, 4, 4, 7]),
    turns=st.lists(TURNS, min_size=2, max_size=14),
)
@settings(max_examples=60)
def test_whoever_goes_on_inside_a_block_reads_what_is_its_own(num_blocks, sequences, budget, ahead, tails, turns):
    """Texts that share beginnings of any length, in a cache that is often too small for them."""
    engine = make(num_blocks, budget, sequences, ahead=ahead, tails=tails)
    scheduler, texts, asked = engine.scheduler, [[*range(num_blocks * BLOCK_TOKENS)]], {}
    for i, (pick, shared, own, output, steps, then, priority) in enumerate(turns):
        prompt = [*texts[pick % len(texts)][:shared], *[i + 60] * own][: num_blocks * BLOCK_TOKENS - output]
        asked[name := f"r{i}"] = prompt, output
        texts.append([*prompt, *expected(prompt, output)])
        scheduler.add(request(name, prompt, output, priority), now=engine.now)
        for _ in range(steps):
            if engine.has_work:
                engine.step()
                scheduler.check()
        if then and ahead:
            engine.begin()
        if then == "cancel" and scheduler.cancel(name):
            del asked[name]
        elif then == "interrupt":
            engine.interrupt()
        elif then == "fail":
            engine.flying.clear()
            scheduler.abandon()
        scheduler.check()
    run(engine)
    assert scheduler.pool.used == 0
    assert all(engine.out[name] == expected(*each) for name, each in asked.items())


@pytest.mark.parametrize(
    ("changes", "cached"),
    [({}, 96), ({"cache_salt": "b"}, 0), ({"params": SamplingParams(prompt_logprobs=1)}, 0), ({"pooling": "mean"}, 0)],
)
def test_who_may_not_share_a_prefix_does_not_share_its_end(changes, cached):
    engine = make(budget=400)
    ask(engine, "first", chat())
    run(engine)
    engine.scheduler.add(request("next", chat(), 0 if "pooling" in changes else 3, **changes), now=engine.now)
    sequence = engine.scheduler.sequence("next")
    plan = engine.begin()
    assert (sequence.cached_tokens, len(plan.copies)) == (cached, cached > 0)


def test_without_keys_inside_blocks_only_whole_ones_are_found():
    engine, prompt = make(budget=400, tails=0), chat()
    for name in "ab":
        plan = ask(engine, name, prompt)
        run(engine)
    assert plan.sequences[0].start == 64
    assert engine.scheduler.pool.unused == 15


def test_what_was_to_be_copied_by_a_step_that_failed_is_nowhere_found():
    """Nor what a step did that was cancelled meanwhile; who comes then has what was there before."""
    for cancels in (False, True):
        engine, prompt = make(budget=400, ahead=True), chat()
        ask(engine, "first", prompt)
        run(engine)
        engine.scheduler.add(request("fork", [*prompt[:90], *[7] * 30], 3), now=engine.now)
        target = engine.begin().copies[0].target
        if cancels:
            assert engine.scheduler.cancel("fork")
        engine.flying.clear()
        engine.scheduler.abandon()
        assert target not in engine.scheduler.pool.tails
        engine.scheduler.check()
        run(engine)
        assert cancels or engine.out["fork"] == expected([*prompt[:90], *[7] * 30], 3)


def test_a_prompt_of_whole_blocks_still_computes_its_last_token():
    engine = make()
    for name in ("first", "second"):
        engine.scheduler.add(request(name, [3] * 128, 1))
        run(engine)
    assert engine.scheduler.counters.prefix_hits == BLOCK_TOKENS + 60  # the second block could not be shared whole


def test_the_same_prompt_at_the_same_time_ends_in_shared_blocks():
    engine = make(budget=400)
    for name in ("a", "b"):
        engine.scheduler.add(request(name, [4] * 150, 20))
    engine.step()
    assert engine.scheduler.pool.used == 4  # two shared, one partly filled each
    run(engine)


def test_a_victim_keeps_its_place():
    engine = make(num_blocks=4, budget=300, sequences=3)
    engine.scheduler.add(request("a", [1] * 120, 60))
    engine.scheduler.add(request("b", [2] * 120, 60))
    engine.step()
    engine.scheduler.add(request("late", [3] * 10, 5))
    order = []
    while engine.scheduler.has_work:
        order += [s.request_id for s in engine.step().sequences if s.start == 0 or len(s.tokens) > 1]
    assert engine.scheduler.counters.preemptions >= 1
    assert order.index("late") > len(order) - 1 - order[::-1].index("b"), "the victim resumed after a later arrival"
    assert engine.out["b"] == expected([2] * 120, 60)


def test_an_urgent_arrival_takes_the_place_of_lower_priority():
    engine = make(num_blocks=4, budget=300, sequences=2)
    engine.scheduler.add(request("low", [1] * 200, 30, priority=1))
    engine.step()
    engine.scheduler.add(request("high", [2] * 100, 3, priority=0))
    assert [s.request_id for s in engine.step().sequences] == ["high"]
    run(engine)
    assert engine.out["low"] == expected([1] * 200, 30)


def test_nobody_gives_way_for_blocks_that_others_hold_too():
    engine = make(num_blocks=4, budget=400)
    for name, priority in (("high", 0), ("low", 1)):
        engine.scheduler.add(request(name, [4] * 150, 20, priority=priority))
        engine.step()
    assert engine.scheduler.pool.used == 4  # without "low" one block is free
    engine.scheduler.add(request("two blocks", [5] * 100, 5))
    engine.step()
    assert engine.scheduler.counters.preemptions == 0
    engine.scheduler.add(request("one block", [6] * 50, 5, priority=-1))
    run(engine)
    assert engine.scheduler.counters.preemptions > 0


def test_equal_priority_does_not_preempt_to_get_in():
    engine = make(num_blocks=4, budget=300)
    engine.scheduler.add(request("a", [1] * 200, 3))
    engine.step()
    engine.scheduler.add(request("b", [2] * 100, 3))
    engine.step()
    assert engine.scheduler.counters.preemptions == 0
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)


def test_without_prefix_cache_nothing_is_kept():
    engine = make(prefix_cache=False)
    engine.scheduler.add(request("a", [1] * 300, 3))
    run(engine)
    assert engine.scheduler.pool.cached == 0


@pytest.mark.parametrize(("length", "error"), [(0, InvalidRequest), (1024, PromptTooLong), (5000, PromptTooLong)])
def test_only_what_could_never_fit_is_refused(length, error):
    engine = make()
    with pytest.raises(error) as caught:
        engine.scheduler.add(request("x", [1] * length))
    assert caught.value.field == "prompt"
    engine.scheduler.add(request("fits", [1] * 1023))
    with pytest.raises(InvalidRequest):
        engine.scheduler.add(request("fits", [1]))
    run(engine)
    assert engine.finished == {"fits": FinishReason.LENGTH} or engine.out["fits"][-1] == STOP


def test_an_update_passes_over_what_was_cancelled_during_the_step():
    engine = make()
    for name in ("a", "b"):
        engine.scheduler.add(request(name, [1] * 10))
    plan = engine.scheduler.schedule()
    engine.scheduler.cancel("a")
    outputs = engine.scheduler.update(plan, StepResult([[7], [8]], [None, None]))
    assert [(o.request_id, o.tokens) for o in outputs] == [("b", [8])]
    assert not engine.scheduler.cancel("a")
    engine.scheduler.check()
