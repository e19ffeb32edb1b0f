"""Which images and videos a step looks at, and whose embeddings are kept until then.

A step is filled with running decodes, then with prompts that are partly computed, and where none of these comes before
them, with encodes up to a budget (xLLM, section 3.3). What a prompt's rows stand for is there before they are computed:
a sequence waits for the first that it needs before it queues, and its chunks end before the next that is not there.

So of what runs nothing is kept for long that cannot be computed next, and a request may have more images than fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator

from penstock.core.errors import InvalidRequest
from penstock.core.plan import BLOCK_TOKENS, Encode, StepPlan
from penstock.core.request import MediaSpan, Request
from penstock.sched.local.sequence import Sequence

UNBOUNDED = 1 << 40  # tokens


class Encodes:
    """Embeddings by their digest, those that were wanted longest ago first. A runner keeps what this says: it makes
    what a plan's `encodes` name, and lets go of what it has `forgotten`.

    Args:
        room: tokens whose embeddings are kept, at most.
        beside: steps do not wait for the encodes that they begin: `made` says when there is one (dual stream).

    Attributes:
        used: tokens whose embeddings are kept, or being made.
        gives: whether others may want what is made, so that results have it.
        asked: what others have it look at, that no step does yet, by digest.
        starts: sequences with media that are still to be computed, and what is cached of each before it runs.
        waiting: those of them that wait for the first that they need, by id.
        forgotten: what the runner is to let go of with the next plan.
        looked: how many were to be made since the start; `seconds`: that this took.
        wanted: how many requests needed, beyond what the prefix cache had; `found`: those of them that were there.
    """

    def __init__(self, room: int = UNBOUNDED, *, beside: bool = False) -> None:
        self.room, self.used = room, 0
        self.beside = beside
        self.gives = False
        self.asked: dict[bytes, Encode] = {}
        self._gave_way = False  # the last step looked at something of the others' before prompts
        self.waiting: dict[str, Sequence] = {}
        self.looked = self.wanted = self.found = 0
        self.seconds = 0.0
        self._since: dict[str, float] = {}  # of those that wait
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # digest -> tokens
        self._coming: set[bytes] = set()  # of these, what is not there yet
        self.forgotten: list[bytes] = []
        self.starts: dict[Sequence, int] = {}

    @property
    def under_way(self) -> bool:
        return bool(self._coming)

    def ready(self, digest: bytes) -> bool:
        """Whether a step that is planned now finds it."""
        return digest in self._kept and digest not in self._coming

    def check_request(self, request: Request) -> None:
        """Raise InvalidRequest when one of its media alone is larger than what is kept."""
        for number, span in enumerate(request.media):
            if span.length > self.room:
                raise InvalidRequest(
                    f"{span.kind} {number}: {span.length} tokens, allowed are at most {self.room}, whose embeddings "
                    "fit media-cache-memory",
                    "media",
                )

    def join(self, sequence: Sequence, start: int = 0) -> None:
        """A sequence with media has come, or lost what was computed of it.

        Args:
            start: tokens of it that were found in the prefix cache.
        """
        images = sequence.images
        if sequence.answered is None and images is not None and sequence not in self.starts:
            needed = list(_after(sequence, start))
            images.cached = images.count - len(needed)
            self.wanted += len(needed)
            self.found += sum([span.digest in self._kept for span in needed])
        self.starts[sequence] = start

    def leave(self, sequence: Sequence) -> bool:
        """It goes. Returns whether it waited."""
        self.starts.pop(sequence, None)
        self._since.pop(sequence.id, None)
        return self.waiting.pop(sequence.id, None) is not None

    def wait(self, sequence: Sequence, start: int, now: float) -> None:
        """It is to be computed from there on, and what it needs first is not there."""
        self.starts[sequence] = start
        self.waiting[sequence.id] = sequence
        self._since.setdefault(sequence.id, now)

    def arrived(self, now: float) -> list[Sequence]:
        """Those that need not wait any more, and no longer do."""
        there = [s for s in self.waiting.values() if self.most(s, self.starts[s])]
        for sequence in there:
            del self.waiting[sequence.id]
            since = self._since.pop(sequence.id)
            if sequence.images is not None and sequence.answered is None:
                sequence.images.waited += now - since
        return there

    def most(self, sequence: Sequence, start: int) -> int:
        """Tokens that can be computed of it from a position on. Text before something that is not there waits for it
        too, unless that is a block or more."""
        least = BLOCK_TOKENS
        for span in _after(sequence, start):
            if not self.ready(span.digest):
                before = span.start - start
                return before if before >= least else 0
            least = 0  # what is there takes room of what is not
        return len(sequence.tokens) - start

    def ask(self, request_id: str, span: MediaSpan, pixels: bytes) -> str:
        """Look at it for another instance. Returns why that cannot be; "" when it will."""
        if span.length > self.room:
            return f"it has {span.length} tokens, and {self.room} fit media-cache-memory"
        self.asked[span.digest] = Encode(request_id, span, pixels, wanted=True)
        return ""

    def choose(
        self,
        budget: int,
        before: tuple[float, ...] | None,
        meant: Callable[[Sequence], bool],
        granted: Container[Sequence] = (),
        *,
        others: bool = True,
        beside: bool = False,
    ) -> list[Encode]:
        """What the next step is to encode: one whatever its size, and more up to a budget of tokens.

        Beside steps it is one that is under way and one that follows it, and more up to the budget.

        The first in order may have the room of what all others want, and these that of what nobody wants: so there is
        always one that gets on.

        Args:
            before: turn of the first prompt that this step may go on with: only what comes before that. None is all.
            meant: of which sequences.
            granted: sequences of which it computes something.
            others: also what others have it look at: beside such steps prompts wait every other time.
            beside: steps do not wait for it.
        """
        free = 2 - len(self._coming) if beside else 1  # encodes whose size does not matter
        budget -= sum([self._kept[digest] for digest in self._coming])
        for sequence in [s for s in self.starts if s.blocks and _end(s) <= s.settled]:
            del self.starts[sequence]
        starts = {s: s.computed if s.blocks else start for s, start in self.starts.items()}
        wanted = {span.digest for s, start in starts.items() for span in _after(s, start)}
        needed = {span.digest for s, start in starts.items() if s in granted for span in _after(s, start)}
        chosen: list[Encode] = []
        for place, sequence in enumerate(sorted(starts, key=served)):
            if not meant(sequence) or (before is not None and before < sequence.turn):
                continue
            for span, pixels in zip(sequence.request.media, sequence.request.pixels, strict=True):
                if span.start + span.length <= starts[sequence]:
                    continue
                if span.digest in self._kept:
                    self._kept.move_to_end(span.digest)
                    needed.add(span.digest)
                    continue
                made = pixels if span.embedded else b""
                cost = 0 if made else span.length
                if cost > budget and len(chosen) >= free:
                    return chosen
                there = self._make_room(span.length, wanted) or (not place and self._make_room(span.length, needed))
                if not there:
                    return chosen
                needed.add(span.digest)
                self._take(span, made=bool(made), beside=beside)
                budget -= cost
                self.asked.pop(span.digest, None)
                if sequence.images is not None and sequence.answered is None and not made:
                    sequence.images.looked += 1
                wanted_of = self.gives and not made
                chosen.append(Encode(sequence.id, span, b"" if made else pixels, made, wanted_of, beside and not made))
        if others and self.asked and (before is None or not self._gave_way):
            chosen += self._of_others(budget, wanted, len(chosen) < free, beside=beside)
            self._gave_way = before is not None
        else:
            self._gave_way = False
        return chosen

    def _of_others(self, budget: int, keep: set[bytes], free: bool, *, beside: bool) -> list[Encode]:
        """What others have it look at, in order; the first whatever its size where that is `free`."""
        chosen: list[Encode] = []
        for digest, encode in list(self.asked.items()):
            if digest in self._coming:
                continue  # it is given once it is there
            cost = 0 if digest in self._kept else encode.span.length
            if cost > budget and (chosen or not free):
                break
            if digest in self._kept:
                self._kept.move_to_end(digest)
            elif self._make_room(encode.span.length, keep | {each.span.digest for each in chosen}):
                self._take(encode.span, made=False, beside=beside)
                encode = encode._replace(beside=beside)  # noqa: PLW2901
            else:
                break
            del self.asked[digest]
            budget -= cost
            chosen.append(encode)
        return chosen

    def _make_room(self, length: int, keep: set[bytes]) -> bool:
        """Whether there is room for so many tokens now, without letting go of any of `keep`."""
        free, gone = self.room - self.used, list[bytes]()
        for digest, tokens in self._kept.items():
            if free >= length:
                break
            if digest not in keep and digest not in self._coming:
                free += tokens
                gone.append(digest)
        if free < length:
            return False
        for digest in gone:
            self.used -= self._kept.pop(digest)
        self.forgotten += gone
        return True

    def _take(self, span: MediaSpan, *, made: bool, beside: bool) -> None:
        self._kept[span.digest] = span.length
        self.used += span.length
        if made:
            return
        self.looked += 1
        if beside:
            self._coming.add(span.digest)

    def take_forgotten(self) -> tuple[bytes, ...]:
        """For the next plan."""
        forgotten, self.forgotten = self.forgotten, []
        return tuple(forgotten)

    def took(self, sequence: Sequence | None, seconds: float) -> None:
        """An image was looked at for a sequence in so many seconds; None where it is another instance's, or is over."""
        self.seconds += seconds
        if sequence is not None and sequence.images is not None and sequence.answered is None:
            sequence.images.encoding += seconds

    def made(self, digests: Iterable[bytes]) -> None:
        """These encodes have ended, which steps did not wait for."""
        self._coming.difference_update(digests)

    def undone(self, plan: StepPlan) -> None:
        """A step has not come about. What it has made all the same is made again."""
        self._lose([encode.span.digest for encode in plan.encodes])
        self.forgotten += plan.forgotten

    def abandon(self) -> None:
        """Nothing is being made any more; what was is made again."""
        self._lose(sorted(self._coming))

    def _lose(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._coming.discard(digest)
            if digest in self._kept:
                self.used -= self._kept.pop(digest)
                self.forgotten.append(digest)

    def forget(self) -> None:
        """Have the runner let go of all; nothing is being made."""
        assert not self._coming
        self.forgotten += self._kept
        self._kept.clear()
        self.used = 0

    def check(self) -> None:
        """Raise AssertionError unless what is kept is within its bounds."""
        assert self.used == sum(self._kept.values()) <= self.room
        assert self._coming <= self._kept.keys()
        assert {*self.waiting.values()} <= self.starts.keys()
        assert not any(s.blocks for s in self.waiting.values())
        assert self._since.keys() == self.waiting.keys()


def _after(sequence: Sequence, start: int) -> Iterator[MediaSpan]:
    """Of its media those that do not end before a position."""
    return (span for span in sequence.request.media if span.start + span.length > start)


def _end(sequence: Sequence) -> int:
    last = sequence.request.media[-1]
    return last.start + last.length


def served(sequence: Sequence) -> tuple[bool, tuple[float, ...]]:
    """Order in which sequences have their media encoded: those that run first."""
    return not sequence.blocks, sequence.turn
