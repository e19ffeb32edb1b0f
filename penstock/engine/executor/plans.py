"""Plans to bytes and back, and what came of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.core.plan import SequenceStep, StepPlan, StepResult
from penstock.core.sampling import SamplingParams
from penstock.engine.executor.base import MaskCosts

PARAMS_KEPT = 4096  # parsed ones; a request's stay the same for all of its steps
encode_plan = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Answer:
    """Of the last stage to a plan.

    Attributes:
        costs, counts: of its worker, so far.
    """

    result: StepResult
    costs: MaskCosts
    counts: Mapping[str, int]


encode_answer = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


@dataclass(slots=True)
class _SentStep(SequenceStep):
    """A step whose parameters are not parsed yet, which takes longer than all else in it."""

    params: msgspec.Raw  # type: ignore[assignment]
    stop_ids: frozenset[int] = frozenset()  # a request's own, by which masks are found again


@dataclass(frozen=True)
class _SentPlan(StepPlan):
    sequences: tuple[_SentStep, ...]


class PlanDecoder:
    """Decodes what `encode_plan` made of plans, one after the other."""

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(_SentPlan).decode
        self._decode_params = msgspec.msgpack.Decoder(SamplingParams).decode
        self._known: OrderedDict[bytes, SamplingParams] = OrderedDict()

    def __call__(self, data: bytes) -> StepPlan:
        plan = self._decode(data)
        for step in plan.sequences:
            step.params = self._params(bytes(step.params))  # type: ignore[assignment]
        return plan

    def _params(self, data: bytes) -> SamplingParams:
        params = self._known.get(data)
        if params is None:
            params = self._known[data] = self._decode_params(data)
            if len(self._known) > PARAMS_KEPT:
                self._known.popitem(last=False)
        return params
