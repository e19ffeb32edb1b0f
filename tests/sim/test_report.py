"""Pages about results: well-formed, complete in themselves, and with what there is to show."""

import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from penstock.sim.report import compare_page, compare_rows, curves, run_page
from penstock.sim.result import outcomes_of
from penstock.sim.svg import Axis, Bar, Line, Mark, Strip, bar_chart, line_chart, short, strip_chart
from tests.sim.scenarios import COLOCATED, SPLIT, WORKLOAD, read, run

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps what a test looks for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.captions, self.titles, self.text = [], [], [], [], text
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)
        if self.open and self.open[-1] == "title":
            self.titles.append(data)

    def check_alone(self):
        """It asks for nothing from anywhere, and runs nothing."""
        assert not [
            a for a in self.attributes if a[1] in ("src", "href") or a[0] in ("script", "link", "iframe", "img")
        ]
        assert "url(" not in self.text
        assert "@import" not in self.text


@pytest.fixture(scope="module")
def split_run():
    result, cluster = run(read(WORKLOAD, SPLIT))
    return result | curves(outcomes_of(cluster.records))


def test_a_run_has_every_figure(split_run):
    page = Page(run_page({"scenario": "<b>.yaml", **split_run}))
    page.check_alone()
    wanted = [
        "Latency",
        "Time to first token",
        "Time per token after the first",
        "Requests",
        "Queue",
        "Instances",
        "Cost",
    ]
    assert [caption for caption in page.captions if caption in wanted] == wanted
    assert "&lt;b&gt;.yaml: least_loaded at" in page.text
    assert "<b>.yaml" not in page.text
    for role in ("prefill", "decode"):
        assert any(
            tag == "rect" and value.split()[0] == role for tag, name, value in page.attributes if name == "class"
        )
    assert any("target 400 ms" in title for title in page.titles)
    assert f"{split_run['attainment']:.1%}" in page.text
    assert f"{split_run['instance_seconds']:,.0f} instance-seconds" in page.text


def test_curves_are_those_of_the_records(split_run):
    values = split_run["quantiles"]["ttft_ms"][""]
    assert values == sorted(values)
    assert values[len(values) // 2] == pytest.approx(split_run["ttft_p50_ms"])
    assert values[len(values) * 9 // 10] == pytest.approx(split_run["ttft_p90_ms"], rel=0.05)
    assert split_run["targets"] == {"": {"ttft_ms": pytest.approx(400), "tpot_ms": pytest.approx(30)}}


def test_what_a_result_lacks_is_left_out(split_run):
    bare = {key: split_run[key] for key in ("policy", "requests", "duration", "scale", "seed", "attainment")}
    page = Page(run_page(bare))
    assert set(page.captions) == {"Latency"}
    assert "least_loaded" in page.text


def test_a_run_that_was_given_up_says_so():
    result, _ = run(read(WORKLOAD, COLOCATED), scale=8.0, allowed_misses=0.1)
    assert not result["complete"]
    assert "given up before its end" in run_page(result)


def test_tasks_have_bars_curves_and_targets(split_run):
    tasks = {name: {**split_run, "attainment": share} for name, share in (("chat", 0.75), ("code", 0.5))}
    values = split_run["quantiles"]["ttft_ms"][""]
    more = {
        "tasks": tasks,
        "quantiles": {"ttft_ms": {"chat": values, "code": values}, "tpot_ms": {}},
        "targets": {"chat": {"ttft_ms": 300, "tpot_ms": None}, "code": {"ttft_ms": 900.0, "tpot_ms": None}},
    }
    page = Page(run_page({**split_run, **more}))
    assert "Tasks" in page.captions
    assert {"chat: 75 %", "code: 50 %"} <= set(page.titles)
    assert {"chat: target 300 ms", "code: target 900 ms"} <= set(page.titles)


def policy_row(rate, kept=0.93, bound=None):
    figures = {
        "max_rate_90": rate,
        "attainment": kept,
        "ttft_p50_ms": 80.0,
        "ttft_p95_ms": 800.0,
        "tpot_p50_ms": 9.0,
        "mean_latency_s": 1.5,
        "instance_seconds": 4800.0,
        "offline_tokens_per_s": None,
        "reused_tokens": 0,
        "share_of_bound": None if bound is None else rate / bound,
        "bound_rate": bound,
    }
    probes = [
        {"seed": 0, "rate": rate * f, "share": share, "attainment": a, "complete": a > 0.9, "kept": a > 0.9}
        for f, share, a in ((0.9, 1.0, 0.99), (1.0, 1.0, kept), (1.03, 1.0, 0.7), (1.5, 0.1, 0.2))
    ]
    return {**figures, "spread": [rate * 0.98, rate * 1.01], "seeds": [{"seed": 0, **figures}], "probes": probes}


def document(**more):
    policies = {"unified": policy_row(50.0, bound=80.0), "round_robin": policy_row(25.0, bound=80.0)}
    return {"scenario": "s.yaml", "target": 0.9, "vary": "online", "seeds": [0, 1, 2], "policies": policies} | more


def test_a_comparison_has_bars_bounds_and_whole_probes_only():
    page = Page(compare_page(document()))
    page.check_alone()
    assert "Attainment against rate" in page.captions
    assert "unified: 50 (49 to 50.5)" in page.titles
    assert "nobody can do better: 80" in page.titles
    assert "unified: 99 % at 45" in page.titles
    assert "unified: 70 % at 51.5, given up" in page.titles
    assert not any("at 75" in title for title in page.titles)
    assert "62.5%" in page.text


def test_a_policy_that_keeps_up_with_nothing_is_still_named():
    policies = {"a": policy_row(50.0), "b": dict.fromkeys(policy_row(1.0)) | {"probes": [], "seeds": []}}
    page = Page(compare_page(document(policies=policies)))
    assert page.text.count(">b<") >= 2


def test_given_rates_are_curves():
    entries = [
        {"rate": r, "attainment": 1 - r / 100, "mean_latency_s": r / 10, "instance_seconds": 100 * r} for r in (5, 20)
    ]
    policies = {"a": {"max_rate_90": None, "rates": entries}, "b": {"max_rate_90": None, "rates": entries}}
    page = Page(compare_page(document(policies=policies, rates=[5, 20])))
    wanted = ["Attainment against rate", "Mean latency against rate", "Cost against rate"]
    assert [caption for caption in page.captions if caption in wanted] == wanted
    head, rows = compare_rows(policies)
    assert head[:3] == ["policy", "rate (/s)", "kept"]
    assert [row[:3] for row in rows] == [
        ["a", "5", "95.0%"],
        ["a", "20", "80.0%"],
        ["b", "5", "95.0%"],
        ["b", "20", "80.0%"],
    ]


def test_offline_work_is_what_is_compared_where_it_varies():
    policies = {"a": {**policy_row(2.0), "max_rate_90": None, "offline_tokens_per_s": 4321.0}}
    page = Page(compare_page(document(policies=policies, vary="offline", target=0.95)))
    assert any(title.startswith("a: 4,321") for title in page.titles)
    assert "offline tokens/s while 95% keep" in page.text


# --- charts


def points(svg):
    """Of the first line: [(x, y)] in pixels."""
    start = svg.index(' d="M') + 5
    return [tuple(map(float, part.split())) for part in svg[start : svg.index('"', start)].split("L")]


def parsed(svg):
    return ET.fromstring(svg[svg.index("<svg") :])


def test_lines_are_where_their_axes_say():
    linear = points(line_chart([Line("a", [(0, 0), (5, 1), (10, 2)])], Axis("x"), Axis("y")))
    assert linear[1] == pytest.approx(((linear[0][0] + linear[2][0]) / 2, (linear[0][1] + linear[2][1]) / 2), abs=0.2)
    assert linear[0][1] > linear[2][1]
    logarithmic = points(line_chart([Line("a", [(1, 0), (10, 1), (100, 2)])], Axis("x", log=True), Axis("y")))
    assert logarithmic[1][0] == pytest.approx((logarithmic[0][0] + logarithmic[2][0]) / 2, abs=0.2)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1e-6, 1e9], [0.0, 0.0], [-2.0, 5.0], [7.0, 7.0000001]])
def test_odd_values_draw_what_can_be_parsed(values, log):
    line = Line("a & <b>", [(v, v) for v in sorted(values)], dots=True)
    svg = line_chart(
        [line, Line("c", line.points)],
        Axis("x<y", log=log),
        Axis("&", log=log),
        [Mark(2.0, "m>"), Mark(1.0, "l", level=True)],
    )
    for element in parsed(svg).iter():
        for name in ("x", "y", "x1", "y1", "cx", "cy"):
            assert -1 <= float(element.get(name, 0)) <= 600
    assert "a &amp; &lt;b&gt;</span>" in svg


def test_gaps_steps_and_what_a_place_tells():
    line = Line("a", [(0, 1.0), (1, None), (2, 3.0), (4, 5.0)])
    assert [line.value(x) for x in (-1, 0.5, 1.5, 2, 3, 4, 5)] == [None, 1.0, None, 3.0, 4.0, 5.0, None]
    assert Line("a", [(0, 1.0), (2, 3.0)], steps=True).value(1.9) == 1.0
    assert line_chart([line], Axis("x"), Axis("y")).count("M") == 2


def test_nothing_to_draw_draws_nothing():
    assert line_chart([Line("a", [])], Axis("x"), Axis("y")) == ""
    assert bar_chart([Bar("a", None)], Axis("x")) == ""
    assert strip_chart([Strip("a", [])], Axis("x"), [], width=500) == ""


def test_bars_are_in_proportion():
    root = parsed(bar_chart([Bar("a", 10.0, bound=40.0), Bar("b", 20.0), Bar("c", None)], Axis("x"), bound="most"))
    widths = [float(e.get("width")) for e in root.iter() if e.get("class") == "bar"]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)


def test_strips_fill_their_time():
    strips = [Strip(f"engine-{i}", [(0, 10, "any b1", "t"), (10, 40, "down", "t")]) for i in range(100)]
    root = parsed(strip_chart(strips, Axis("s"), [("any", "any")], width=1000))
    rects = [e for e in root.iter() if e.tag == "rect"]
    assert len(rects) == 200
    assert float(rects[1].get("width")) == pytest.approx(3 * float(rects[0].get("width")), abs=0.3)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0"), (12.345, "12.3"), (1234, "1,234"), (56789, "56.8k"), (2.5e6, "2.5M")]
)
def test_numbers_for_people(value, text):
    assert short(value) == text
