"""A tier below the device: what is loaded instead of computed, and what happens when that does not work."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import BLOCK_TOKENS
from penstock.kv.keys import extend_keys
from penstock.sched.local.offload import MOST_LOADS, Load, Question, Store
from penstock.sched.steptime import StepTime
from tests.sched.test_scheduler import TIMES, Engine, expected, make, request, run

PROMPT = [1] * 250  # three full blocks and a rest


def other(number: int, length: int = 250) -> list[int]:
    return [100 + number] * length


def small() -> Engine:
    return make(num_blocks=7, budget=400, sequences=4, model_len=440, slots=16)


def answer(engine: Engine, *prompts: tuple[str, list[int]]) -> None:
    """One token for each of these (name, prompt), one after another."""
    for name, prompt in prompts:
        engine.scheduler.add(request(name, prompt, 1))
        run(engine)


def evicted() -> Engine:
    """One that has computed PROMPT, and has evicted it since."""
    engine = small()
    answer(engine, ("first", PROMPT), ("a", other(1)), ("b", other(2)))
    return engine


def loads(engine: Engine) -> list[Load]:
    engine.send()
    return [order for order in engine.moves if isinstance(order, Load)]


def test_what_was_evicted_is_loaded_and_not_computed():
    engine = evicted()
    answer(engine, ("again", PROMPT))
    assert engine.computed["again"] == 250 - 3 * BLOCK_TOKENS
    assert engine.out["again"] == expected(PROMPT, 1)
    assert engine.scheduler.counters.prefix_loads == 3 * BLOCK_TOKENS
    assert engine.scheduler.counters.prefix_hits == 3 * BLOCK_TOKENS
    assert engine.scheduler.offload.lanes[0].loaded_blocks == 3


def test_every_full_block_is_copied_once():
    engine = make(num_blocks=7, budget=400, model_len=440, slots=16)
    for name in ("first", "second"):
        engine.scheduler.add(request(name, PROMPT, 10))
        run(engine)
    assert engine.scheduler.offload.lanes[0].stored_blocks == len(engine.scheduler.offload.lanes[0].tier.keys()) == 4


def test_what_nothing_below_goes_on_with_is_not_looked_for_block_by_block():
    engine, looked = small(), list[bytes]()
    (lane,) = engine.scheduler.offload.lanes
    slot = lane.tier.slot
    lane.tier.slot = lambda key: looked.append(key) or slot(key)
    engine.scheduler.add(request("first", PROMPT, 1))
    assert not looked
    run(engine)
    looked.clear()  # for the checks of it
    engine.scheduler.add(request("again", PROMPT, 1))
    assert not looked


@pytest.fixture
def waiting() -> Engine:
    """One in which "again" waits for PROMPT's blocks."""
    engine = evicted()
    engine.scheduler.add(request("again", PROMPT, 1))
    assert len(loads(engine)) == 1
    return engine


def test_a_load_is_a_state_of_the_request_and_stops_no_step(waiting: Engine):
    assert waiting.scheduler.num_waiting == 1
    assert waiting.scheduler.has_work
    waiting.scheduler.add(request("short", [7] * 20, 3))
    for _ in range(3):
        assert [s.request_id for s in waiting.step().sequences] == ["short"]
    assert waiting.out["short"] == expected([7] * 20, 3)
    run(waiting)
    assert waiting.computed["again"] == 250 - 3 * BLOCK_TOKENS


def test_what_cannot_be_loaded_is_computed(waiting: Engine):
    waiting.move(0, good=0.34)  # one of three
    run(waiting)
    assert waiting.out["again"] == expected(PROMPT, 1)
    assert waiting.computed["again"] == 250 - BLOCK_TOKENS
    # and what was found to be bad is copied anew
    assert len(waiting.scheduler.offload.lanes[0].tier.keys()) == 9


def test_who_waits_too_long_computes(waiting: Engine):
    number = loads(waiting)[0].number
    waiting.scheduler.give_up(number)
    assert waiting.step().sequences[0].request_id == "again"
    assert waiting.out["again"] == expected(PROMPT, 1)
    waiting.scheduler.give_up(number)  # who has gone is not there twice
    run(waiting)
    waiting.scheduler.check()


@pytest.mark.parametrize(("pays", "copied"), [(1.5, 0), (4.0, 4), (20.0, 4)])
def test_of_a_slow_tier_no_more_is_held_than_pays(pays: float, copied: int):
    """How many times as quick as computing a load is decides whether, and how many at once, blocks are copied."""
    each = TIMES.prefill_ms(1024, 0, budget=1024) / 1e3 / 16 / pays
    engine = make(num_blocks=7, budget=400, sequences=4, model_len=440, slots=16, block_seconds=each)
    engine.scheduler.add(request("first", PROMPT, 20))
    under_way = []
    while engine.has_work:
        if engine.begin():
            engine.end()
        under_way.append(sum(len(order.moves) for order in engine.moves if isinstance(order, Store)))
        if engine.moves:
            engine.move(0, seconds=each)
            engine.send()
    assert engine.scheduler.offload.lanes[0].stored_blocks == copied
    assert max(under_way) == (0 if not copied else max(1, int(pays / 8)))
    assert engine.out["first"] == expected(PROMPT, 20)
    engine.scheduler.check()


def test_while_a_load_is_late_nothing_is_moved_and_then_again(waiting: Engine):
    (late,) = loads(waiting)
    waiting.scheduler.give_up(late.number)
    moved = len(waiting.moves)
    for number in (1, 7):
        waiting.scheduler.add(request(f"{number}", other(number), 1))
        while f"{number}" not in waiting.out:
            waiting.begin()
            waiting.end()
    assert len(waiting.moves) == moved, "it may never end, and each would keep its blocks as long"
    assert waiting.scheduler.offload.lanes[0].late_loads == 1
    run(waiting)
    answer(waiting, *((f"again {number}", other(number)) for number in (8, 9, 1)))
    assert waiting.computed["again 1"] == 250 - 3 * BLOCK_TOKENS


def test_who_is_cancelled_leaves_no_block_behind(waiting: Engine):
    assert waiting.scheduler.cancel("again")
    assert not waiting.scheduler.has_work
    waiting.scheduler.check()
    assert waiting.scheduler.pool.used == 3
    waiting.scheduler.add(request("again", other(4), 1))  # the same name is another request
    run(waiting)
    assert waiting.out["again"] == expected(other(4), 1)
    assert waiting.scheduler.pool.used == 0


def test_where_computing_is_quicker_nothing_is_loaded():
    engine = evicted()
    engine.scheduler.predict_by(StepTime(replace(TIMES.device, host_bandwidth=1e8), TIMES.shape))
    answer(engine, ("again", PROMPT))
    assert engine.computed["again"] == 250
    assert engine.scheduler.offload.lanes[0].loaded_blocks == 0


def test_how_fast_loads_are_is_measured():
    engine = small()
    engine.scheduler.predict_by(TIMES)
    for turn in range(3):  # each of the three finds its blocks evicted by the others
        for name, prompt in (("p", PROMPT), ("a", other(1)), ("b", other(2))):
            engine.scheduler.add(request(f"{name}{turn}", prompt, 1))
            for load in loads(engine):
                engine.move(engine.moves.index(load), seconds=10.0)  # ten thousand times slower than it should be
            run(engine)
    assert engine.scheduler.offload.lanes[0].loaded_blocks == 3, "the next one was loaded, however slow that is"
    assert engine.computed["p2"] == 250
    assert engine.out["p2"] == expected(PROMPT, 1)


def test_nothing_is_loaded_for_whom_there_is_no_room():
    engine = evicted()
    engine.scheduler.add(request("large", other(3, 360), 70))
    engine.step()
    engine.scheduler.add(request("again", PROMPT, 1))
    assert not loads(engine)
    run(engine)
    assert engine.out["again"] == expected(PROMPT, 1)
    assert engine.scheduler.counters.prefix_loads == 3 * BLOCK_TOKENS, "it was asked again when there was room"


def test_a_victim_takes_nothing_that_is_still_being_copied():
    engine = make(num_blocks=4, budget=300, sequences=2, slots=8)
    engine.scheduler.add(request("low", [1] * 200, 30, priority=1))
    engine.step()
    assert [type(order) for order in engine.moves] == [Store]
    engine.scheduler.add(request("high", [2] * 100, 3, priority=0))
    run(engine)
    assert engine.out["low"] == expected([1] * 200, 30)
    assert engine.out["high"] == expected([2] * 100, 3)


def test_one_slow_load_is_not_held_against_the_tier_for_ever():
    engine = small()
    engine.scheduler.predict_by(TIMES)
    offload = engine.scheduler.offload
    for turn in range(40):
        for name, prompt in (("p", PROMPT), ("a", other(1)), ("b", other(2))):
            engine.scheduler.add(request(f"{name}{turn}", prompt, 1))
            for load in loads(engine):
                engine.move(engine.moves.index(load), seconds=1e-4 if offload.lanes[0].loaded_blocks else 1.0)
            run(engine)
    assert offload.lanes[0].loaded_blocks > 30


def test_a_small_load_that_was_slow_says_little_of_large_ones():
    engine = small()
    engine.scheduler.predict_by(TIMES)
    answer(engine, *((f"w{number}", other(number, 400 if number else 70)) for number in range(3)))
    engine.scheduler.add(request("one block", other(0, 70), 1))
    (load,) = loads(engine)
    engine.move(engine.moves.index(load), seconds=5e-3)  # thirty times what it should take
    run(engine)
    engine.scheduler.add(request("six", other(1, 400), 1))
    assert [len(load.moves) for load in loads(engine)] == [6]


def test_loads_of_later_arrivals_take_no_room_from_whoever_waits():
    engine = make(num_blocks=10, budget=700, sequences=8, model_len=640, slots=40)
    scheduler = engine.scheduler
    answer(engine, *((f"w{number}", other(number)) for number in (*range(6), 10, 11, 12)))
    scheduler.add(request("l0", other(0), 1))
    scheduler.add(request("head", [5] * 600, 1))
    for number in range(1, 50):  # a new one comes before the load of the last one is over
        scheduler.add(request(f"l{number}", other(number % 6), 1))
        engine.send()
        for order in [order for order in engine.moves if isinstance(order, Store)]:
            engine.move(engine.moves.index(order))
        if len(under_way := loads(engine)) > 1 or number > 5:
            for load in under_way[:1]:
                engine.move(engine.moves.index(load))
        if engine.begin():
            engine.end()
    assert "head" in engine.out


def test_a_load_leaves_those_that_run_room_to_grow():
    engine = make(num_blocks=8, budget=450, sequences=4, model_len=448, slots=40)
    scheduler = engine.scheduler
    answer(engine, ("w", other(1, 400)), ("f", other(2, 440)), ("f2", other(3, 440)))
    scheduler.add(request("online", [7] * 60, 20))
    engine.step()
    while engine.moves:
        engine.move(0)
    scheduler.add(request("offline", other(1, 400), 1, offline=True))
    assert not loads(engine), "it would take the last blocks"
    run(engine)
    assert scheduler.counters.preemptions == 0
    assert engine.out["offline"] == expected(other(1, 400), 1)


def test_nobody_is_preempted_whose_blocks_are_being_copied_when_anothers_are_enough():
    engine = make(num_blocks=8, budget=600, sequences=8, model_len=500, slots=40)
    scheduler = engine.scheduler
    for name in ("giving", "storing"):
        scheduler.add(request(name, [len(name)] * 170, 60, priority=2))
        engine.step()
        while name == "giving" and engine.moves:
            engine.move(0)
    assert [scheduler.sequence(name).storing for name in ("giving", "storing")] == [False, True]
    scheduler.add(request("high", [4] * 250, 5, priority=0))
    engine.step()
    assert scheduler.counters.preemptions == 1
    run(engine)


def test_what_others_hold_of_a_prefix_needs_no_room():
    engine = make(num_blocks=14, budget=1000, sequences=4, model_len=890, slots=60)
    common = [11] * 384  # six blocks
    answer(engine, ("first", common + [12] * 200), ("flush", [13] * 880))
    engine.scheduler.add(request("holder", common + [14] * 10, 60))
    while (waits := loads(engine)) or engine.moves:
        engine.move(engine.moves.index(waits[0]) if waits else 0)
    engine.step()
    while engine.moves:
        engine.move(0)
    engine.scheduler.add(request("again", common + [12] * 200, 1))
    assert [len(load.moves) for load in loads(engine)] == [3], "it needs four blocks, and seven are free"
    run(engine)
    assert engine.out["again"] == expected(common + [12] * 200, 1)


# --- several tiers


def two_tiers(block_seconds: float | None = None) -> Engine:
    """One that has computed PROMPT and evicted it: two of its three blocks are in the host memory, all are on disk."""
    engine = make(
        num_blocks=7, budget=400, sequences=4, model_len=440, slots=8, on_disk=40, block_seconds=block_seconds
    )
    answer(engine, ("first", PROMPT), ("a", other(1)), ("b", other(2)))
    host, disk = (lane.tier for lane in engine.scheduler.offload.lanes)
    keys = keys_of(PROMPT)
    assert [host.slot(key) is not None for key in keys] == [True, True, False]
    assert all(disk.slot(key) is not None for key in keys)
    return engine


def keys_of(prompt: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, b"", prompt, len(prompt) // BLOCK_TOKENS)
    return keys


def test_each_block_comes_from_the_quickest_tier_that_has_it_and_all_come_at_once():
    engine = two_tiers()
    engine.scheduler.add(request("again", PROMPT, 1))
    assert {load.tier: len(load.moves) for load in loads(engine)} == {"host": 2, "disk": 1}
    run(engine)
    assert engine.out["again"] == expected(PROMPT, 1)
    assert engine.computed["again"] == 250 - 3 * BLOCK_TOKENS
    assert [lane.hit_tokens for lane in engine.scheduler.offload.lanes] == [2 * BLOCK_TOKENS, BLOCK_TOKENS]
    assert engine.scheduler.counters.prefix_loads == 3 * BLOCK_TOKENS


def test_what_only_a_slow_tier_has_is_computed_behind_what_a_quick_one_has():
    engine = two_tiers(block_seconds=1e-5)
    engine.scheduler.offload.lane("disk")._measured = 1000.0, 1000.0
    engine.scheduler.add(request("again", PROMPT, 1))
    assert {load.tier: len(load.moves) for load in loads(engine)} == {"host": 2}
    run(engine)
    assert engine.computed["again"] == 250 - 2 * BLOCK_TOKENS
    assert engine.out["again"] == expected(PROMPT, 1)


def test_a_slow_tier_that_is_measured_to_be_quicker_comes_first():
    engine = two_tiers(block_seconds=1e-5)
    engine.scheduler.offload.lane("host")._measured = 1000.0, 0.1
    engine.scheduler.add(request("again", PROMPT, 1))
    assert {load.tier: len(load.moves) for load in loads(engine)} == {"disk": 3}
    run(engine)


def test_a_tier_that_is_late_is_not_waited_for_and_keeps_nobody_from_the_others():
    engine = two_tiers()
    scheduler, (host, disk) = engine.scheduler, engine.scheduler.offload.lanes
    scheduler.add(request("again", PROMPT, 1))
    by_tier = {load.tier: load for load in loads(engine)}
    scheduler.give_up(by_tier["disk"].number)
    assert scheduler.offload.waiting, "the other one may still come"
    engine.move(engine.moves.index(by_tier["host"]))
    assert not scheduler.offload.waiting
    while "again" not in engine.out:
        engine.begin()
        engine.end()
    assert engine.computed["again"] == 250 - 2 * BLOCK_TOKENS
    assert engine.out["again"] == expected(PROMPT, 1)
    assert (host.late_loads, disk.late_loads) == (0, 1)
    for number in (7, 8):  # nothing goes to the disk meanwhile, and all to the host's memory
        stored = host.stored_blocks
        scheduler.add(request(f"n{number}", other(number), 1))
        while f"n{number}" not in engine.out or host.storing:
            engine.begin()
            if engine.flying:
                engine.end()
            for move in [move for move in engine.moves if move.tier == "host"]:
                engine.move(engine.moves.index(move))
        assert host.stored_blocks >= stored + 3
        assert not disk.storing
    run(engine)
    scheduler.check()
    assert not disk.late


def test_what_one_tier_does_not_bring_another_one_does():
    engine = two_tiers()
    engine.scheduler.add(request("again", PROMPT, 1))
    by_tier = {load.tier: load for load in loads(engine)}
    engine.move(engine.moves.index(by_tier["disk"]))
    engine.move(engine.moves.index(by_tier["host"]), good=0.5)
    engine.begin()
    assert [(load.tier, len(load.moves)) for load in loads(engine)] == [("disk", 2)], "behind the first that came"
    run(engine)
    assert engine.computed["again"] == 250 - 3 * BLOCK_TOKENS
    assert engine.out["again"] == expected(PROMPT, 1)
    assert engine.scheduler.pool.used == 0


def test_where_the_middle_of_a_prefix_does_not_come_the_rest_is_computed():
    engine = two_tiers()
    engine.scheduler.add(request("again", PROMPT, 1))
    engine.scheduler.sequence("again").loads = MOST_LOADS
    by_tier = {load.tier: load for load in loads(engine)}
    engine.move(engine.moves.index(by_tier["disk"]))
    engine.move(engine.moves.index(by_tier["host"]), good=0.5)
    run(engine)
    assert engine.computed["again"] == 250 - BLOCK_TOKENS
    assert engine.out["again"] == expected(PROMPT, 1)
    assert engine.scheduler.pool.used == 0


def test_a_block_that_is_not_below_the_device_is_not_there_for_a_reason():
    engine = two_tiers()
    host, _ = engine.scheduler.offload.lanes
    assert host.refused[keys_of(PROMPT)[2]] == "evicted"
    engine.scheduler.add(request("c", other(3), 1))
    engine.step()
    engine.move(next(i for i, move in enumerate(engine.moves) if move.tier == "host"), good=0.0)
    assert host.refused[keys_of(other(3))[0]] == "failed"
    run(engine)
    key = next(filter(host.tier.has, engine.scheduler.pool.keys()))
    host.tier.spoil(key)
    with pytest.raises(AssertionError, match="nobody knows why"):
        host.check(engine.scheduler.pool.keys())
    host.refuse([key], "spoiled")
    host.check(engine.scheduler.pool.keys())


@given(
    placed=st.lists(st.sets(st.sampled_from(["device", "host", "disk"])), min_size=1, max_size=12),
    seconds=st.lists(st.floats(1e-6, 1e-2), min_size=2, max_size=2),
    under_way=st.lists(st.integers(0, 3), min_size=2, max_size=2),
)
def test_what_is_loaded_is_a_prefix_from_the_quickest_tiers_and_sooner_there_than_computed(placed, seconds, under_way):
    length = len(placed) * BLOCK_TOKENS + 10
    engine = make(num_blocks=40, budget=2000, sequences=4, slots=20, on_disk=20, block_seconds=1e-5)
    scheduler, prompt = engine.scheduler, other(1, length)
    keys, lanes = keys_of(prompt), scheduler.offload.lanes
    for lane, each, blocks in zip(lanes, seconds, under_way, strict=True):
        lane._measured = 1e6, 1e6 * each
        lane.loading = blocks
    device = next((i for i, tiers in enumerate(placed) if "device" not in tiers), len(placed))
    for i, key in enumerate(keys):
        if i < device:
            (block,) = scheduler.pool.allocate(1)
            scheduler.pool.publish(block, key, keys[i - 1] if i else scheduler.root)
            scheduler.offload.came([key])
        for lane in lanes:
            if lane.name in placed[i] and lane.claim(key, None, told=False) is not None:
                lane.tier.written(key, whole=True)
    scheduler.add(request("r", prompt, 1))
    orders = {load.tier: load for load in scheduler.offload.take_orders()}
    found = sorted(keys.index(move.key) for load in orders.values() for move in load.moves)
    assert found == list(range(device, device + len(found))), "what is there, and what comes, is a prefix"
    quickest = sorted(lanes, key=lambda lane: lane.seconds_each)
    used = [lane for lane in quickest if lane.name in orders]
    for lane in used:
        for move in orders[lane.name].moves:
            tiers = placed[keys.index(move.key)]
            assert lane is next(each for each in quickest if each.name in tiers)
    if not found:
        return

    def compute(start: int, end: int) -> float:
        tokens = (end - start) * BLOCK_TOKENS
        return TIMES.prefill_ms(tokens, start * BLOCK_TOKENS, budget=max(1, tokens)) / 1e3

    took = max(orders[lane.name].seconds for lane in used)
    assert took < compute(device, device + len(found))
    for lane in lanes:
        lane.loading -= under_way[lanes.index(lane)]
    scheduler.offload.check()


# --- a tier that others use too


def sharing(*, block_seconds: float | None = None, slots: int = 0) -> tuple[Engine, Engine]:
    """Two with one store, of which the first has put PROMPT there."""
    engines = [
        make(
            num_blocks=7, budget=400, sequences=4, model_len=440, slots=slots, shared=True, block_seconds=block_seconds
        )
        for _ in range(2)
    ]
    engines[1].store = engines[0].store
    answer(engines[0], ("first", PROMPT))
    return engines[0], engines[1]


def questions(engine: Engine) -> list[Question]:
    engine.send()
    return [order for order in engine.moves if isinstance(order, Question)]


def test_what_others_have_put_there_is_asked_for_and_loaded():
    _, engine = sharing()
    engine.scheduler.add(request("again", PROMPT, 1))
    (question,) = questions(engine)
    assert [move.key for move in question.moves] == keys_of(PROMPT)
    assert not loads(engine)
    engine.scheduler.add(request("short", [7] * 20, 3))
    for _ in range(3):
        assert [s.request_id for s in engine.step().sequences] == ["short"], "it waits, and blocks no step"
    run(engine)
    assert engine.computed["again"] == 250 - 3 * BLOCK_TOKENS
    assert engine.out["again"] == expected(PROMPT, 1)
    (lane,) = engine.scheduler.offload.lanes
    assert (lane.questions, lane.hit_tokens) == (1, 3 * BLOCK_TOKENS)


def test_what_a_nearer_tier_has_is_loaded_beside_the_question_for_the_rest():
    first, engine = sharing(slots=8)
    answer(engine, ("half", PROMPT[:130]), ("a", other(1, 400)))
    longer = PROMPT + [9] * 70
    answer(first, ("longer", longer))
    engine.scheduler.add(request("longer", longer, 1))
    (question,) = questions(engine)
    (load,) = loads(engine)
    assert (load.tier, len(load.moves)) == ("host", 2)
    assert [move.key for move in question.moves] == keys_of(longer)[2:4]
    run(engine)
    assert engine.computed["longer"] == len(longer) - 4 * BLOCK_TOKENS
    assert engine.out["longer"] == expected(longer, 1)


def test_who_waits_too_long_for_an_answer_computes_and_nothing_more_is_asked_until_it_is_there():
    _, engine = sharing()
    engine.scheduler.add(request("again", PROMPT, 1))
    (question,) = questions(engine)
    engine.scheduler.give_up(question.number)
    engine.step()
    assert engine.out["again"] == expected(PROMPT, 1)
    engine.scheduler.add(request("next", other(1), 1))
    assert questions(engine) == [question]
    (lane,) = engine.scheduler.offload.lanes
    assert lane.late_questions == 1
    engine.scheduler.check()
    run(engine)
    engine.scheduler.add(request("one more", other(2), 1))
    assert len(questions(engine)) == 1


def test_who_is_cancelled_while_it_waits_for_an_answer_leaves_nothing_behind():
    _, engine = sharing()
    engine.scheduler.add(request("again", PROMPT, 1))
    assert questions(engine)
    assert engine.scheduler.cancel("again")
    engine.scheduler.check()
    run(engine)
    assert engine.scheduler.offload.idle


def test_nothing_is_asked_where_loading_all_of_it_would_be_slower_than_computing():
    _, engine = sharing(block_seconds=1e-4)
    (lane,) = engine.scheduler.offload.lanes
    lane._measured, lane._answered = (1e3, 1e3), (1.0, 0.0, 1.0)  # an answer would cost nothing
    engine.scheduler.add(request("again", PROMPT, 1))
    assert not questions(engine)
    assert engine.step().sequences


def test_where_answers_take_long_and_never_bring_anything_few_are_asked_for():
    engine = make(num_blocks=7, budget=400, sequences=4, model_len=440, shared=True, block_seconds=1e-5)
    asked = []
    for number in range(60):
        engine.scheduler.add(request(f"r{number}", other(number), 1))
        for question in questions(engine):
            asked.append(number)
            engine.move(engine.moves.index(question), seconds=0.1)
        run(engine)
    assert 0 < len(asked) < 15
    assert asked[-1] > 20, "it is tried again now and then"
