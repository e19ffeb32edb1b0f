"""What /metrics says: the metrics of every model that a process serves, each family once, and those of its HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.obs.engine_metrics import WAITS
from penstock.obs.families import PREFIX
from penstock.obs.metrics import VLLM, Compat, Metrics

VLLM_PREFIX = "vllm:"


class Exposition:
    """
    Args:
        models: the metrics of each, which tell them apart by the label `model_name`.
        compat: "vllm" exports vLLM's metrics under its prefix as well.
    """

    def __init__(self, models: Sequence[Metrics], compat: Compat = "none") -> None:
        own = CollectorRegistry()
        self._http = Counter(PREFIX + "http_requests", "HTTP requests answered", ["route", "status"], registry=own)
        self._all = _Merged([*(metrics.registry for metrics in models), own])
        self._compat = compat

    def observe_http(self, route: str, status: int) -> None:
        """A response was sent. `route` is the route's pattern, not the path, as it is a label."""
        self._http.labels(route, str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """(the exposition, its content type)"""
        text = generate_latest(self._all)
        if self._compat == "vllm":
            text += generate_latest(_AsVllm(self._all))
        return text, CONTENT_TYPE_LATEST


class _Merged(Collector):
    def __init__(self, parts: Sequence[Collector]) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Family]:
        found: dict[str, Family] = {}
        for part in self._parts:
            for family in part.collect():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        return found.values()


class _AsVllm(Collector):
    """Exports those of our metrics that vLLM has too, under vLLM's prefix."""

    def __init__(self, ours: Collector) -> None:
        self._ours = ours

    def collect(self) -> Iterable[Family]:
        for family in self._ours.collect():
            if family.name.removeprefix(PREFIX) in VLLM:
                renamed = Family(_in_vllm(family.name), family.documentation, family.type, family.unit)
                renamed.samples = [Sample(_in_vllm(s.name), *s[1:]) for s in family.samples]
                yield renamed
            if family.name == PREFIX + WAITS:
                yield _by_reason(family)


def _by_reason(waiting: Family) -> Family:
    """vLLM's series of what waits by why, which here is always for room."""
    name = VLLM_PREFIX + WAITS + "_by_reason"
    family = Family(name, "Sequences that wait, by why", "gauge")
    for sample in waiting.samples:
        family.add_sample(name, {**sample.labels, "reason": "capacity"}, sample.value)
    return family


def _in_vllm(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(PREFIX)
