"""Dashboard, alerts and the autoscaler's rules ask for metrics and labels that servers have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock.obs.exposition import Exposition
from penstock.obs.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRAPED = {"instance", "job", "namespace", "pod"}  # labels that Prometheus adds
SELECTOR = re.compile(r"(?<![\w$.])(penstock:\w+|up)\b(?!\s*\()(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


@dataclass(frozen=True)
class Query:
    """
    Attributes:
        where: for messages.
        shown: labels that what is shown of its results names.
    """

    where: str
    text: str
    shown: tuple[str, ...] = ()

    @property
    def selectors(self) -> list[tuple[str, list[tuple[str, str, str]]]]:
        """(metric, its matchers)."""
        bare = re.sub(r"by \([^)]*\)", "", self.text)
        return [(name, MATCHER.findall(matchers)) for name, matchers in SELECTOR.findall(bare)]

    @property
    def groupings(self) -> list[list[str]]:
        """Labels of each `by`, the outermost first."""
        return [[label.strip() for label in found.split(",")] for found in re.findall(r"by \(([^)]*)\)", self.text)]


def dashboard() -> list[Query]:
    content, found = json.loads((DEPLOY / "grafana" / "penstock.json").read_text()), []
    for panel in content["panels"]:
        for target in panel.get("targets", ()):
            found.append(
                Query(panel["title"], target["expr"], tuple(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])))
            )
    (model,) = [each for each in content["templating"]["list"] if each["name"] == "model"]
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", model["definition"]).groups()
    return [*found, Query("variable model", f"max by ({label}) ({name})")]


def alerts() -> list[Query]:
    found = []
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            shown = re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))
            found.append(Query(rule["alert"], rule["expr"], tuple(shown)))
    return found


def autoscaler() -> list[Query]:
    rules = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    return [Query(rule["name"]["as"], rule["seriesQuery"]) for rule in rules]


QUERIES = [*dashboard(), *alerts(), *autoscaler()]


@pytest.fixture(scope="module")
def series(apart):
    """Metric -> label -> its values, as a real server has them after a request. What masters tell only under policies
    that scale, or look at prefixes, is of a page of its own."""
    answer = httpx.post(apart.url + "/v1/completions", json={"prompt": "import os", "max_tokens": 4}, timeout=60)
    assert answer.status_code == 200
    page = apart.get("/metrics")
    scaled = Metrics("demo", [])
    scaled.observe_fleet(1.0, {"cold": (1, 1.0)}, {"start": 1})
    scaled.observe_ideal(1, 1, True)
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for text in (page, Exposition([scaled]).render()[0].decode()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found[sample.name]
                for label, value in sample.labels.items():
                    labels[label].add(value)
    return found


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where.replace(" ", "-"))
def test_a_query_asks_for_what_servers_have(series, query):
    assert query.selectors, "it asks for nothing"
    for name, matchers in query.selectors:
        if name == "up":
            labels = {label: set() for label in SCRAPED}
        else:
            assert name in series, f"no such metric: {name}"
            labels = series[name]
        for label, how, value in matchers:
            assert label in {*labels, *SCRAPED}, f"{name} has no label {label}"
            if how == "=" and label != "status" and label not in SCRAPED:
                assert value in labels[label], f"{label} of {name} is never {value}"
        for label in (label for group in query.groupings for label in group):
            assert label in {*labels, *SCRAPED}, f"{name} has no label {label}"
    outermost = query.groupings[0] if query.groupings else [*SCRAPED] if query.text.startswith("up") else []
    assert set(query.shown) <= set(outermost)


def test_a_wrong_query_would_be_found(series):
    for text in ("penstock:no_such_metric", 'penstock:instance_up{no="x"}', "max by (no) (penstock:instance_up)"):
        with pytest.raises(AssertionError):
            test_a_query_asks_for_what_servers_have(series, Query("wrong", text))
    with pytest.raises(AssertionError, match="never"):
        test_a_query_asks_for_what_servers_have(series, Query("wrong", 'penstock:num_requests_waiting{engine="no"}'))


def test_panels_have_places_of_their_own():
    taken = set()
    for panel in json.loads((DEPLOY / "grafana" / "penstock.json").read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_understands_the_dashboard(tmp_path):
    rules = [
        {"record": f"query{i}", "expr": query.text.replace("$__rate_interval", "1m")} for i, query in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
