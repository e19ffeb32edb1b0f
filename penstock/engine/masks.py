"""Which tokens may be drawn, worked out between a step's forward pass and its draws, when all tokens before are known.

So nothing has to wait for a token that decides about the next one: the scheduler plans ahead, and drafts are checked
as if those before them were right. Only grammars have state, and it follows from the tokens: what is kept here is a
cache, which goes back or begins again where a plan says something else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.structured_outputs import FIELD, StructuredOutputs
from penstock.engine.executor.base import MaskCosts
from penstock.text.grammar import Grammars, problem_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

log = logging.getLogger("penstock.engine")
Words = NDArray[np.int32]
ALL = np.int32(-1)  # 32 tokens
MOST_THREADS = 8
MOST_TEXTS = 64  # sets of stop tokens that are remembered


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Of some of a step's rows.

    Attributes:
        rows: which, [masked] int64; `masks`: see `ops.mask_logits`.
        stuck: row -> why no token may be drawn there.
    """

    rows: Tensor
    masks: Tensor
    stuck: dict[int, str]

    def part(self, first: int, end: int) -> RowMasks | None:
        """Of the rows [first, end), which are counted from `first` on; None where none of them is masked."""
        there = torch.nonzero((self.rows >= first) & (self.rows < end))[:, 0]
        if not len(there):
            return None
        stuck = {row - first: why for row, why in self.stuck.items() if first <= row < end}
        return RowMasks(self.rows[there] - first, self.masks[there], stuck)


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """That are being worked out, or will be.

    Attributes:
        rows: of the step.
    """

    rows: Sequence[SequenceStep]
    found: Callable[[], RowMasks | None]


@dataclass(slots=True)
class _Matched:
    """A grammar and the tokens that it was led through."""

    matcher: LLMatcher
    tokens: list[int] = field(default_factory=list)

    def lead(self, tokens: Sequence[int]) -> bool:
        """To the state after these tokens; False where it does not allow them, and then not as far."""
        known = self.tokens
        if known != tokens[: len(known)]:
            pairs = enumerate(zip(known, tokens, strict=False))
            same = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(known), len(tokens)))
            self.matcher.rollback(len(known) - same)
            del known[same:]
        rest = list(tokens[len(known) :])
        taken = self.matcher.try_consume_tokens(rest) if rest else 0
        known += rest[:taken]
        return taken == len(rest)


class Masks:
    """
    Args:
        vocab_size: of the model.
        grammars: None where there is no tokenizer for them.

    Attributes:
        states: by request: what its grammar has come to, or that it is being compiled.
    """

    def __init__(self, vocab_size: int, grammars: Grammars | None = None) -> None:
        self.costs = MaskCosts()
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self.states: dict[str, _Matched | Future[LLMatcher]] = {}
        self._last: Future[RowMasks | None] | None = None
        self._texts: dict[Collection[int], Words] = {}  # stop ids -> all other tokens of the model

    def begin(self, plan: StepPlan, rows: Sequence[SequenceStep]) -> PendingMasks:
        """A step begins, and perhaps requests with it. Grammars are followed, and compiled, beside its forward pass.

        Args:
            rows: after which tokens are drawn, or candidates wanted, with all of `generated` known
                (`sampling.each_row`, `beam_rows`).
        """
        self.forget(plan.released)
        guided = False
        for step in plan.sequences:
            wanted = step.params.structured_outputs
            if wanted is not None:
                guided |= step.sample > 0 or step.candidates > 0
                if step.request_id not in self.states:
                    self.states[step.request_id] = self._compiler.submit(self._compile, wanted)
        if not guided:
            return PendingMasks(rows, partial(self._of, rows))
        self._last = self._worker.submit(self._of, rows)
        return PendingMasks(rows, self._last.result)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Their outputs are over, or begin anew."""
        if self._last is not None and not self._last.done():
            self._last.exception()  # of a step that did not come to its end
        for request_id in request_ids:
            self.states.pop(request_id, None)

    def end(self, pending: PendingMasks, device: torch.device) -> RowMasks | None:
        """Which tokens may be drawn after each row; None where all may be. Call it once the forward pass has begun:
        some devices compute it meanwhile."""
        began = time.perf_counter()
        found = pending.found()
        if found is None:
            return None
        allowed = RowMasks(found.rows.to(device), found.masks.to(device), found.stuck)
        self.costs.steps += 1
        self.costs.seconds += time.perf_counter() - began
        return allowed

    def _of(self, rows: Sequence[SequenceStep]) -> RowMasks | None:
        """On the CPU."""
        masked = [row for row, step in enumerate(rows) if _restricted(step)]
        if not masked:
            return None
        steps = [rows[row] for row in masked]
        states = [self._state(step) for step in steps]
        guided = any(isinstance(state, _Matched) for state in states)
        words = self._grammars.words if guided and self._grammars is not None else self._vocab_size // 32 + 1
        masks = np.full((len(masked), words), ALL)
        stuck = {place: state for place, state in enumerate(states) if isinstance(state, str)}
        if guided:
            stuck |= self._follow(masks, steps, states)
        for place, step in enumerate(steps):
            if step.bad_words or step.params.structured_outputs is None or step.params.allowed_token_ids is not None:
                _exclude(masks[place], step)
        for place, step in enumerate(steps):
            if (forced := _forced(step)) is not None:
                masks[place] = 0
                _add(masks[place], [forced])
        for place in np.flatnonzero(~masks.any(axis=1)).tolist():
            stuck.setdefault(place, f"{FIELD}: no token may come next")
        for place in stuck:
            masks[place] = ALL  # something is drawn, and dropped
        why = {masked[place]: said for place, said in stuck.items()}
        return RowMasks(torch.tensor(masked), torch.from_numpy(masks), why)

    def _follow(
        self, masks: Words, steps: Sequence[SequenceStep], states: Sequence[_Matched | str | None]
    ) -> dict[int, str]:
        """Fill in what each grammar allows. Where it allows nothing but the end, that comes before it is due.

        Returns: place -> why it cannot go on.
        """
        stuck: dict[int, str] = {}
        first: list[tuple[LLMatcher, int]] = []
        drafts: list[tuple[_Matched, int, Sequence[int]]] = []
        opening: list[tuple[int, int]] = []  # places where what it thinks may begin, and the token that begins it
        met: set[str] = set()
        for place, (step, state) in enumerate(zip(steps, states, strict=True)):
            if not isinstance(state, _Matched) or _over(step):
                continue
            answer, opens = _answer(step)
            if answer is None:
                _drop(masks[place], step.stop_ids)  # the answer is still to come
                continue
            if opens is not None:
                opening.append((place, opens))
            if step.request_id in met:
                drafts.append((state, place, answer))
                continue
            met.add(step.request_id)
            if state.lead(answer):
                first.append((state.matcher, place))
            elif opens is None:
                stuck[place] = f"{FIELD}: the output does not follow it"
            else:
                masks[place] = 0
        self._fill(masks, first)
        filled = first
        for state, place, answer in drafts:
            if state.lead(answer):  # else a draft before it is wrong, and it is dropped
                filled.append((state.matcher, place))
                self._fill(masks, filled[-1:])
        by_stops: dict[Collection[int], list[int]] = {}
        for matcher, place in filled:
            step = steps[place]
            if matcher.is_error():
                stuck[place] = f"{FIELD}: {problem_of(matcher)}"
                self.states.pop(step.request_id, None)
            else:
                by_stops.setdefault(step.stop_ids, []).append(place)
        for stop_ids, places in by_stops.items():
            self._end(masks, stop_ids, places, steps)
        for place, token in opening:
            _add(masks[place], [token])
        return stuck

    def _end(self, masks: Words, stop_ids: Collection[int], places: list[int], steps: Sequence[SequenceStep]) -> None:
        """In some masks, have tokens that end an output stand for its end."""
        assert self._grammars is not None
        word, bit = divmod(self._grammars.end, 32)
        ends = masks[places, word] >> bit & 1
        text = self._text_only(stop_ids, masks.shape[1])
        if len(places) == len(masks):
            masks &= text
        else:
            masks[places] &= text
        for i in np.flatnonzero(ends).tolist():
            mask, step = masks[places[i]], steps[places[i]]
            early = step.params.ignore_eos or len(step.generated or ()) < step.params.min_tokens
            if not (early and mask.any()):
                _add(mask, stop_ids)

    def _text_only(self, stop_ids: Collection[int], words: int) -> Words:
        found = self._texts.get(stop_ids)
        if found is None:
            if len(self._texts) >= MOST_TEXTS:
                self._texts.clear()
            found = np.zeros(words, dtype=np.int32)
            _add(found, range(self._vocab_size))
            _drop(found, stop_ids)
            self._texts[stop_ids] = found
        return found

    def _fill(self, masks: Words, matchers: Sequence[tuple[LLMatcher, int]]) -> None:
        """What may come next by each of them, which stand in different states."""
        start, stride = masks.ctypes.data, masks.strides[0]
        if self._executor is not None and len(matchers) > 1:
            self._executor.unsafe_compute_mask_ptr(list(matchers), start, stride, len(masks))
            return
        for matcher, place in matchers:
            matcher.unsafe_compute_mask_ptr(start + place * stride, stride)

    @cached_property
    def _executor(self) -> LLExecutor | None:
        """Threads for it; None where handing it to them takes longer than doing it."""
        import llguidance

        threads = min(torch.get_num_threads() // 2, MOST_THREADS)
        return llguidance.LLExecutor(threads) if threads > 1 else None

    def _state(self, step: SequenceStep) -> _Matched | str | None:
        """What a request's grammar has come to, or why there is none; None when it has none."""
        wanted = step.params.structured_outputs
        if wanted is None:
            return None
        found = self.states.get(step.request_id) or self._compiler.submit(self._compile, wanted)
        if isinstance(found, _Matched):
            return found
        error = found.exception()
        if error is None:
            matched = self.states[step.request_id] = _Matched(found.result())
            return matched
        if not isinstance(error, UserError | ImportError):
            log.error("a grammar could not be compiled", exc_info=error)
            return f"{FIELD}: it could not be compiled"
        return str(error)

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        began = time.perf_counter()
        if self._grammars is None:
            raise UserError(f"{FIELD}: this engine knows no tokenizer", FIELD)
        matcher = self._grammars.matcher(wanted)
        self.costs.compiled += 1
        self.costs.compiling += time.perf_counter() - began
        return matcher


def _restricted(step: SequenceStep) -> bool:
    p = step.params
    if step.generated is None:
        return p.allowed_token_ids is not None
    restricted = step.bad_words or p.structured_outputs is not None or p.allowed_token_ids is not None
    return bool(restricted or len(step.generated) < p.min_tokens or _forced(step) is not None)


def _answer(step: SequenceStep) -> tuple[Sequence[int] | None, int | None]:
    """What of its output grammars are about, None while it thinks; and the token that would go on to begin thinking."""
    generated, thinking = step.generated or (), step.params.thinking
    if thinking is None:
        return generated, None
    before = thinking.answer(generated)
    return (None if before is None else generated[before:]), thinking.opening(generated)


def _forced(step: SequenceStep) -> int | None:
    """The token that is the only one, if its thinking has to end."""
    thinking = step.params.thinking
    return None if thinking is None or step.generated is None or _over(step) else thinking.forced(step.generated)


def _over(step: SequenceStep) -> bool:
    """Whether a token has ended it, of which whoever planned the step did not know: what comes after is dropped."""
    generated = step.generated
    return bool(generated and generated[-1] in step.stop_ids)


def _exclude(mask: Words, step: SequenceStep) -> None:
    """Take out of a mask what is not allowed, whatever came before; what ends the output; and bad words."""
    p = step.params
    if p.allowed_token_ids is not None:
        allowed = np.zeros_like(mask)
        _add(allowed, p.allowed_token_ids)
        mask &= allowed
    if step.generated is None:
        return
    if p.structured_outputs is None and len(step.generated) < p.min_tokens:
        _drop(mask, step.stop_ids)
    if step.bad_words:
        _drop(mask, _completing(step.bad_words, step.generated))


def _completing(words: Iterable[tuple[int, ...]], generated: Sequence[int]) -> list[int]:
    """Tokens that would complete one of the words."""
    count = len(generated)
    return [
        word[-1] for word in words if len(word) <= count + 1 and tuple(generated[count + 1 - len(word) :]) == word[:-1]
    ]


def _drop(mask: Words, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 32] &= ~_BITS[token % 32]


def _add(mask: Words, tokens: Iterable[int]) -> None:
    ids = np.fromiter(tokens, dtype=np.int64)
    np.bitwise_or.at(mask, ids // 32, _BITS[ids % 32])


_BITS: Words = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
