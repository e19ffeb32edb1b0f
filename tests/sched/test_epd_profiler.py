"""Which stages of requests with images are together: the model of stages, the search, and what is made of it."""

from dataclasses import replace
from itertools import count as counted
from statistics import fmean

import pytest
from msgspec import structs

from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.cluster.base import ClusterView, Demand, InstanceLoad
from penstock.sched.cluster.epd_profiler import (
    EVERY,
    FEWEST,
    LINK,
    LOOK,
    PACE,
    WINDOW,
    EPDProfiler,
    layout_of,
    machine_of,
    moves,
    search,
)
from penstock.sched.cluster.media_stages import Layout, Machine, MediaRequest, Targets, attainment, layouts, most
from penstock.sched.steptime import DEVICES, GEOMETRIES, GRAIN, StepTime

TIMES = StepTime(DEVICES["ascend-910b"], GEOMETRIES["qwen2.5-vl-7b"])
BLIND = StepTime(DEVICES["ascend-910b"], GEOMETRIES["qwen2-7b"])
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
    made = moves(view(prefill=2, decode=4), Layout("E+P+D", 1, 3, 2))
    assert [(move.name, move.role) for move in made] == [("decode-0", "encode"), ("decode-1", "prefill")]
    assert not moves(view(prefill=2, decode=2, encoders=1), Layout("E+P+D", 1, 2, 2))
    assert layout_of(view(prefill=2, decode=2, encoders=1), None) == Layout("E+P+D", 1, 2, 2)
    assert layout_of(view(prefill=2, decode=2), "ED+P") == Layout("ED+P", 0, 2, 2)
    assert layout_of(view(any=3), None) == Layout("EPD", any=3)
    assert layout_of(view(any=3, decode=1), None) is None


NUMBERS = counted()


def tell(profiler: EPDProfiler, request: MediaRequest, targets: Targets | None = NARROW, at=None) -> None:
    """It has come and ended, or so far as it is at some time, where a token takes 10 ms."""
    key = "f", str(next(NUMBERS))
    demand = Demand(key=key, prompt_tokens=request.prompt, max_tokens=request.output if at is None else 10_000)
    if targets is not None:
        demand = structs.replace(demand, ttft=targets.ttft, tpot=targets.tpot)
    profiler.observe(request.at, demand, request.images, request.seen)
    profiler.began(request.at, key)
    over = request.at + 0.01 * (request.output - 1)
    if at is None or over <= at:
        profiler.ended(over, key, request.output)


def thought(profiler: EPDProfiler, now: float = EVERY, **roles: int):
    """What it comes to, and how often it was asked."""
    before = profiler.found
    for asked in range(100_000):
        if (made := profiler.decide(view(now=now, **roles))) or profiler.found is not before:
            return made, asked
    raise AssertionError("it thinks for ever")


def test_it_thinks_a_little_at_a_time_and_applies_what_is_worth_it():
    profiler = EPDProfiler(gain=0.05)
    for request in traffic(2, output=200):
        tell(profiler, request)
    assert not profiler.decide(view(now=0.9 * EVERY, prefill=1, decode=3))
    assert profiler._search is None, "what is long has not ended yet"
    made, asked = thought(profiler, prefill=1, decode=3)
    assert asked > 10, f"it is done after {asked} questions, each of {PACE} rounds"
    assert profiler.route == profiler.found.layout.route
    assert {move.role for move in made} <= {"any", "prefill"}, "most of the work is of prompts"
    assert made[0].reason == f"epd: {profiler.why}"
    assert f"{profiler.found.layout.title} carries " in profiler.why
    assert ", EP+D 1:3 " in profiler.why
    assert not profiler.decide(view(now=1.5 * EVERY, prefill=3, decode=1)), "it rests"
    assert profiler._search is None


def test_outputs_that_go_on_are_not_taken_for_short_ones():
    """Half of them have ten tokens; of the others, which take 10 s, most go on when it looks."""
    profiler = EPDProfiler()
    for request in traffic(count=200, apart=0.06):
        output = 10 if request.at % 0.12 < 0.06 else 1000
        tell(profiler, request._replace(output=output), at=12.0)
    known = list(profiler._known.values())
    ended = [k.tokens for k in known if k.tokens is not None]
    assert fmean(ended) < 250
    expected = profiler._traffic(12.0, known)
    assert fmean(request.output for request in expected) == pytest.approx(505, rel=0.1)
    for request, k in zip(expected, known, strict=True):
        assert request.output == k.tokens if k.tokens is not None else request.output > k.so_far(12.0, 0.01)


def test_what_has_failed_says_how_long_it_was_at_least():
    profiler = EPDProfiler()
    for request in traffic(output=50):
        tell(profiler, request)
    demand = Demand(key=("f", "failed"), prompt_tokens=700, max_tokens=60)
    profiler.observe(20.0, demand, [650], 0)
    profiler.began(21.0, demand.key)
    profiler.ended(21.995, demand.key, None)
    *_, last = profiler._traffic(1e6, list(profiler._known.values()))
    assert last.output == 60, "more than 100, and it may have so many at most"


@pytest.mark.parametrize(("images", "count"), [(0, FEWEST), (1, FEWEST - 1)])
def test_without_images_or_with_few_requests_it_says_nothing(images, count):
    profiler = EPDProfiler()
    for request in traffic(images, count=count):
        tell(profiler, request)
    assert not profiler.decide(view(now=EVERY, any=4))
    assert (profiler._search, profiler.choose(view(any=4)), profiler.why) == (None, None, "")


def test_without_targets_or_a_known_tower_it_says_nothing():
    text = structs.replace(view(EVERY, any=2), instances=[structs.replace(i, times=BLIND) for i in instances(any=2)])
    for targets, seen in ((None, view(EVERY, any=2)), (NARROW, text)):
        profiler = EPDProfiler("EP+D")
        for request in traffic():
            tell(profiler, request, targets)
        assert not profiler.decide(seen)
        assert (profiler._search, profiler.choose(seen)) == (None, "EP+D")


def test_a_machine_is_what_instances_say_of_themselves():
    plain = machine_of(view(any=2).instances, 650)
    assert (plain.times, plain.token_budget, plain.link) == (TIMES, TIGHT.token_budget, LINK)
    less, more = (TIMES.step_ms([(TIGHT.token_budget + tokens, 0)]) for tokens in (0, GRAIN))
    assert less < plain.limit_ms < more, "budgets are in whole grains"
    assert TIMES.encode_ms([650] * (plain.encode_budget // 650)) <= plain.limit_ms
    slow, fast = (structs.replace(i, encode_ms=0.2 * (1 + i.requests), fetch_ms=2.0) for i in instances(any=2))
    measured = machine_of([slow, fast], 650)
    assert measured.times.encode_ms([650]) == pytest.approx(0.3 * 650), "the median of what was measured"
    assert measured.link == pytest.approx(BLOCK_TOKENS * TIMES.shape.kv_bytes_per_token / 2e-3)
    assert machine_of([structs.replace(slow, times=BLIND)], 650) is None


@pytest.mark.slow
def test_another_mix_makes_it_change_its_mind():
    """Images that take most of the time have instances of their own, or go with prompts; without any they are given
    back."""
    profiler = EPDProfiler(gain=0.05)
    for request in traffic(2, output=200):
        tell(profiler, request)
    thought(profiler, prefill=1, decode=3)
    before = profiler.found.layout
    for request in traffic(0, output=400, count=WINDOW):
        tell(profiler, request)
    roles = {"prefill": before.prefill, "decode": before.decode}
    assert not profiler.decide(view(now=2 * EVERY, **roles)), "text alone is not worth a search"
    assert profiler._search is None
    made, _ = thought(profiler, 2 * EVERY + LOOK, prefill=1, decode=2, encoders=1)
    assert made
    assert profiler.found.layout.encode == 0


def test_it_leaves_what_is_nearly_as_good():
    profiler = EPDProfiler(gain=10.0)
    for request in traffic(2):
        tell(profiler, request)
    made, _ = thought(profiler, any=2)
    assert (made, profiler.route) == ((), None)
    assert profiler.found.factor > 0
