"""Where a frontend has a sequence run while no master can be asked: on the least loaded instances that it sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.wire.engine import Leg, Ready
from penstock.core.wire.master import Place, Placed

POLICY, REASON = "fallback", "no-master"


def least_loaded(place: Place, serving: Sequence[Ready], loads: Mapping[str, int]) -> Placed | None:
    """None when no instance can take it. Roles are those that instances began with: the master may have changed them
    since, but what it linked is linked.

    Args:
        serving: instances.
        loads: sequences on each, by name.
    """
    tokens = place.prompt_tokens + place.max_tokens
    able = [ready for ready in serving if tokens <= ready.max_model_len and ready.peer.name not in place.exclude]
    if not able:
        return None
    able = [ready for ready in able if ready.role != "encode"] or able

    def least(candidates: Sequence[Ready]) -> Ready:
        return min(candidates, key=lambda ready: (loads.get(ready.peer.name, 0), ready.peer.name))

    prefill = least([ready for ready in able if ready.role != "decode"] or able)
    route = [Leg("prefill", prefill.peer)]
    decoders = [ready for ready in able if ready.role != "prefill"]
    if prefill.role == "prefill" and place.max_tokens and decoders:
        route.append(Leg("decode", least(decoders).peer))
    return Placed(place.request_id, place.generation, route, POLICY, REASON, place.ttft_ms, place.tpot_ms)
