import io
import json
import sys

import pytest
from rich.console import Console

from penstock.bench import document, report
from penstock.core.errors import ConfigError


def stats(value):
    return {"count": 4, "mean": value, "p50": value, "p90": value, "p99": value, "max": value}


def serve_document(scale=1.0, **config):
    """A document in which everything is `scale` times as slow as in the plain one."""
    rates = dict.fromkeys(report.RATES, 100.0 / scale)
    latencies = {f"{name}_ms": stats(10.0 * scale) for name in ("ttft", "tpot", "itl", "held_back", "e2e")}
    return {
        "schema_version": document.SCHEMA_VERSION,
        "kind": "serve",
        "client_host": {"cpu": "x"},
        "config": {"seed": 0, "max_concurrency": None, "json": "a"} | config,
        "counts_tokens": True,
        "failure_details": {},
        "workload": {"requests": 4, "cut": 0, "reusable_tokens": 0, "failed_warmups": 0},
        "server": {"missing": "no metrics", "rows": []},
        "summary": {
            "completed": 4,
            "failed": 0,
            "failures": {},
            "short_answers": 0,
            "duration_s": 1.0,
            "prompt_tokens": 1000,
            "cached_tokens": 0,
            "output_tokens": 40,
            "offered_per_s": None,
            "peak_in_flight": 2,
            "tokens_per_event": 1.0,
            "lag_ms": stats(0.1),
            "goodput": None,
            **rates,
            **latencies,
        },
    }


def shown(show, *documents):
    text = io.StringIO()
    show(Console(file=text, width=200), *documents)
    return text.getvalue()


def test_ratios_are_above_one_where_it_got_better():
    found = {label: ratio for label, _, _, ratio in report.ratios(serve_document(0.5), serve_document(1.0))}
    assert found["requests/s"] == found["TTFT ms p99"] == found["E2E ms mean"] == pytest.approx(2.0)
    assert set(found.values()) == {2.0}
    assert len(found) == 3 + 5 * 5


def test_what_one_side_lacks_is_not_compared():
    old = serve_document()
    old["summary"]["tpot_ms"] = None
    assert not [label for label, *_ in report.ratios(serve_document(), old) if label.startswith("TPOT")]


def test_comparison_tells_what_differs():
    text = shown(report.compare, serve_document(seed=1, json="b"), serve_document(seed=0))
    assert "--seed differs: 0 then, 1 now" in text
    assert "--json" not in text


def test_what_others_said_is_no_markup():
    new, old = serve_document(base_url="http://[fd00::7]:8000"), serve_document(base_url="http://[fd00::8]:8000")
    assert "http://[fd00::8]:8000 then, http://[fd00::7]:8000 now" in shown(report.compare, new, old)
    new["server"]["missing"] = "no [/metrics]"
    new["verification"] = {"checked": 1, "differ": 1, "begun": 0, "unchecked": 0}
    new["verification"]["differences"] = [{"number": 0, "what": "'[/b]' and not '[b]'"}]
    text = shown(report.show_serve, new)
    assert "missing: no [/metrics]" in text
    assert "request 0: '[/b]' and not '[b]'" in text


def test_notes_warn_of_what_flatters_or_spoils():
    assert list(report.notes(serve_document())) == []
    doubtful = serve_document()
    doubtful["summary"] |= {"failures": {"timeout": 2}, "short_answers": 3, "cached_tokens": 500, "lag_ms": stats(80.0)}
    doubtful |= {"failure_details": {"timeout": "not complete"}, "counts_tokens": False}
    doubtful["workload"] |= {"cut": 5, "failed_warmups": 6, "reusable_tokens": 100}
    notes = "\n".join(report.notes(doubtful))
    for part in (
        "2 requests failed: timeout (not complete)",
        "5 requests were shortened",
        "6 warm-up requests failed",
        "3 answers are shorter",
        "no token ids",
        "400 prompt tokens were cached before",
        "80.0 ms after the due time",
    ):
        assert part in notes


def test_sharing_within_the_workload_is_no_warning():
    content = serve_document()
    content["summary"]["cached_tokens"] = content["workload"]["reusable_tokens"] = 500
    assert list(report.notes(content)) == []


def test_tables():
    content = serve_document()
    row = {
        "name": "prompt tokens",
        "metric": "prompt_tokens_total",
        "unit": "tokens",
        "server": 990.0,
        "client": 1000,
        "difference": 10.0,
    }
    content["server"] = {"missing": None, "rows": [row]}
    content["summary"]["goodput"] = {
        "limits_ms": {"ttft": 500.0},
        "met": 3,
        "requests_per_s": 75.0,
        "attainment": 0.75,
        "attainment_by_limit": {"ttft": 0.75},
    }
    text = shown(report.show_serve, content)
    for part in ("output tokens/s", "100.00", "TTFT", "ttft <= 500 ms", "75.0%", "990.00", "client lag"):
        assert part in text


@pytest.mark.parametrize(
    ("best", "missed", "words"),
    [
        (3.0, 3.5, "is kept up to 3 requests/s, missed at 3.5"),
        (None, 0.01, "is missed even at 0.01 requests/s"),
        (64.0, None, "is still kept at 64 requests/s, the greatest load that was allowed"),
    ],
)
def test_slo_answer(best, missed, words):
    content = {"config": {"search": "rate"}, "limits_ms": {"ttft": 500.0}, "best": best, "missed": missed}
    assert report.slo_answer(content) == f"ttft<=500ms {words}" + (" (--max-load)" if missed is None else "")


def test_secrets_stay_out_of_documents(tmp_path):
    command = ["penstock", "bench", "--api-key", "s3cret", "--api-key=s3cret", "--seed", "1"]
    content = document.build("serve", {"api_key": "s3cret", "request_rate": float("inf")}, {"x": 1}, command)
    path = tmp_path / "out.json"
    document.write(path, content)
    text = path.read_text()
    assert "s3cret" not in text
    read = json.loads(text)
    assert read["command"] == ["penstock", "bench", "--api-key", "***", "--api-key=***", "--seed", "1"]
    assert read["config"] == {"request_rate": "inf"}
    assert read["x"] == 1
    assert read["client_host"]["cores"] >= 1
    assert read["versions"].keys() >= {"python", "numpy"}
    assert document.read(path, "serve") == read


def test_documents_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "out.json"
    with pytest.raises(ConfigError, match=r"--compare: .* cannot be read"):
        document.read(path, "serve")
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        document.read(path, "serve")
    path.write_text('{"schema_version": 1, "kind": "slo"}')
    with pytest.raises(ConfigError, match="schema_version 1 of kind slo, allowed is 1 of serve"):
        document.read(path, "serve")


def test_an_unwritable_place_is_found_before_the_run(tmp_path):
    document.check_writable(None, "--json")
    document.check_writable(tmp_path / "new.json", "--json")
    for path in (tmp_path, tmp_path / "nowhere" / "out.json"):
        with pytest.raises(ConfigError, match=r"--json: .* cannot be written"):
            document.check_writable(path, "--json")


def test_plots_name_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--plot: matplotlib is not installed.*pip install matplotlib"):
        report.import_pyplot()
