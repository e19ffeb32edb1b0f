"""Service levels of requests: targets in the body or in headers, tiers, and what belongs together."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.api.schema import SHORT, GenerationBody
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.service_level import ServiceLevel

HEADERS = {"ttft_ms": "x-llm-d-slo-ttft-ms", "tpot_ms": "x-llm-d-slo-tpot-ms"}
TIERS = {None: False, "auto": False, "default": False, "flex": True}  # -> whether it is offline work


def service_level(body: GenerationBody, headers: Mapping[str, str]) -> ServiceLevel:
    """What the body says, and the headers where it says nothing.

    Raises:
        InvalidRequest: naming the field or header.
        UnsupportedField: a tier that is not served.
    """
    if body.service_tier not in TIERS:
        allowed = ", ".join(tier for tier in TIERS if tier)
        raise UnsupportedField(
            f"service_tier: {SHORT.repr(body.service_tier)} is not supported, allowed are {allowed}", "service_tier"
        )
    targets = {name: _target(body, headers, name) for name in HEADERS}
    offline = TIERS[body.service_tier]
    if offline and any(target is not None for target in targets.values()):
        raise InvalidRequest("slo: given, allowed only without service_tier 'flex', which has no targets", "slo")
    return ServiceLevel(**targets, priority=body.priority or 0, offline=offline, chat=body.prompt_cache_key or "")


def _target(body: GenerationBody, headers: Mapping[str, str], name: str) -> float | None:
    given = getattr(body.slo, name) if body.slo is not None else None
    if given is not None:
        return _positive(f"slo.{name}", given, given)
    header = headers.get(HEADERS[name])
    if header is None:
        return None
    try:
        value = float(header)
    except ValueError:
        value = math.nan
    return _positive(HEADERS[name], value, header)


def _positive(field: str, value: float, given: object) -> float:
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{field}: {SHORT.repr(given)}, allowed is a number of milliseconds above 0", field)
    return value
