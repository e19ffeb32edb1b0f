"""Families of metrics: counters and histograms with the label `model_name`, at little cost for each observation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

PREFIX = "penstock:"  # of the names of all metrics


class Buckets:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last is of what is above all bounds
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def show(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = map(floatToGoString, (*self._bounds, inf))
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class Histogram(Collector):
    """Like prometheus-client's Histogram, without its locks and checks, at a fraction of the cost per observation.

    Args:
        bounds: upper bounds, ascending.
    """

    def __init__(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, labels, bounds
        self._series: dict[tuple[str, ...], Buckets] = {}

    def labels(self, *values: str) -> Buckets:
        return self._series.setdefault(values, Buckets(self._bounds))

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Forget the series that have these."""
        places = {self._labels.index(name): value for name, value in labels.items()}
        for values in [v for v in self._series if all(v[at] == value for at, value in places.items())]:
            del self._series[values]

    def collect(self) -> Iterable[Family]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, buckets in self._series.items():
            buckets.show(family, values)
        yield family


class Families:
    """Makes the families of one model, and registers them.

    Args:
        model_name: value of the label `model_name`, which all have.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name, self._registry = model_name, registry

    def counter(self, name: str, help: str) -> Counter:
        """`name` without `_total`, which the exposition appends."""
        return Counter(PREFIX + name, help, ["model_name"], registry=self._registry).labels(self._model_name)

    def counters(self, name: str, help: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """The same by the value of a further label."""
        counter = Counter(PREFIX + name, help, ["model_name", label], registry=self._registry)
        return {value: counter.labels(self._model_name, value) for value in values}

    def gauges(self, name: str, help: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        gauge = Gauge(PREFIX + name, help, ["model_name", label], registry=self._registry)
        return {value: gauge.labels(self._model_name, value) for value in values}

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Buckets:
        metric = Histogram(PREFIX + name, help, ["model_name"], bounds)
        self._registry.register(metric)
        return metric.labels(self._model_name)

    def histograms(
        self, name: str, help: str, label: str, values: Iterable[str], bounds: Sequence[float]
    ) -> dict[str, Buckets]:
        metric = Histogram(PREFIX + name, help, ["model_name", label], bounds)
        self._registry.register(metric)
        return {value: metric.labels(self._model_name, value) for value in values}
