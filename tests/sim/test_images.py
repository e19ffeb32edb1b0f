"""Simulated requests with images: what looking at them takes, and when it is saved."""

from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime
from penstock.sim.traffic import IMAGE, media_of, prompt_of
from penstock.workload.requests import WorkImage
from tests.sim.scenarios import read, run, work

SHAPE = GEOMETRIES["qwen2.5-vl-7b"]
TIMES = StepTime(DEVICES["h100"], SHAPE)
SCENARIO = """
workload:
  synthetic: {requests: 2, rate: 1, images: 1}
slo: {ttft-ms: 1000, tpot-ms: 50}
engine: {device: modelled:h100, geometry: GEOMETRY, noise: 0}
instances: [{count: 1}]
"""


def seen(number: int, at: float, *images: tuple[int, int]):
    pictures = tuple(WorkImage(*image) for image in images)
    text = work(number, at=at, prompt=100 + sum(tokens for _, tokens in images), output=5)
    return replace(text, images=pictures)


def first_tokens(geometry: str, *requests) -> list[float]:
    _, cluster = run(read(SCENARIO.replace("GEOMETRY", geometry)), trace=list(requests))
    return [record.ttft for record in cluster.records]


def test_a_tower_of_known_size():
    tower = SHAPE.vision
    assert tower.weight_bytes / 2e6 == pytest.approx(676, rel=0.01), "Qwen2.5-VL-7B's has 676 million parameters"
    # a token is four patches; four of 32 layers see the whole image
    one, two = tower.flops(1000), tower.flops(2000)
    full = 4.0 * 1280 * 4 * 4000**2
    assert two - 2 * one == pytest.approx(2 * full)
    assert TIMES.encode_ms([]) == 0.0
    assert TIMES.encode_ms([1]) == pytest.approx(tower.weight_bytes / 3.35e12 * 1e3), "bound by its weights"
    assert TIMES.encode_ms([1000, 1000]) == pytest.approx(2 * one / 989e12 * 1e3)


def test_looking_beside_a_step_takes_what_the_device_is_busy_with():
    decodes = {"decodes": 64, "kv_tokens": 64 * 1000}
    alone, seen_ms = TIMES.step_ms(**decodes), TIMES.encode_ms([650])
    beside = TIMES.beside_ms([650], **decodes)
    assert alone < beside < alone + seen_ms, "decoding is bound by memory, looking by arithmetic"
    assert TIMES.beside_ms([], **decodes) == pytest.approx(alone)
    prefill = TIMES.step_ms([(8000, 0)])
    assert TIMES.beside_ms([650], [(8000, 0)]) > prefill + 0.7 * seen_ms, "both are bound by arithmetic"
    most = TIMES.largest_encode(20.0, 650, 64)
    assert TIMES.encode_ms([650] * most) <= 20.0 < TIMES.encode_ms([650] * (most + 1))


def test_images_are_the_end_of_a_prompt():
    request = seen(7, 0.0, (1, 30), (2, 20))
    prompt = prompt_of(request)
    assert len(prompt) == 150
    assert [i for i, token in enumerate(prompt) if token == IMAGE] == list(range(100, 150))
    assert [(span.start, span.length) for span in media_of(request)] == [(100, 30), (130, 20)]


def test_an_image_is_looked_at_once_as_long_as_it_is_kept():
    new, again = seen(0, 0.0, (1, 1300)), seen(1, 5.0, (1, 1300))
    other = seen(1, 5.0, (2, 1300))
    text = first_tokens("qwen2-7b", new, other)
    first, second = first_tokens("qwen2.5-vl-7b", new, other)
    encode = TIMES.encode_ms([1300]) / 1e3
    assert first - text[0] == pytest.approx(encode)
    assert second - text[1] == pytest.approx(encode)
    step = TIMES.device.overhead_ms / 1e3  # of that which looks at it
    assert first_tokens("qwen2.5-vl-7b", new, again)[1] == pytest.approx(text[1] - step)


def test_prompts_with_other_images_share_no_blocks_behind_them():
    # the same text: only the images tell them apart
    block = 2 * BLOCK_TOKENS
    same = replace(seen(0, 0.0, (1, 650)), prefix=(3,), block_tokens=block, prompt_tokens=block + 650)
    for image, cached in ((1, True), (2, False)):
        other = replace(same, number=1, at=5.0, images=(WorkImage(image, 650),))
        _, cluster = run(read(SCENARIO.replace("GEOMETRY", "qwen2.5-vl-7b")), trace=[same, other])
        assert (cluster.records[1].cached_tokens > block) == cached


def test_repeats_are_asked_for_in_a_scenario():
    text = SCENARIO.replace("GEOMETRY", "qwen2.5-vl-7b").replace("requests: 2", "requests: 60")
    scenario = read(text)
    looked = {}
    for share in (0.0, 0.9):
        _, cluster = run(changed(scenario, workload=changed(scenario.workload, image_repeats=share)))
        (place,) = cluster.places.values()
        looked[share] = place.instance.tower.looked
    assert 0 < looked[0.9] < 0.4 * looked[0.0]


APART = """
workload:
  synthetic: {requests: 60, rate: 10, prompt: 100, output: 20, images: 1.5}
slo: {ttft-ms: 2000, tpot-ms: 100}
engine: {device: modelled:h100, geometry: qwen2.5-vl-7b, noise: 0.05}
instances: [{count: 3}]
layouts:
  ep-d: [{role: prefill, count: 2}, {role: decode}]
  ed-p: [{role: prefill, count: 2}, {role: decode, encodes: true}]
  e-p-d: [{role: encode}, {role: prefill}, {role: decode}]
"""


@pytest.mark.parametrize(
    ("layout", "where"), [("", "engine"), ("@ep-d", ""), ("@ed-p", "decode"), ("@e-p-d", "encode")]
)
def test_images_are_looked_at_where_the_route_has_it(layout, where):
    """By the real master, over the wires that engines use; each once, as no image comes again."""
    result, cluster = run(read(APART), f"least_loaded{layout}")  # which runs every check
    assert (result["failed"], result["requests"]) == (0, 60)
    images = sum(len(media_of(request)) for request in cluster._requests)
    for_others, own = dict[str, int](), dict[str, int]()
    for name, place in cluster.places.items():
        tower = place.instance.tower
        for_others[name], own[name] = tower.for_others, tower.looked - tower.for_others
    if where in ("decode", "encode"):
        assert for_others[f"{where}-0"] == images == sum(for_others.values())
        assert not any(own.values())
        sent = cluster.places[f"{where}-0"].instance.handoffs.counts()["given_embeddings"]
        assert sent == images
    else:
        assert not any(for_others.values())
        assert sum(own.values()) == images
        assert all(name.startswith(where or "prefill") for name, count in own.items() if count)


def test_an_encoder_that_dies_is_missed_by_nobody():
    failure = "failures: [{instance: encode-0, at: 2.0, restart-after: 1.0}]\n"
    text = APART.replace("instances: [{count: 3}]", "instances: [{role: encode}, {role: prefill}, {role: decode}]")
    result, cluster = run(read(text, failure))
    assert result["failed"] == 0
    assert all(record.received == record.output_tokens for record in cluster.records)


def test_an_embedding_travels_as_long_as_its_bytes_take():
    slow = "transport: {kind: copy, gbps: 1}\n"
    text = APART.replace("instances: [{count: 3}]", "instances: [{role: encode}, {role: prefill}, {role: decode}]")
    trace = [seen(0, 0.0, (1, 1300))]
    took = [
        run(read(text.replace("noise: 0.05", "noise: 0"), more), trace=trace)[1].records[0].ttft for more in ("", slow)
    ]
    sent = 1300 * SHAPE.vision.token_bytes
    assert took[1] - took[0] == pytest.approx(sent * 8 * (1 / 1e9 - 1 / 400e9), rel=0.05)


@pytest.mark.slow
def test_the_profiler_decides_roles_and_route_in_a_simulation():
    """Most instances decode, outputs are short, and images are many: what it finds is applied while requests run."""
    text = """
workload:
  synthetic: {requests: 1000, rate: 20, prompt: 100, output: 8, images: 2}
slo: {ttft-ms: 2000, tpot-ms: 100}
engine: {device: modelled:h100, geometry: qwen2.5-vl-7b, noise: 0.05}
instances: [{role: prefill}, {role: decode, count: 3}]
"""
    result, cluster = run(read(text), "epd")
    assert (result["failed"], result["requests"]) == (0, 1000)
    reasons = {change.reason for _, change in cluster.changes}
    assert reasons
    assert all(" of the latest traffic, EP+D 1:3 " in reason for reason in reasons)
    assert all(record.received == record.output_tokens for record in cluster.records)
