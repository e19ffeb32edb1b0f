"""Metrics of the deployment, as its master counts them: the same on every frontend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from penstock.obs.families import PREFIX

SAME = "; of the deployment, as its master counts"  # in their help


class FleetCollector(Collector):
    """Counters of the master's, which begins anew when it is another one.

    Attributes:
        seconds: instance-seconds; None while no master has said.
        starts: path -> how many, and seconds together.
        changes: "start", "stop", "move" or "restart" -> how many were decided on.
    """

    def __init__(self, model_name: str) -> None:
        self.seconds: float | None = None
        self.changes: Mapping[str, int] = {}
        self.starts: Mapping[str, tuple[int, float]] = {}
        self._model_name = model_name

    def collect(self) -> Iterable[Family]:
        paths = ["model_name", "path"]
        cost = CounterMetricFamily(
            PREFIX + "instance_seconds", "Time that instances held their devices" + SAME, labels=["model_name"]
        )
        if self.seconds is not None:
            cost.add_metric([self._model_name], self.seconds)
        starts = CounterMetricFamily(PREFIX + "instance_starts", "Instances that were started" + SAME, labels=paths)
        took = CounterMetricFamily(
            PREFIX + "instance_start_seconds", "Time from the orders until these could be reached" + SAME, labels=paths
        )
        for path, (count, seconds) in self.starts.items():
            starts.add_metric([self._model_name, path], count)
            took.add_metric([self._model_name, path], seconds)
        changes = CounterMetricFamily(
            PREFIX + "instance_changes",
            "Instances that were started, stopped or moved to a role to scale, or restarted for being slow" + SAME,
            labels=["model_name", "what"],
        )
        for what, count in self.changes.items():
            changes.add_metric([self._model_name, what], count)
        return [cost, starts, took, changes]


class IdealCollector(Collector):
    """What came, and what of it an ideal cache would have found, as the master counts it.

    Attributes:
        said: prompt tokens, those that would have been found, and whether these are all; None while no master has said.
    """

    def __init__(self, model_name: str) -> None:
        self.said: tuple[int, int, bool] | None = None
        self._model_name = model_name

    def collect(self) -> Iterable[Family]:
        if self.said is None:
            return
        asked, found, complete = self.said
        for name, help, tokens in (
            ("prefix_ideal_queries", "Prompt tokens that were asked a place for", asked),
            (
                "prefix_ideal_hits",
                "Those of them that a cache without end which all instances share would have found",
                found,
            ),
        ):
            family = CounterMetricFamily(PREFIX + name, help + SAME, labels=["model_name"])
            family.add_metric([self._model_name], tokens)
            yield family
        bound = GaugeMetricFamily(
            PREFIX + "prefix_ideal_is_lower_bound",
            "1 if there were so many blocks that some are no longer known, and ideal hits are too few" + SAME,
            labels=["model_name"],
        )
        bound.add_metric([self._model_name], not complete)
        yield bound
