"""Which instances to make of some devices: candidates, what each would do by the step-time model, and the search for
the cheapest that keeps its target.

An estimate takes a candidate's instances as they are on average: how many sequences decode at once follows from how
long a step with so many takes, and prompts wait for the instance that is free first. It takes milliseconds, and is
accurate enough to choose candidates for simulation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from penstock.core.wire.engine import Role
from penstock.kv.groups import most_held
from penstock.sim.bound import reusable_by_request
from penstock.sim.scenario import InstanceGroup
from penstock.workload.requests import WorkRequest

Floats = npt.NDArray[np.float64]

SAMPLE = 2000  # requests that an estimate looks at
UPPER = 1.2816  # standard deviations from a normal variable's mean to its 90th percentile
BOLDER = 0.1  # by how much the next candidate is to cost more, for each that failed in a row
ABOVE = 0.02  # predicted attainment over the target of what is tried first
HOPE = 0.5  # predicted attainment, of the target, under which nothing is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to make an instance.

    Attributes:
        size: devices that every layer is spread over.
        price: of a device for an hour.
        group: what such an instance is; of its own, of the role "any".
    """

    device: str
    size: int
    price: float
    group: InstanceGroup

    @property
    def name(self) -> str:
        """Such as "h200", or "h200 tp2" over two of them."""
        return self.device if self.size == 1 else f"{self.device} tp{self.size}"


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    role: Role
    count: int

    @property
    def group(self) -> InstanceGroup:
        """Named so that parts of a candidate differ."""
        name = "engine" if self.role == "any" else self.role
        suffix = f"-{self.kind.device}" if self.role == "any" else ""
        return replace(self.kind.group, name=name + suffix, role=self.role, count=self.count)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A deployment: all instances do everything, or some prefill and others decode."""

    parts: tuple[Part, ...]

    @property
    def title(self) -> str:
        names = (f"{'' if p.role == 'any' else p.role + ' '}{p.count} x {p.kind.name}" for p in self.parts)
        return " + ".join(names)

    @property
    def groups(self) -> tuple[InstanceGroup, ...]:
        return tuple(part.group for part in self.parts)

    @property
    def disaggregated(self) -> bool:
        return any(part.role != "any" for part in self.parts)

    @cached_property
    def devices(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.kind.device] = found.get(part.kind.device, 0) + part.count * part.kind.size
        return found

    @cached_property
    def cost(self) -> float:
        """Of an hour."""
        return sum(part.count * part.kind.size * part.kind.price for part in self.parts)

    @cached_property
    def shape(self) -> tuple[tuple[str, int, Role], ...]:
        """What it is but for the counts."""
        return tuple((part.kind.device, part.kind.size, part.role) for part in self.parts)

    def within(self, other: Candidate) -> bool:
        """Whether it is a smaller one of the same shape."""
        pairs = zip(self.parts, other.parts, strict=False)
        return self.shape == other.shape and all(mine.count <= theirs.count for mine, theirs in pairs)


def candidates(kinds: Sequence[Kind], available: Mapping[str, int]) -> list[Candidate]:
    """Every deployment that takes no more devices than there are, cheapest first: of one kind or of two, of which
    two on one device only where one prefills prompts and the other decodes."""

    def counts(kind: Kind) -> range:
        return range(1, available[kind.device] // kind.size + 1)

    found = [Candidate((Part(kind, "any", n),)) for kind in kinds for n in counts(kind)]
    for one, other in combinations(kinds, 2):
        if one.device != other.device:
            found += [
                Candidate((Part(one, "any", n), Part(other, "any", m))) for n, m in product(counts(one), counts(other))
            ]
    for prefiller, writer in product(kinds, repeat=2):
        found += [
            Candidate((Part(prefiller, "prefill", n), Part(writer, "decode", m)))
            for n, m in product(counts(prefiller), counts(writer))
        ]
    fitting = [c for c in found if all(taken <= available[device] for device, taken in c.devices.items())]
    return sorted(fitting, key=lambda c: (c.cost, c.disaggregated, len(c.parts), c.title))


# --- estimates


@dataclass(frozen=True, slots=True)
class Demands:
    """What is asked for, one entry for each request; see `demands`.

    Attributes:
        rate: requests per second.
        new, cached: tokens of the prompt that are to be computed, and before them.
        decodes: tokens after the first.
        ttft, tpot: targets in seconds.
    """

    rate: float
    at: Floats
    new: Floats
    cached: Floats
    decodes: Floats
    ttft: Floats
    tpot: Floats

    @property
    def context(self) -> float:
        """Mean tokens that a decode looks at."""
        steps = float(self.decodes.sum())
        seen = self.decodes * (self.new + self.cached + self.decodes / 2)
        return float(seen.sum()) / steps if steps else 0.0


def demands(requests: Sequence[WorkRequest], rate: float, max_tokens: int) -> Demands:
    """The first online requests. Prefixes that were seen before count as cached, wherever that was."""
    reused = reusable_by_request(requests)
    rows = [
        (
            r.at,
            r.prompt_tokens - min(hit, r.prompt_tokens - 1),
            min(hit, r.prompt_tokens - 1),
            max(1, min(r.output_tokens, max_tokens)) - 1,
            r.ttft,
            r.tpot,
        )
        for r, hit in zip(requests, reused, strict=True)
        if not r.offline
    ]
    return Demands(rate, *np.array(rows[:SAMPLE], dtype=np.float64).reshape(-1, 6).T)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times in ms.

    Attributes:
        attainment: share of requests that keep both targets.
        prefilling: share of the time of those that prefill that this takes.
        sequences: that decode at once on an instance; and `room` for so many: by memory, or by max-num-seqs.
        compute, memory: how busy a decoding step keeps them.
    """

    attainment: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    prefilling: float
    sequences: float
    room: float
    room_by_memory: bool
    compute: float
    memory: float


@dataclass(frozen=True, slots=True)
class _Decoding:
    """One instance of a part.

    Attributes:
        ms: of a token, at the mean.
        high_ms: with as many sequences as there are in one of ten moments.
        limit: sequences with which the target is just kept.
    """

    sequences: float
    ms: float
    high_ms: float
    room: float
    room_by_memory: bool
    compute: float
    memory: float
    limit: float


def estimate(candidate: Candidate, asked: Demands, alone: dict[tuple[str, int], Floats]) -> Estimate:
    """
    Args:
        alone: (device, size) -> seconds that each prompt takes on an idle instance; filled as needed.
    """
    prefillers = [p for p in candidate.parts if p.role != "decode"]
    writers = [p for p in candidate.parts if p.role != "prefill"]
    seconds = {id(p): _alone(p.kind, asked, alone) for p in candidate.parts}
    prefilling = _shares(prefillers, asked.rate, {id(p): float(seconds[id(p)].mean()) for p in prefillers})
    writing = _shares(writers, asked.rate, {id(p): _decode_weight(p.kind, asked) for p in writers})
    decoding = []
    for part in writers:
        busy = prefilling[id(part)] * float(seconds[id(part)].mean()) if part.role == "any" else 0.0
        decoding.append(_decode(part.kind.group, asked, writing[id(part)], busy))
    beside = {id(p): d for p, d in zip(writers, decoding, strict=True) if p.role == "any"}
    ttft = _queue(prefillers, asked, seconds, beside)
    worst = max(decoding, key=lambda d: d.high_ms)
    in_time = float(np.mean(ttft <= asked.ttft))
    in_pace = sum(writing[id(p)] * p.count / asked.rate * _kept(d) for p, d in zip(writers, decoding, strict=True))
    return Estimate(
        attainment=in_time * in_pace,
        ttft_p50=float(np.percentile(ttft, 50)) * 1e3,
        ttft_p90=float(np.percentile(ttft, 90)) * 1e3,
        tpot_p50=worst.ms,
        tpot_p90=worst.high_ms,
        prefilling=max(prefilling[id(p)] * float(seconds[id(p)].mean()) for p in prefillers),
        sequences=worst.sequences,
        room=worst.room,
        room_by_memory=worst.room_by_memory,
        compute=worst.compute,
        memory=worst.memory,
    )


def _alone(kind: Kind, asked: Demands, known: dict[tuple[str, int], Floats]) -> Floats:
    key = kind.device, kind.size
    if key not in known:
        group = kind.group
        ms = [
            group.times.prefill_ms(int(new), int(cached), budget=group.token_budget)
            for new, cached in zip(asked.new, asked.cached, strict=True)
        ]
        known[key] = np.array(ms) / 1e3
    return known[key]


def _decode_weight(kind: Kind, asked: Demands) -> float:
    times = kind.group.times
    return times.step_ms(decodes=32, kv_tokens=int(32 * asked.context))


def _shares(parts: Sequence[Part], rate: float, costs: Mapping[int, float]) -> dict[int, float]:
    """Requests per second for each instance of each part, in inverse proportion to the costs of one."""
    total = sum(part.count / costs[id(part)] for part in parts)
    return {id(part): rate / costs[id(part)] / total for part in parts}


def _decode(group: InstanceGroup, asked: Demands, rate: float, busy: float) -> _Decoding:
    """
    Args:
        rate: requests per second that decode on this instance.
        busy: share of its time that prompts take.
    """
    mean, context = float(asked.decodes.mean()), asked.context
    by_memory = group.num_blocks / (most_held(group.windows, math.ceil(context), 1) + 0.5 * len(group.windows))
    room = min(by_memory, group.max_num_seqs)
    if not mean:  # every answer is one token
        return _Decoding(0.0, 0.0, 0.0, room, by_memory < group.max_num_seqs, 0.0, 0.0, room)
    left = max(1e-9, 1 - busy)

    def ms(sequences: float) -> float:
        count = max(1, round(sequences))
        return group.times.step_ms(decodes=count, kv_tokens=int(count * context)) / left

    sequences = 0.0
    for _ in range(200):  # as many as come while one is served
        more = rate * mean * ms(sequences) / 1e3
        if more > room or abs(more - sequences) < 1e-3 * more:
            sequences = more
            break
        sequences = more
    overfull = sequences > room
    high = sequences + UPPER * math.sqrt(sequences)
    target = float(np.median(asked.tpot)) * 1e3
    low, limit = 0, group.max_num_seqs + 1
    while limit - low > 1:
        middle = (low + limit) // 2
        low, limit = (middle, limit) if ms(middle) <= target else (low, middle)
    count = max(1, round(min(sequences, room)))
    compute, memory = group.times.utilisation(decodes=count, kv_tokens=int(count * context))
    return _Decoding(
        sequences=sequences,
        ms=math.inf if overfull else ms(sequences),
        high_ms=math.inf if overfull else ms(min(high, room)),
        room=room,
        room_by_memory=by_memory < group.max_num_seqs,
        compute=compute,
        memory=memory,
        limit=min(low, room),
    )


def _kept(decoding: _Decoding) -> float:
    """Share of sequences that find a batch which is within its limit with them in it."""
    if not math.isfinite(decoding.sequences) or decoding.sequences > decoding.room or decoding.limit < 1:
        return 0.0
    spread = math.sqrt(max(decoding.sequences, 1e-9))
    return 0.5 * (1 + math.erf((decoding.limit - 0.5 - decoding.sequences) / spread / math.sqrt(2)))


def _queue(
    prefillers: Sequence[Part], asked: Demands, seconds: Mapping[int, Floats], beside: Mapping[int, _Decoding]
) -> Floats:
    """Seconds to each first token, when whichever instance is free first prefills the next prompt."""
    served: list[Floats] = []
    free: list[tuple[float, int, int]] = []  # at, number, part
    for at, part in enumerate(prefillers):
        group, own = part.kind.group, seconds[id(part)]
        if id(part) in beside:  # every step of a prompt has the decodes in it
            count = round(min(beside[id(part)].sequences, beside[id(part)].room))
            extra = group.times.step_ms(decodes=count, kv_tokens=int(count * asked.context)) - group.times.step_ms()
            own = own + np.ceil(asked.new / group.token_budget) * extra / 1e3
        served.append(own)
        free += [(0.0, len(free) + i, at) for i in range(part.count)]
    heapq.heapify(free)
    ttft = np.empty_like(asked.at)
    for i, arrival in enumerate(asked.at):
        idle, number, at = free[0]
        end = max(idle, float(arrival)) + float(served[at][i])
        heapq.heapreplace(free, (end, number, at))
        ttft[i] = end - arrival
    return ttft


# --- the search


@dataclass(frozen=True, slots=True)
class Verdict:
    """A candidate's simulated result.

    Attributes:
        kept: whether it keeps the target.
        result: of `simulate`; None when no scheduler could keep the target, so that nothing was simulated.
        bound: the clairvoyant bound.
    """

    kept: bool
    bound: float
    result: Mapping[str, object] | None


@dataclass(slots=True)
class Search:
    """For the cheapest candidate that keeps the target, by trying few.

    One that fails takes all smaller ones of its shape with it, one that keeps it all that cost as much.

    Args:
        estimates: candidate -> what is expected of it.
        tries: simulations, at most.
    """

    candidates: Sequence[Candidate]
    estimates: Mapping[Candidate, Estimate]
    target: float
    tries: int
    verdicts: dict[Candidate, Verdict] = field(default_factory=dict)
    _asked: list[Candidate] = field(default_factory=list)
    _fails: int = 0

    @property
    def winner(self) -> Candidate | None:
        """The cheapest that was simulated to keep the target."""
        kept = [candidate for candidate, verdict in self.verdicts.items() if verdict.kept]
        return min(kept, key=self._cost, default=None)

    @property
    def simulated(self) -> int:
        waiting = sum(candidate not in self.verdicts for candidate in self._asked)
        return waiting + sum(verdict.result is not None for verdict in self.verdicts.values())

    def next(self) -> Candidate | None:
        """The next candidate to try, possibly before earlier results are known; None when none is left."""
        still_open = self._open()
        if not still_open or self.simulated >= self.tries:
            return None
        chosen = self._choose(still_open)
        self._asked.append(chosen)
        return chosen

    def tell(self, candidate: Candidate, verdict: Verdict) -> None:
        self.verdicts[candidate] = verdict
        self._fails = 0 if verdict.kept else self._fails + (verdict.result is not None)

    def untried(self) -> list[Candidate]:
        """Those that could keep the target by their estimates, and cost less than the winner; cheapest first."""
        return [c for c in self._open() if self.estimates[c].attainment >= self.target]

    def _cost(self, candidate: Candidate) -> tuple[float, int]:
        return candidate.cost, self.candidates.index(candidate)

    def _open(self) -> list[Candidate]:
        failed = [candidate for candidate, verdict in self.verdicts.items() if not verdict.kept]
        best = self.winner
        return [
            c
            for c in self.candidates
            if c not in self._asked
            and (best is None or c.cost < best.cost)
            and self.estimates[c].attainment >= HOPE * self.target
            and not any(c.within(other) for other in failed)
        ]

    def _choose(self, still_open: Sequence[Candidate]) -> Candidate:
        def promise(candidate: Candidate) -> tuple[float, float]:
            return self.estimates[candidate].attainment, -candidate.cost

        if self.winner is not None:  # is there a cheaper one?
            return max(still_open, key=promise)
        simulated = [c for c, verdict in self.verdicts.items() if verdict.result is not None]
        dearest = max((c.cost for c in simulated), default=0.0)
        floor = dearest * (1 + BOLDER * (self._fails - 1)) if self._fails > 1 else 0.0
        enough = min(1.0, self.target + ABOVE)
        hopeful = [c for c in still_open if self.estimates[c].attainment >= enough and c.cost >= floor]
        return hopeful[0] if hopeful else max(still_open, key=promise)
