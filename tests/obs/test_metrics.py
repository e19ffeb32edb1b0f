from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.wire.engine import EngineStats, TierStats
from penstock.obs.engine_metrics import TOTALS
from penstock.obs.exposition import Exposition
from penstock.obs.logs import RequestRecord
from penstock.obs.metrics import Compat, Metrics

NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "iteration_tokens_total_bucket"),
    *("request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket", "request_success_total"),
    *("request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket"),
    *("request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket"),
    *("goodput_requests_total", "slo_attainment_ratio"),
    *("engine_busy_seconds_total", "engine_idle_seconds_total"),
    *("kv_hit_tokens_total", "kv_bytes_moved_total"),
    *("masked_steps_total", "mask_seconds_total", "grammars_compiled_total", "grammar_compile_seconds_total"),
    "structured_requests_total",
}


def stats(steps: int = 1, **changes: int) -> EngineStats:
    values = {"running": 0, "waiting": 0, "used_blocks": 0, "num_blocks": 10, "preemptions": 0} | changes
    return EngineStats(**({"prefix_queries": 0, "prefix_hits": 0} | values), steps=steps)


def samples(metrics: Metrics, compat: Compat = "none") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = Exposition([metrics], compat).render()[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    if "route" not in labels:
        labels["model_name"] = "m"
    found = samples(metrics)
    by_engine = ("penstock:" + name, frozenset({"engine": "e", **labels}.items()))
    return found[by_engine] if by_engine in found else found["penstock:" + name, frozenset(labels.items())]


def test_every_name_is_there_from_the_start_with_the_model_as_label() -> None:
    found = {name for name, labels in samples(Metrics("m", ["e"])) if ("model_name", "m") in labels}
    assert {"penstock:" + name for name in NAMES} <= found


def test_two_registries_do_not_meet() -> None:
    first, second = Metrics("m", ["e"]), Metrics("m", ["e"])
    first.observe_first_token(0.1)
    assert value(second, "generation_tokens_total") == 0


def test_load_is_shown_as_it_is() -> None:
    metrics = Metrics("m", ["e"])
    metrics.observe_stats("e", stats(running=3, waiting=5, used_blocks=4), 0)
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 5
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.4)
    metrics.observe_stats("e", stats(steps=2), 0)
    assert value(metrics, "num_requests_running") == 0


@settings(max_examples=30)
@given(lives=st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1), min_size=1, max_size=4))
def test_totals_add_up_over_engine_restarts(lives: list[list[tuple[int, int]]]) -> None:
    metrics = Metrics("m", ["e"])
    for life in lives:
        queries = hits = 0
        metrics.observe_stats("e", stats(steps=0), 0)  # what a fresh engine says first
        for step, (more_queries, more_hits) in enumerate(life, 1):
            queries, hits = queries + more_queries, hits + more_hits
            totals = {"prefix_queries": queries, "prefix_hits": hits, "preemptions": step, "busy": step, "idle": hits}
            totals |= {"masked_steps": step, "masking": hits, "grammars": queries, "compiling": hits}
            metrics.observe_stats("e", stats(step, **totals), 1)
    assert value(metrics, "prefix_cache_queries_total") == sum(q for life in lives for q, _ in life)
    assert value(metrics, "prefix_cache_hits_total") == sum(h for life in lives for _, h in life)
    assert value(metrics, "engine_idle_seconds_total") == sum(h for life in lives for _, h in life)
    assert value(metrics, "engine_busy_seconds_total") == sum(len(life) for life in lives)
    assert value(metrics, "masked_steps_total") == sum(len(life) for life in lives)
    assert value(metrics, "grammars_compiled_total") == sum(q for life in lives for q, _ in life)
    for name in ("mask_seconds_total", "grammar_compile_seconds_total"):
        assert value(metrics, name) == sum(h for life in lives for _, h in life)
    assert value(metrics, "num_preemptions_total") == sum(len(life) for life in lives)


def test_hits_are_shown_by_tier_what_was_moved_by_way_and_drafts_by_what_became_of_them() -> None:
    metrics = Metrics("m", ["e"])
    failed = {"failed_loads": 2, "late_loads": 1, "failed_stores": 4}
    took = {"loads": 5, "expected": 0.5, "took": 0.75}
    disk = TierStats("disk", hit_tokens=192, stored_bytes=7000, loaded_bytes=3000, used_bytes=6000, **took, **failed)
    moved = {"prefix_loads": 256, "pulled_blocks": 12, "failed_pulls": 3}
    moved |= {"tiers": (TierStats("host", hit_tokens=64), disk)}
    drafted = {"drafts": 20, "draft_tokens": 90, "accepted_tokens": 40}
    metrics.observe_stats("e", stats(1, prefix_hits=640, **moved), 1)
    metrics.observe_stats("e", stats(2, prefix_hits=704, **moved, **drafted), 1)
    assert value(metrics, "kv_hit_tokens_total", tier="device") == 704 - 256
    assert value(metrics, "kv_hit_tokens_total", tier="host") == 64
    assert value(metrics, "kv_hit_tokens_total", tier="disk") == 192
    assert value(metrics, "kv_tier_bytes", tier="disk") == 6000
    assert value(metrics, "kv_load_seconds_total", tier="disk") == 0.75
    assert value(metrics, "kv_load_expected_seconds_total", tier="disk") == 0.5
    assert value(metrics, "kv_bytes_moved_total", **{"from": "device", "to": "disk"}) == 7000
    assert value(metrics, "kv_bytes_moved_total", **{"from": "disk", "to": "device"}) == 3000
    assert value(metrics, "kv_loads_total", tier="disk") == 5
    for reason, count in (("load", 2), ("late", 1), ("store", 4)):
        assert value(metrics, "kv_tier_failures_total", tier="disk", reason=reason) == count
    assert value(metrics, "kv_blocks_pulled_total") == 12
    assert value(metrics, "kv_pulls_failed_total") == 3
    assert value(metrics, "spec_decode_num_drafts_total") == 20
    assert value(metrics, "spec_decode_num_draft_tokens_total") == 90
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 40


@pytest.mark.parametrize("total", TOTALS)
def test_whichever_total_went_back_the_engine_started_again(total: str) -> None:
    """A new life has done as much of everything else by the time it is first heard."""
    metrics = Metrics("m", ["e"])
    before = stats(**dict.fromkeys(TOTALS, 5))
    metrics.observe_stats("e", before, 1)
    metrics.observe_stats("e", stats(**dict.fromkeys(TOTALS, 5) | {total: 1}), 1)
    assert value(metrics, "num_preemptions_total") == (6 if total == "preemptions" else 10)


def test_idle_reports_are_no_steps() -> None:
    metrics = Metrics("m", ["e"])
    metrics.observe_stats("e", stats(1), 100)
    metrics.observe_stats("e", stats(1), 0)
    assert value(metrics, "iteration_tokens_total_count") == 1
    assert value(metrics, "iteration_tokens_total_sum") == 100


def test_tokens_that_come_together_share_the_time() -> None:
    metrics = Metrics("m", ["e"])
    metrics.observe_first_token(0.2)
    metrics.observe_inter_token(0.06, 3)
    assert value(metrics, "generation_tokens_total") == 4
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.025") == 3
    assert value(metrics, "time_to_first_token_seconds_count") == 1


def test_request_times_and_how_it_ended() -> None:
    metrics = Metrics("m", ["e"])
    record = RequestRecord(
        request_id="a", model="m", prompt_tokens=7, finish_reason="length", e2e=3, queue=1, prefill=0.5, decode=1.5
    )
    metrics.observe_request(record)
    metrics.observe_request(RequestRecord(request_id="b", model="m", prompt_tokens=2, status=500))
    assert value(metrics, "prompt_tokens_total") == 9
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    assert value(metrics, "request_inference_time_seconds_sum") == 2
    assert value(metrics, "e2e_request_latency_seconds_count") == 1
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0


def ended(**how: Any) -> RequestRecord:
    return RequestRecord(**({"request_id": "a", "model": "m", "finish_reason": "stop"} | how))


def test_goodput_and_attainment_by_class() -> None:
    metrics = Metrics("m", ["e"])

    def shown(name: str) -> tuple[float, float]:
        online, offline = (value(metrics, name, **{"class": each}) for each in ("online", "offline"))
        return online, offline

    assert shown("goodput_requests_total") == (0, 0)
    assert all(math.isnan(ratio) for ratio in shown("slo_attainment_ratio"))
    metrics.observe_request(ended(service_class="offline"))
    metrics.observe_request(ended())  # without targets
    metrics.observe_request(ended(finish_reason="abort", status=499))
    assert shown("goodput_requests_total") == (1, 1)
    assert all(math.isnan(ratio) for ratio in shown("slo_attainment_ratio"))
    for met in (True, True, True, False):
        metrics.observe_request(ended(slo_met=met))
    metrics.observe_request(ended(finish_reason=None, status=500, slo_met=False))
    assert shown("goodput_requests_total") == (4, 1)
    assert shown("slo_attainment_ratio")[0] == 3 / 5


def test_attainment_is_of_the_last_thousand() -> None:
    metrics = Metrics("m", ["e"])
    for number in range(2500):
        metrics.observe_request(ended(slo_met=number >= 1900))
    assert value(metrics, "slo_attainment_ratio", **{"class": "online"}) == 0.6


def test_engines_are_told_apart_and_a_lost_one_has_no_load() -> None:
    metrics = Metrics("m", ["a", "b"])
    metrics.observe_stats("a", stats(running=3, used_blocks=4, prefix_queries=7), 5)
    metrics.observe_stats("b", stats(running=1), 0)
    assert value(metrics, "num_requests_running", engine="a") == 3
    assert value(metrics, "num_requests_running", engine="b") == 1
    assert value(metrics, "iteration_tokens_total_count", engine="b") == 0
    metrics.observe_loss("a")
    assert value(metrics, "num_requests_running", engine="a") == 0
    assert value(metrics, "kv_cache_usage_perc", engine="a") == 0
    metrics.observe_stats("a", stats(prefix_queries=2), 5)
    assert value(metrics, "prefix_cache_queries_total", engine="a") == 9


def test_incarnations_of_instances() -> None:
    metrics = Metrics("m", ["a", "b"])
    assert value(metrics, "instance_up", engine="a") == 0
    metrics.observe_up("a", True)
    metrics.observe_up("b", True)
    metrics.observe_loss("a")
    assert [value(metrics, "instance_up", engine=name) for name in "ab"] == [0, 1]
    metrics.observe_up("a", True)
    assert value(metrics, "instance_up", engine="a") == 1
    assert [value(metrics, "instance_lost_total", engine=name) for name in "ab"] == [1, 0]


def test_what_the_instances_cost_and_how_they_were_started() -> None:
    metrics = Metrics("m", ["e"])
    assert not [name for name, _ in samples(metrics) if name.startswith("penstock:instance_s")], "no master has said"
    metrics.observe_fleet(5.0, {"map": (1, 2.5)}, {})
    metrics.observe_fleet(7.5, {"map": (2, 4.0), "checkpoint": (1, 9.0)}, {"restart": 2})
    assert value(metrics, "instance_changes_total", what="restart") == 2
    assert value(metrics, "instance_seconds_total") == 7.5
    for path, count, seconds in (("map", 2, 4.0), ("checkpoint", 1, 9.0)):
        assert value(metrics, "instance_starts_total", path=path) == count
        assert value(metrics, "instance_start_seconds_total", path=path) == seconds


def test_what_an_ideal_cache_would_have_found() -> None:
    metrics = Metrics("m", ["e"])
    assert not [name for name, _ in samples(metrics) if "ideal" in name], "no master has said"
    metrics.observe_ideal(1000, 640, True)
    metrics.observe_ideal(2000, 704, False)
    assert value(metrics, "prefix_ideal_queries_total") == 2000
    assert value(metrics, "prefix_ideal_hits_total") == 704
    assert value(metrics, "prefix_ideal_is_lower_bound") == 1


def test_where_prompts_were_found_by_engine_and_in_all() -> None:
    metrics = Metrics("m", ["a", "b"])
    tiers = TierStats("host", hit_tokens=96), TierStats("disk", hit_tokens=32)
    said = stats(prefix_queries=1000, prefix_hits=640, prefix_loads=128, prefix_fetches=64, tiers=tiers)
    metrics.observe_stats("a", said, 0)
    metrics.observe_stats("a", stats(prefix_queries=100, prefix_hits=64), 0)  # it was restarted
    metrics.observe_stats("b", stats(prefix_queries=10), 0)
    found = {"device": 512, "host": 96, "disk": 32, "peer": 64}
    assert {tier: value(metrics, "kv_hit_tokens_total", engine="a", tier=tier) for tier in found} == found
    assert metrics.prefixes() == {"prompt_tokens": 1110, "found_tokens": found}


def test_series_of_engines_say_that_every_frontend_shows_the_same() -> None:
    metrics = Metrics("m", ["e"])
    metrics.observe_weights("e", "checkpoint", 2.0)
    metrics.observe_weights("e", "map", 0.5)
    metrics.observe_cache("e", 512, 16, 2048)
    assert value(metrics, "weights_load_seconds", engine="e", source="map") == 0.5
    families = list(text_string_to_metric_families(Exposition([metrics]).render()[0].decode()))
    assert sum(len(f.samples) for f in families if f.name == "penstock:weights_load_seconds") == 1, "of its last start"
    by_engine = {f.name for f in families if any("engine" in sample.labels for sample in f.samples)}
    assert "penstock:instance_up" in by_engine
    told = {f.name for f in families if "the same in every frontend" in f.documentation}
    assert {name for name in told if not name.endswith("_created")} == {
        name for name in by_engine if not name.endswith("_created")
    }


def test_decisions_and_hand_offs() -> None:
    metrics = Metrics("m", [])
    metrics.observe_routing("round-robin", "colocated")
    metrics.observe_routing("round-robin", "colocated")
    metrics.observe_handoff()
    metrics.observe_relocation("sequence")
    metrics.observe_recovery("fetch", 0.5, 0.25, 1.5)
    metrics.observe_recovery("recompute", 0.5, None, None)
    assert {how: value(metrics, "recoveries_total", how=how) for how in ("fetch", "recompute")} == {
        "fetch": 1,
        "recompute": 1,
    }
    for how, expected in {"fetch": (0.5, 0.25, 1.5), "recompute": (0.5, 0.5, 0.5)}.items():
        names = ("recovery_seconds_sum", "recovery_predicted_seconds_total", "recovery_recompute_seconds_total")
        assert tuple(value(metrics, name, how=how) for name in names) == expected
    assert value(metrics, "routing_decisions_total", policy="round-robin", reason="colocated") == 2
    assert value(metrics, "handoffs_total") == 1
    assert value(metrics, "relocations_total", reason="sequence") == 1


def test_predictions_may_be_too_early_and_too_late() -> None:
    metrics = Metrics("m", ["e"])
    for predicted in (0.2, 0.5, 0.5, 2.0):
        metrics.observe_prediction(predicted, 0.5)
    name = "predicted_minus_actual_ttft_seconds_bucket"
    assert [value(metrics, name, le=le) for le in ("-0.5", "-0.25", "0.0", "1.0", "+Inf")] == [0, 1, 3, 3, 4]


# what vLLM's own dashboards ask for
VLLM_NAMES = {
    *(f"{name}_bucket" for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds")),
    *("time_to_first_token_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_queue_time_seconds_sum"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_inference_time_seconds_count"),
    *("request_max_num_generation_tokens_sum", "request_params_n_count", "request_params_max_tokens_sum"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "iteration_tokens_total_count"),
    *("request_time_per_output_token_seconds_count", "request_prefill_kv_computed_tokens_sum"),
    *("prompt_tokens_cached_total", "num_requests_waiting_by_reason", "admission_rejections_total"),
    *("request_num_preemptions_bucket", "cache_config_info"),
}


def test_with_compat_everything_is_there_under_vllms_names_too() -> None:
    metrics = Metrics("m", ["e"])
    metrics.observe_first_token(0.2)
    metrics.observe_stats("e", stats(running=3, waiting=2), 5)
    metrics.observe_cache("e", 512, 16, 2048)
    metrics.observe_rejection()
    record = RequestRecord(request_id="a", model="m", prompt_tokens=7, preemptions=2, finish_reason="stop")
    metrics.observe_request(record)
    found = samples(metrics, "vllm")
    vllm = {(name.removeprefix("vllm:"), labels): v for (name, labels), v in found.items() if name.startswith("vllm:")}
    assert {name for name, _ in vllm} >= VLLM_NAMES
    assert all(("model_name", "m") in labels for _, labels in vllm)
    timestamps = {key for key in vllm if key[0].endswith("_created")}
    for (name, labels), number in vllm.items():
        by_reason = name == "num_requests_waiting_by_reason"
        assert (name, labels) in timestamps or by_reason or found["penstock:" + name, labels] == number
    engine = {"model_name": "m", "engine": "e"}
    assert vllm["num_requests_waiting_by_reason", frozenset((engine | {"reason": "capacity"}).items())] == 2
    cache = {"block_size": "16", "num_gpu_blocks": "512", "kv_cache_size_tokens": "8192"}
    assert vllm["cache_config_info", frozenset((engine | cache | {"kv_cache_max_concurrency": "4.0"}).items())] == 1
    assert vllm["admission_rejections_total", frozenset({"model_name": "m"}.items())] == 1
    assert vllm["request_num_preemptions_sum", frozenset({"model_name": "m"}.items())] == 2
    assert vllm["num_requests_running", frozenset({"model_name": "m", "engine": "e"}.items())] == 3
    assert not {name for name, _ in vllm} & {"instance_up", "handoffs_total", "http_requests_total"}  # vLLM has none


def test_without_compat_there_is_nothing_of_vllm() -> None:
    assert b"vllm" not in Exposition([Metrics("m", ["e"])]).render()[0].replace(b"vLLM", b"")


def test_sizes_of_requests() -> None:
    metrics = Metrics("m", ["e"])
    record = RequestRecord(
        request_id="a", model="m", prompt_tokens=70, cached_tokens=64, completion_tokens=30, longest_completion=20,
        n=2, max_tokens=25, finish_reason="stop",
    )  # fmt: skip
    metrics.observe_request(record)
    metrics.observe_request(RequestRecord(request_id="b", model="m", prompt_tokens=2, status=500))
    sums = {
        "request_prompt_tokens": 70, "request_generation_tokens": 30, "request_max_num_generation_tokens": 20,
        "request_params_n": 2, "request_params_max_tokens": 25, "request_prefill_kv_computed_tokens": 6,
    }  # fmt: skip
    for name, expected in sums.items():
        assert value(metrics, f"{name}_sum") == expected
        assert value(metrics, f"{name}_count") == 1
    assert value(metrics, "prompt_tokens_cached_total") == 64
