"""Service levels: in the body, in headers, as a tier."""

import pytest

from penstock.api.chat import ChatBody
from penstock.api.schema import parse, service_level
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.service_level import ServiceLevel


def level(headers=None, **fields):
    import json

    body, _ = parse(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), ChatBody)
    return service_level(body, headers or {})


def test_without_a_word_there_is_no_target():
    assert level() == ServiceLevel()


def test_the_body_goes_before_headers_target_by_target():
    headers = {"x-llm-d-slo-ttft-ms": "500", "x-llm-d-slo-tpot-ms": "40"}
    assert level(headers) == ServiceLevel(ttft_ms=500.0, tpot_ms=40.0)
    assert level(headers, slo={"ttft_ms": 300}) == ServiceLevel(ttft_ms=300.0, tpot_ms=40.0)


def test_a_tier_is_a_class_and_a_cache_key_an_affinity():
    assert level(service_tier="flex", priority=2) == ServiceLevel(offline=True, priority=2)
    assert level(service_tier="default", prompt_cache_key="chat-7") == ServiceLevel(chat="chat-7")
    assert level(service_tier="priority") == ServiceLevel(priority=-1)
    assert level(service_tier="priority", priority=3) == ServiceLevel(priority=3)


@pytest.mark.parametrize(
    ("headers", "fields", "says"),
    [
        ({}, {"slo": {"ttft_ms": 0}}, "slo.ttft_ms: 0.0, allowed is a number of milliseconds above 0"),
        ({}, {"slo": {"ttft": 5}}, "slo.ttft: 5, allowed is ttft_ms and tpot_ms"),
        ({}, {"slo": {"ttft_ms": "5"}}, "slo.ttft_ms: '5', allowed is a number"),
        ({"x-llm-d-slo-tpot-ms": "fast"}, {}, "x-llm-d-slo-tpot-ms: 'fast', allowed is a number of milliseconds"),
        ({"x-llm-d-slo-tpot-ms": "inf"}, {}, "x-llm-d-slo-tpot-ms: 'inf', allowed is"),
        ({}, {"service_tier": "flex", "slo": {"ttft_ms": 5}}, "slo: given, allowed only without service_tier 'flex'"),
    ],
)
def test_mistakes_are_named(headers, fields, says):
    with pytest.raises(InvalidRequest) as error:
        level(headers, **fields)
    assert str(error.value).startswith(says)


def test_a_tier_that_is_not_served_is_refused():
    with pytest.raises(UnsupportedField, match=r"service_tier: .fast. is not supported, allowed are auto, de"):
        level(service_tier="fast")
