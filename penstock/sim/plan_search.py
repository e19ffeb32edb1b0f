"""The cheapest deployment that keeps its target: which candidates of `plan.py` to simulate, and why one wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.sim.plan import Candidate, Estimate

BOLDER = 0.1  # by how much the next candidate is to cost more, for each that failed in a row
ABOVE = 0.02  # predicted attainment over the target of what is tried first
HOPE = 0.5  # predicted attainment, of the target, under which nothing is tried


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


# --- why


def explain(guess: Estimate, verdict: Verdict | None, ttft_ms: float, tpot_ms: float) -> str:
    """One sentence: what limits a candidate."""
    if verdict is not None and verdict.result is None:
        return f"no scheduler could keep more than {verdict.bound:.0%} of the requests"
    seen = _Seen.of(guess, verdict)
    if guess.sequences > guess.room:
        what = "memory has" if guess.room_by_memory else "max-num-seqs leaves"
        cause = f"{what} room for {guess.room:,.0f} sequences per instance, and more would decode at once"
    else:
        bound = "compute" if guess.compute >= guess.memory else "memory bandwidth"
        cause = (
            f"prompts take {min(guess.prefilling, 9.99):.0%} of the prefillers' time, and decoding is bound by {bound}"
        )
    over_ttft, over_tpot = seen.ttft_p90 / ttft_ms, seen.tpot_p90 / tpot_ms
    name, ratio = ("TTFT", over_ttft) if over_ttft >= over_tpot else ("TPOT", over_tpot)
    how = f"{ratio:.0%} of its target" if ratio < 10 else "far beyond its target"
    if verdict is None:
        return f"not simulated; expected {name} p90 is {how}; {cause}"
    return f"{'kept, ' if verdict.kept else 'missed: '}{name} p90 is {how}; {cause}"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Percentiles as simulated, or else as estimated; ms."""

    ttft_p90: float
    tpot_p90: float

    @classmethod
    def of(cls, guess: Estimate, verdict: Verdict | None) -> _Seen:
        result = {} if verdict is None or verdict.result is None else verdict.result
        values = [result.get(name) for name in ("ttft_p90_ms", "tpot_p90_ms")]
        instead = (guess.ttft_p90, guess.tpot_p90)
        found = [v if isinstance(v, float) else e for v, e in zip(values, instead, strict=True)]
        return cls(*found)
