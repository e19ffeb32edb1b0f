"""When a step is two micro-batches, and which: by schedules computed event by event, and by steps that are made up."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.parallel.micro_batches import (
    APART,
    ENOUGH,
    GAIN,
    Costs,
    MicroBatches,
    Part,
    best_split,
    cut,
    halves,
    makespan,
    units_apart,
)

times = st.floats(0, 100)


def simulated(layers, computing, exchanging):
    """One event after the other."""
    tasks = [(layer, lane) for layer in range(layers) for lane in range(2)]
    computed, exchanged = {}, {}
    now = wire = 0.0
    for layer, lane in tasks:
        now = max(now, exchanged.get((layer - 1, lane), 0.0)) + computing[lane] / layers
        computed[layer, lane] = now
        wire = max(wire, now) + exchanging[lane] / layers
        exchanged[layer, lane] = wire
    return wire


@given(st.integers(1, 60), st.tuples(times, times), st.tuples(times, times))
def test_layers_that_are_alike_need_not_be_gone_through(layers, computing, exchanging):
    assert makespan(layers, computing, exchanging) == pytest.approx(simulated(layers, computing, exchanging), rel=0.05)


def test_exchanges_of_a_third_of_a_layer_vanish_but_the_last():
    """The paper's table 7: 13.0 ms of computation and 9.3 ms of exchanges become 17.0 and 12.4 ms, of which it hides
    80 %; with nothing else on the way all but what a half of the last layer exchanges could be hidden."""
    two = makespan(61, (61 * 8.5, 61 * 8.5), (61 * 6.2, 61 * 6.2))
    assert two == pytest.approx(61 * 17.0 + 6.2)
    assert makespan(1, (8.5, 8.5), (6.2, 6.2)) == pytest.approx(17.0 + 6.2)


parts_of = st.lists(st.builds(Part, st.integers(1, 500), st.integers(1, 100_000)), min_size=1, max_size=30)
costs_of = st.builds(Costs, times, times, st.floats(0, 1), times, times)


@given(parts_of, costs_of, st.sampled_from([0.25, 0.5, 0.75]))
def test_a_cut_leaves_rows_on_both_sides_and_loses_none(parts, costs, share):
    rows = sum(part.rows for part in parts)
    if rows < 2:
        return
    at = cut(parts, costs, share)
    first, second = halves(parts, at)
    assert first.rows == at
    assert 0 < at < rows
    assert second.rows == rows - at
    assert first.kv + second.kv == sum(part.kv for part in parts)


def test_a_cut_is_by_time_and_not_by_rows():
    costs = Costs(0, 1, 0.01, 0, 0)
    assert cut([Part(1, 100)] * 8, costs, 0.5) == 4
    assert cut([Part(1, 1000), *[Part(1, 10)] * 8], costs, 0.5) == 1, "one with a long context first"
    assert cut([Part(100, 0)], costs, 0.25) == 25, "inside of a prompt"


def test_what_is_read_twice_has_to_be_won_back():
    prompt, decodes = [Part(2048, 2_000_000)], [Part(1, 2000)] * 16
    costs = Costs(batch=20e-3, row=100e-6, kv=1e-8, exchange=1e-3, exchanged_row=60e-6)
    rows, two, one = best_split(prompt, 58, costs)
    assert two < 0.75 * one
    assert 600 < rows < 1400
    _, two, one = best_split(decodes, 58, costs)
    assert two > 1.5 * one


def run(chooser, parts, costs, steps, slowed=1.0):
    """(splits, seconds) of steps whose two micro-batches take longer than they should by a factor."""
    splits, total = [], 0.0
    for _ in range(steps):
        split = chooser.choose(parts)
        whole = Part(sum(part.rows for part in parts), sum(part.kv for part in parts))
        if split:
            first, second = halves(parts, split)
            computing = costs.computing(first), costs.computing(second)
            exchanging = costs.exchanging(first.rows), costs.exchanging(second.rows)
            took = slowed * makespan(chooser.layers, computing, exchanging)
            chooser.ran(parts, split, took, max(0.0, took - sum(computing)), sum(exchanging))
        else:
            computing, exchanging = costs.computing(whole), costs.exchanging(whole.rows)
            took = computing + exchanging
            chooser.ran(parts, 0, took, exchanging, exchanging)
        splits.append(split)
        total += took
    return splits, total


def test_costs_are_learned_from_steps_of_all_kinds():
    costs = Costs(batch=10e-3, row=50e-6, kv=2e-8, exchange=1e-3, exchanged_row=40e-6)
    chooser, rng = MicroBatches(20), random.Random(1)
    for _ in range(60):
        run(chooser, [Part(rng.randint(1, 900), rng.randint(1000, 10**6))], costs, 1)
    assert chooser.costs == pytest.approx(costs, rel=0.05)


def test_it_pays_for_prompts_and_is_left_for_decodes():
    costs = Costs(batch=10e-3, row=50e-6, kv=2e-8, exchange=1e-3, exchanged_row=40e-6)
    chooser, rng = MicroBatches(20), random.Random(2)
    prompt, decodes = [Part(2000, 10**6)], [Part(1, 500)] * 8
    for _ in range(20):
        run(chooser, [Part(rng.randint(1, 900), rng.randint(1000, 10**6))], costs, 1)
    assert all(run(chooser, prompt, costs, 5)[0])
    assert not any(run(chooser, decodes, costs, 5)[0])


@pytest.mark.parametrize("slowed", [1.0, 1.5, 3.0])
def test_what_is_slower_than_predicted_is_left(slowed):
    """Whatever is predicted: over many steps it costs little more than steps that are all whole."""
    costs = Costs(batch=0, row=50e-6, kv=2e-8, exchange=0, exchanged_row=40e-6)
    parts = [Part(500, 10**5)] * 4
    splits, took = run(MicroBatches(20), parts, costs, 1000, slowed)
    whole = 1000 * (costs.computing(Part(2000, 4 * 10**5)) + costs.exchanging(2000))
    assert not any(splits[:ENOUGH])
    assert any(splits), "it was tried"
    if slowed == 1.0:
        assert all(splits[ENOUGH:])
        assert took < 0.7 * whole
    else:
        assert took < (1 + GAIN) * whole


def test_threads_are_set_apart_for_exchanges_where_that_costs_little():
    assert units_apart(8, computing=7.0, exchanging=1.0, sizes=(1,)) == 1
    assert units_apart(16, computing=15.5, exchanging=0.9, sizes=(1,)) == 1
    assert units_apart(16, computing=12.0, exchanging=0.01, sizes=(1,)) == 1
    assert units_apart(4, computing=4.0, exchanging=0.1, sizes=(1,)) == 0, "a quarter of what computes"
    assert units_apart(1, computing=1.0, exchanging=1.0, sizes=(1,)) == 0
    assert units_apart(8, computing=1.0, exchanging=0.0, sizes=(1,)) == 0


def test_so_are_multiprocessors_as_many_as_exchanges_may_be_kept_to():
    sizes = (4, 8, 16, 32)
    assert units_apart(132, computing=124.0, exchanging=8.0, sizes=sizes) == 8
    assert units_apart(132, computing=120.0, exchanging=12.0, sizes=sizes) == 16
    assert units_apart(132, computing=100.0, exchanging=0.5, sizes=sizes) == 4
    assert units_apart(132, computing=90.0, exchanging=42.0, sizes=sizes) == 0, "what exchanges is held up by 32"
    assert units_apart(4, computing=1.0, exchanging=1.0, sizes=sizes) == 0


@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0), st.integers(2, 132), st.sampled_from([(1,), (4, 8, 16, 32)]))
def test_units_are_set_apart_only_where_the_slower_of_both_takes_little_longer(computing, exchanging, units, sizes):
    apart = units_apart(units, computing, exchanging, sizes)
    assert apart in (0, *sizes)
    assert apart < units
    if apart:
        took = max(computing / (units - apart), exchanging / apart)
        assert took <= (1 + APART) * (computing + exchanging) / units
