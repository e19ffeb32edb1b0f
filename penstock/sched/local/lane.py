"""A tier below the device as a scheduler uses it: what is on its way there and back, how long that takes, and what has
become of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.shared_tier import SharedTier
from penstock.kv.tier import Tier
from penstock.sched.steptime import StepTime

# why a block that is on the device is not in a tier: too much was on its way there, or it is not worth it; there was no
# slot, or no copy of the block before it; its copy could not be made; had to go for others; is not what it was; or it
# came to the device from elsewhere, and nobody has used it since
Refusal = Literal["busy", "full", "failed", "evicted", "spoiled", "unused"]

MOST_STORES, SHARE_OF_STORES = 16, 1 / 8  # blocks that are copied at once: so many, or that share of all if it is more
KEPT = 0.9  # of what was measured of loads, at each new one, and whenever one is not made for what was measured
PRIOR = 16  # blocks whose load counts as measured once, in the time that the model says
# what is copied is held until it is there, perhaps longer than by its sequence: where that takes time, at most that of
# computing so much of a block, or one block if loads are that many times as quick as computing; else nothing is copied
HELD, PAYS = 1 / 8, 2.0
ANSWER = 2e-3  # seconds for a question about what is in a tier, as far as nothing is measured
SHARE = 0.01  # of what computing takes: so much may be lost on a question


class Lane:
    """The way between the device and a tier.

    Args:
        block_seconds: that copying a block takes either way, as far as nothing is measured, in a tier that may be slow;
            None is what the device's model says of its host's memory.
        mirrors: what is on the device is meant to be here too; then it is known why a block is not (`refused`).

    Attributes:
        tier: what it has.
        away: it does not answer at present, so nothing is asked of it; `full`: it takes nothing.
        late: numbers of moves that nobody waits for any longer since they take too long. Until they end nothing else
            begins: each would keep its blocks as long.
        storing, loading: blocks under way.
        loaded_blocks, stored_blocks: that arrived, since the start.
        hit_tokens: of prompts, that were found since they had been loaded.
        loads: that have ended, since the start.
        failed_loads, failed_stores: that brought less than they should have.
        late_loads: that took so long that who waited for them computed instead.
        expected, took: seconds of the loads that have brought all, as they were predicted and as they were.
        questions: about what is there, that have ended.
        failed_questions, late_questions: that had no answer, or not in time.
        refused: key -> why there is no copy; of keys that are on the device, and of some that no longer are.
    """

    def __init__(self, tier: Tier | SharedTier, block_seconds: float | None = None, *, mirrors: bool = False) -> None:
        self.tier, self.mirrors = tier, mirrors
        self.away = self.full = False
        self.late: set[int] = set()
        self.storing = self.loading = 0
        self.loaded_blocks = self.stored_blocks = self.hit_tokens = 0
        self.loads = self.failed_loads = self.failed_stores = self.late_loads = 0
        self.expected = self.took = 0.0
        self.questions = self.failed_questions = self.late_questions = 0
        self.refused: dict[bytes, Refusal] = {}
        self._block_seconds = block_seconds
        self._times: StepTime | None = None
        self._measured = 0.0, 0.0  # blocks that were loaded, and the seconds that it took; the last ones count most
        self._answered = 1.0, ANSWER, 0.5  # questions, the seconds that they took, and those that found something

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def is_open(self) -> bool:
        """Whether anything may begin."""
        return not (self.late or self.away)

    def predict_by(self, times: StepTime) -> None:
        """What a prompt would take to compute is predicted so from now on."""
        self._times = times

    # --- to the tier

    def room(self, groups: int, num_blocks: int) -> int:
        """Blocks that may be on their way to the tier at once, where so many have the same tokens.

        Args:
            num_blocks: of the device.
        """
        if self.full or not self.is_open:
            return 0
        most = max(MOST_STORES, int(SHARE_OF_STORES * num_blocks))
        if self._block_seconds is None or self._times is None:
            return most
        tokens = PRIOR * BLOCK_TOKENS
        compute = self._times.prefill_ms(tokens, 0, budget=tokens) / 1e3 / (PRIOR * groups)
        ratio = compute / self.seconds_each
        if ratio < PAYS:
            self.forget()
            return 0
        return min(most, max(1, int(HELD * ratio)))

    def refuse(self, keys: Iterable[bytes], why: Refusal) -> None:
        """There are no copies of these blocks; those that there are are left out."""
        if self.mirrors:
            self.refused.update((key, why) for key in keys if not self.tier.has(key))

    def claim(self, key: bytes, parent: bytes | None, *, told: bool) -> int | None:
        """A slot to write a copy to; see `Tier.claim`."""
        slot = self.tier.claim(key, parent, told=told)
        self.refuse(self.tier.take_evicted(), "evicted")
        if slot is not None:
            self.refused.pop(key, None)
        return slot

    def written(self, keys: Iterable[bytes], *, whole: bool) -> None:
        """The copies that were claimed are there, or could not be made."""
        number = 0
        for key in keys:
            self.tier.written(key, whole=whole)
            number += 1
            if not whole:
                self.refuse([key], "failed")
        self.storing -= number
        self.stored_blocks += number * whole
        self.failed_stores += not whole

    # --- from the tier

    def load_seconds(self, blocks: int) -> float:
        """Expected, behind the loads that are under way."""
        return (blocks + self.loading) * self.seconds_each

    @property
    def seconds_each(self) -> float:
        """That loading a block takes; 0 when nothing is known."""
        loaded, seconds = self._measured
        if self._times is not None:
            # small loads say little of large ones: each has to be ordered, and reported
            prior = self._block_seconds or self._times.load_blocks_ms(1) / 1e3
            loaded, seconds = loaded + PRIOR, seconds + PRIOR * prior
        return seconds / loaded if loaded else 0.0

    def loaded(self, number: int, keys: list[bytes], good: int, expected: float, seconds: float | None) -> None:
        """A load has ended.

        Args:
            keys: of its blocks.
            good: of these, from the first on; the next one was not what had been stored, if there is a next one.
            expected, seconds: that it should have taken, and did, without the wait for others; None is not measured.
        """
        self.late.discard(number)
        self.loads += 1
        self.failed_loads += good < len(keys)
        self.tier.end_reading(keys)
        if good < len(keys) and not self.away:
            self.tier.spoil(keys[good])
            if isinstance(self.tier, SharedTier):
                self.tier.doubt(keys[good + 1 :])
            self.refuse(keys[good : good + 1], "spoiled")
        self.loading -= len(keys)
        self.loaded_blocks += good
        if seconds and good:
            self.forget()
            blocks, before = self._measured
            self._measured = blocks + good, before + seconds
            if good == len(keys):
                self.expected, self.took = self.expected + expected, self.took + seconds

    def forget(self) -> None:
        """Decay the measurement, so that a tier that was slow is tried again."""
        blocks, seconds = self._measured
        self._measured = KEPT * blocks, KEPT * seconds

    # --- questions, where others fill and empty the tier too

    def unknown(self, keys: Sequence[bytes], compute: float) -> Sequence[bytes]:
        """Those of the rest of a prompt's blocks that are to be asked for: none, where the answer could not bring more
        on average than it takes, which may be a small share of computing them in any case.

        Args:
            compute: seconds that computing all of them would take.
        """
        if not isinstance(self.tier, SharedTier) or not self.is_open:
            return ()
        unknown = self.tier.unknown(keys)
        if not unknown:
            return ()
        gain = compute - self.load_seconds(len(keys))
        if gain <= 0:
            self.forget()
            return ()
        count, seconds, found = self._answered
        if seconds / count > max(SHARE * compute, found / count * gain):
            self._answered = count, KEPT * seconds, found
            return ()
        return unknown

    @property
    def answer_seconds(self) -> float:
        """That an answer takes."""
        count, seconds, _ = self._answered
        return seconds / count

    def answered(self, number: int, keys: Sequence[bytes], count: int, seconds: float) -> None:
        """A question has ended: so many of these are there, from the first on; if the tier is away, nobody knows."""
        assert isinstance(self.tier, SharedTier)
        self.late.discard(number)
        self.questions += 1
        self.failed_questions += self.away
        if not self.away:
            self.tier.answered(keys, count)
            asked, took, found = (KEPT * value for value in self._answered)
            self._answered = asked + 1.0, took + seconds, found + (count > 0)

    # --- checks

    def check(self, on_device: Iterable[bytes]) -> None:
        """Raise AssertionError unless what is on the device is here too, or is not for a reason."""
        self.tier.check()
        if self.mirrors:
            lost = [key.hex() for key in on_device if not self.tier.has(key) and key not in self.refused]
            assert not lost, f"on the device, not in tier {self.name}, and nobody knows why: {lost}"
