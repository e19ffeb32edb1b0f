"""Several seeds as one row, and fewer of them again."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.sim.seeds import at_rate, of_seeds, rows_of, searched, seeds_of

FIGURES = st.one_of(st.none(), st.floats(0.1, 100.0))
SEARCHES = st.dictionaries(st.integers(0, 9), st.fixed_dictionaries({"rate": FIGURES, "kept": FIGURES}), min_size=1)
RATED = st.dictionaries(st.integers(0, 9), st.fixed_dictionaries({"attainment": FIGURES, "ttft": FIGURES}), min_size=1)


def test_a_search_is_the_seed_in_the_middle():
    rows = {0: {"rate": 7.0, "ttft": 1}, 1: {"rate": 5.0, "ttft": 2}, 2: {"rate": 6.0, "ttft": 3}}
    found = searched(rows, "rate")
    assert (found["seed"], found["rate"], found["ttft"], found["spread"]) == (2, 6.0, 3, [5.0, 7.0])
    assert searched(rows | {1: {"rate": None, "ttft": 2}}, "rate")["spread"] is None


def test_a_rate_is_medians():
    rows = {0: {"attainment": 0.9, "ttft": None}, 1: {"attainment": 0.5, "ttft": 4}, 2: {"attainment": 0.8, "ttft": 2}}
    found = at_rate(20.0, rows)
    assert (found["rate"], found["attainment"], found["ttft"], found["spread"]) == (20.0, 0.8, 3, [0.5, 0.9])


@given(SEARCHES, st.data())
def test_fewer_seeds_are_as_if_there_had_been_no_others(rows, data):
    kept = data.draw(st.sets(st.sampled_from(sorted(rows)), min_size=1))
    policy = searched(rows, "rate") | {"probes": []}
    assert seeds_of(policy) == set(rows)
    assert rows_of(policy) == rows
    alone = searched({seed: row for seed, row in rows.items() if seed in kept}, "rate") | {"probes": []}
    assert of_seeds(policy, kept, "rate") == alone


@given(RATED, RATED, st.data())
def test_so_they_are_at_given_rates(first, second, data):
    policy = {"rates": [at_rate(10.0, first) | {"tasks_over_time": {}}, at_rate(20.0, second)]}
    both = seeds_of(policy)
    assert both == first.keys() & second.keys()
    if both:
        kept = data.draw(st.sets(st.sampled_from(sorted(both)), min_size=1))
        fewer = of_seeds(policy, kept, "rate")["rates"]
        assert [rows_of(entry).keys() for entry in fewer] == [kept, kept]
        assert fewer[1] == at_rate(20.0, {seed: row for seed, row in second.items() if seed in kept})
        assert fewer[0]["tasks_over_time"] == {}
