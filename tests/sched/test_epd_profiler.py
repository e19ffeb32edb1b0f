"""Which stages of requests with images are together: the model of stages, the search, and what is made of it."""

from dataclasses import replace
from math import inf

import pytest
from msgspec.structs import replace as changed

from penstock.sched.cluster.base import ClusterView, Demand, InstanceLoad
from penstock.sched.cluster.epd_profiler import (
    EVERY,
    FEWEST,
    LINK,
    PACE,
    EPDProfiler,
    layout_of,
    machine_of,
    moves,
    search,
    targets_of,
)
from penstock.sched.cluster.media_stages import Layout, Machine, MediaRequest, Targets, attainment, layouts, most
from penstock.sched.steptime import DEVICES, GEOMETRIES, StepTime

TIMES = StepTime(DEVICES["ascend-910b"], GEOMETRIES["qwen2.5-vl-7b"])
TARGETS = Targets(ttft=1.0, tpot=0.05)
MACHINE = Machine(times=TIMES, token_budget=1024, encode_budget=1300)

NARROW = Targets(ttft=1.0, tpot=0.02)
TIGHT = replace(MACHINE, token_budget=497, encode_budget=1300)  # whose steps keep that
COARSE = replace(TIGHT, by_stage=False)
TOGETHER, APART = Layout("EPD", any=4), Layout("EP+D", prefill=3, decode=1)


def traffic(images: int = 1, tokens: int = 650, output: int = 60, count: int = FEWEST, apart: float = 0.1):
    """At ten requests per second, with prompts of two lengths, so that no two that follow each other are alike."""
    return [MediaRequest(i * apart, 60 + 200 * (i % 3 == 0), (tokens,) * images, output) for i in range(count)]


def ended(work):
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def carried(layout, requests, machine=MACHINE, targets=TARGETS):
    return ended(search(machine, requests, targets, [layout])).factor


def alone(*images: int, output: int) -> list[MediaRequest]:
    """Two, long after each other."""
    return [MediaRequest(at, 100, images, output) for at in (0.0, 1e4)]


def test_a_request_alone_takes_what_its_steps_take():
    """By hand, to the last millisecond: targets just above are kept, and just below are missed."""
    request = alone(650, 650, output=3)
    encode, prefill = TIMES.encode_ms([650, 650]) + TIMES.step_ms((), 0), TIMES.step_ms([(1024, 0)])
    rest = TIMES.step_ms([(1400 - 1024, 1024)])
    first = (encode + prefill + rest) / 1e3
    for ttft, kept in ((first * 1.001, 1.0), (first * 0.999, 0.0)):
        assert ended(attainment(MACHINE, Layout("EPD", any=1), request, 1.0, Targets(ttft, 1.0))) == kept
    token = TIMES.step_ms((), 1, 1401) / 1e3
    for tpot, kept in ((token * 1.01, 1.0), (token * 0.99, 0.0)):
        assert ended(attainment(MACHINE, Layout("EPD", any=1), request, 1.0, Targets(2 * first, tpot))) == kept


def test_embeddings_and_kv_take_their_way():
    request = alone(650, output=2)
    slow = replace(MACHINE, link=1e8, latency=0.01)
    seen = 650 * TIMES.shape.vision.token_bytes / 1e8 + 0.01
    first = (TIMES.encode_ms([650]) + TIMES.step_ms((), 0) + TIMES.step_ms([(750, 0)])) / 1e3
    layout = Layout("E+P+D", 1, 1, 1)
    for ttft, kept in (((first + seen) * 1.001, 1.0), ((first + seen) * 0.999, 0.0)):
        assert ended(attainment(slow, layout, request, 1.0, Targets(ttft, 9.0))) == kept
    kv = 64 * TIMES.shape.kv_bytes_per_token / 1e8 + 0.01
    token = TIMES.step_ms((), 1, 751) / 1e3
    for tpot, kept in (((kv + token) * 1.01, 1.0), (kv, 0.0)):
        assert ended(attainment(slow, layout, request, 1.0, Targets(9.0, tpot))) == kept


def test_every_layout_of_some_instances():
    found = layouts(4)
    assert len(set(found)) == len(found) == 1 + 3 + 3 + 3
    assert all(sum(layout[1:]) == 4 for layout in found)
    assert [layout.title for layout in layouts(2)] == ["EPD 2", "EP+D 1:1", "ED+P 1:1"]


@pytest.mark.parametrize("layout", layouts(3), ids=lambda layout: layout.title)
def test_no_layout_carries_more_than_its_roles_have_time_for(layout):
    requests = traffic(2)
    bound = most(MACHINE, layout, requests, TARGETS)
    assert 0.3 * bound < carried(layout, requests) <= bound


@pytest.mark.slow
def test_stages_as_such_and_apart_are_worth_it_under_a_tight_target_and_not_under_a_loose_one():
    """The shape of the paper's figure 22, and where disaggregation loses."""
    requests = traffic(2, output=200)
    whole, plain = carried(TOGETHER, requests, TIGHT, NARROW), carried(TOGETHER, requests, COARSE, NARROW)
    assert carried(APART, requests, TIGHT, NARROW) > 1.05 * whole > 1.4 * plain
    loose = replace(MACHINE, token_budget=5120, encode_budget=13000), Targets(2.0, 0.2)
    assert carried(TOGETHER, requests, *loose) > 1.05 * carried(APART, requests, *loose)


SLOW = [pytest.param(3, *case, marks=pytest.mark.slow) for case in ((1, 10), (4, 10), (1, 200))]


@pytest.mark.parametrize(("count", "images", "output"), [(2, 1, 10), *SLOW])
def test_the_search_finds_what_trying_all_finds(count, images, output):
    requests = traffic(images, output=output)
    each = {layout: carried(layout, requests) for layout in layouts(count)}
    found = ended(search(MACHINE, requests, TARGETS, layouts(count)))
    assert each[found.layout] >= 0.95 * max(each.values())
    assert found.factor == pytest.approx(each[found.layout], rel=0.05)
    assert found.tried.keys() == each.keys()


def instances(**roles: int) -> list[InstanceLoad]:
    return [
        InstanceLoad(name=f"{role}-{i}", role=role, times=TIMES, requests=i, token_budget=TIGHT.token_budget)
        for role, count in roles.items()
        for i in range(count)
    ]


def view(now: float = 0.0, encoders: int = 0, **roles: int) -> ClusterView:
    return ClusterView(now=now, instances=instances(**roles), encoders=instances(encode=encoders))


def test_the_fewest_moves_make_a_layout():
    made = moves(view(prefill=2, decode=4), Layout("E+P+D", 1, 3, 2), "why")
    assert [(move.name, move.role) for move in made] == [("decode-0", "encode"), ("decode-1", "prefill")]
    assert not moves(view(prefill=2, decode=2, encoders=1), Layout("E+P+D", 1, 2, 2), "why")
    assert layout_of(view(prefill=2, decode=2, encoders=1), None) == Layout("E+P+D", 1, 2, 2)
    assert layout_of(view(prefill=2, decode=2), "ED+P") == Layout("ED+P", 0, 2, 2)
    assert layout_of(view(any=3), None) == Layout("EPD", any=3)
    assert layout_of(view(any=3, decode=1), None) is None


def tell(profiler: EPDProfiler, request: MediaRequest, targets: Targets = NARROW) -> None:
    tokens, limits = {"prompt_tokens": request.prompt, "max_tokens": request.output}, targets._asdict()
    demand = Demand(key=("f", "r"), **tokens, ttft=limits["ttft"], tpot=limits["tpot"])
    profiler.observe(request.at, demand, request.images, request.seen)


def thought(profiler: EPDProfiler, **roles: int):
    """What it comes to, and how often it was asked."""
    for asked in range(100_000):
        if (made := profiler.decide(view(now=1.0, **roles))) or profiler.found:
            return made, asked
    raise AssertionError("it thinks for ever")


def test_it_thinks_a_little_at_a_time_and_applies_what_is_worth_it():
    profiler = EPDProfiler(gain=0.05)
    for request in traffic(2, output=200):
        tell(profiler, request)
    made, asked = thought(profiler, any=4)
    assert asked > 10, f"it is done after {asked} questions, each of {PACE} rounds"
    assert profiler.route == profiler.found.layout.route != "EPD"
    assert len(made) == 4, "all were of any role"
    assert {move.reason for move in made} == {profiler.why}
    assert profiler.why.startswith(f"epd: {profiler.found.layout.title} carries ")
    assert ", EPD 4 " in profiler.why
    assert "with 2 images to look at each" in profiler.why
    assert not profiler.decide(view(now=1.0 + EVERY / 2, any=4)), "it rests"


@pytest.mark.parametrize(("images", "count"), [(0, FEWEST), (1, FEWEST - 1)])
def test_without_images_or_with_few_requests_it_says_nothing(images, count):
    profiler = EPDProfiler()
    for request in traffic(images, count=count):
        tell(profiler, request)
    assert not profiler.decide(view(any=4))
    assert (profiler._search, profiler.choose(view(any=4), None)) == (None, None)
    assert profiler.choose(view(any=4), "ED+P") == "ED+P", "as it was set"


def test_it_leaves_what_is_nearly_as_good():
    profiler = EPDProfiler(gain=10.0)
    for request in traffic(2):
        tell(profiler, request)
    made, _ = thought(profiler, any=2)
    assert (made, profiler.route) == ((), None)
    assert profiler.found.factor > 0


def test_what_was_applied_for_images_is_undone_when_they_stop():
    profiler = EPDProfiler(gain=0.05)
    for request in traffic(2, output=200):
        tell(profiler, request)
    thought(profiler, any=4)
    loose = Targets(5.0, 0.5)  # with which apart does not pay
    for request in traffic(0, count=4 * FEWEST):
        tell(profiler, request, loose)
    later = view(now=2.0 + EVERY, prefill=1, encoders=2, decode=1)
    for _ in range(100_000):
        if made := profiler.decide(later):
            break
    assert "encode" not in {move.role for move in made}
    assert any(move.name.startswith("encode") for move in made)
    assert "with 0 images" in profiler.why


def test_it_looks_again_where_an_instance_went_meanwhile():
    profiler = EPDProfiler(gain=0.05)
    for request in traffic(2, output=200):
        tell(profiler, request)
    assert not profiler.decide(view(now=1.0, any=4))
    while profiler._search is not None:
        assert not profiler.decide(view(now=1.0, any=3)), "nothing is applied to what is no longer there"
    assert (profiler.route, profiler.found) == (None, None)


@pytest.mark.parametrize("silent", ["no targets", "no tower"])
def test_where_nothing_can_be_told_it_says_nothing(silent):
    profiler = EPDProfiler()
    for request in traffic(2):
        tell(profiler, request, Targets(inf, inf) if silent == "no targets" else NARROW)
    blind = [InstanceLoad(name=str(i), times=StepTime(TIMES.device, GEOMETRIES["qwen2-7b"])) for i in range(2)]
    seen = view(any=2) if silent == "no targets" else ClusterView(now=0.0, instances=blind)
    assert not profiler.decide(seen)
    assert profiler._search is None


def test_instances_are_taken_for_what_they_measured():
    plain = instances(any=3)
    believed = machine_of(plain)
    assert (believed.token_budget, believed.link) == (TIGHT.token_budget, LINK)
    assert believed.times.encode_ms([512]) == pytest.approx(TIMES.encode_ms([512]))
    limit = TIMES.step_ms([(TIGHT.token_budget, 0)])
    assert believed.encode_budget == 512 or TIMES.encode_ms([512] * (believed.encode_budget // 512)) <= limit
    each = TIMES.encode_ms([512]) / 512
    measured = [changed(i, encode_ms=3 * each, fetch_ms=0.5) for i in plain]
    machine = machine_of([*measured, changed(plain[0], name="new", token_budget=512)])
    assert machine.times.encode_ms([512]) == pytest.approx(3 * TIMES.encode_ms([512]))
    assert machine.link == pytest.approx(TIMES.shape.block_bytes / 0.5e-3)
    assert machine.encode_budget <= believed.encode_budget
    again = [changed(i, times=machine.times) for i in measured]
    assert machine_of(again).times.encode_ms([512]) == pytest.approx(3 * TIMES.encode_ms([512])), "not twice"


def test_targets_are_those_of_most_requests():
    assert targets_of([(1.0, 0.1), (2.0, inf), (9.0, 0.2), (inf, inf)]) == Targets(2.0, 0.1)
    assert targets_of([(inf, 0.1)]) == Targets(inf, 0.1)
    assert targets_of([(inf, inf)]) is None
    assert targets_of([]) is None
