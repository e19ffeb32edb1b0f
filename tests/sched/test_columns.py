"""What policies keep of a thousand instances from one decision to the next."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.cluster.columns import Column, Costs, Instances, Places, QueueColumns, ViewQueue, least
from tests.helpers.policies import demand, instance

COUNT = 5
change = st.tuples(st.integers(0, COUNT - 1), st.integers(0, 9))


@given(st.lists(st.tuples(st.lists(change, max_size=4), st.booleans(), st.booleans()), max_size=12))
def test_a_column_is_what_it_would_be_anew(rounds):
    loads = [instance(f"i{place}") for place in range(COUNT)]
    history, asked, seen = [], [], []
    column = Column(lambda load: asked.append(load) or load.requests, int)
    for changes, forget, look_back in rounds:
        for place, requests in changes:
            loads[place] = instance(f"i{place}", requests=requests)
            history.append(place)
        if forget:
            history = []
        seen.append(Instances(loads, history))
        for instances in (seen[0], seen[-1]) if look_back else (seen[-1],):
            assert column.of(instances).tolist() == [load.requests for load in instances]
    instances = Instances(loads, history)
    column.of(instances)
    asked.clear()
    column.of(instances)
    assert not asked, "nothing has changed"
    loads[2] = instance("i2", requests=7)
    history.append(2)
    assert column.of(Instances(loads, history))[2] == 7
    assert asked == [loads[2]]


def test_other_instances_leave_a_column_as_it_was():
    loads, asked = [instance(f"i{place}", requests=place) for place in range(COUNT)], []
    column = Column(lambda load: asked.append(load) or load.requests)
    column.of(Instances(loads, history := []))
    assert column.of(loads[1:3]).tolist() == [1, 2]
    asked.clear()
    assert column.of(Instances(loads, history)).tolist() == [0, 1, 2, 3, 4]
    assert not asked


def test_places_are_found_once_while_names_stay():
    loads, history, places = [instance("a"), instance("b")], [], Places()
    known = places.of(Instances(loads, history))
    assert known == {"a": 0, "b": 1}
    assert places.of(loads[1:]) == {"b": 0}
    assert places.of(Instances(loads, history)) is known
    assert places.of(Instances(loads[::-1], [])) == {"b": 0, "a": 1}


@given(st.lists(st.lists(st.integers(-1, 9), max_size=6), max_size=12), st.booleans())
def test_columns_of_a_line_are_what_they_would_be_anew(rounds, look_back):
    waiting, history, seen, numbers = [], [], [ViewQueue([], [])], count()
    columns = QueueColumns(lambda d: d.prompt_tokens, lambda d: d.deadline)
    for changes in rounds:
        for change in changes:
            if change < 0:
                history = []
            elif change < len(waiting):
                del waiting[change]
                history.append(change)
            else:
                number = next(numbers)
                waiting.append(demand(f"r{number}", number + 1, ttft=number / 2))
                history.append(waiting[-1])
        seen.append(ViewQueue(waiting, history))
        for line in (seen[-2], seen[-1]) if look_back else (seen[-1],):
            assert columns.of(line).T.tolist() == [[d.prompt_tokens, d.deadline] for d in line]
            assert columns.of(list(line)).tolist() == columns.of(line).tolist()


def test_only_who_has_come_is_looked_at():
    asked = []
    columns = QueueColumns(lambda d: asked.append(d.key[1]) or 1.0)
    waiting = [demand(f"r{number}") for number in range(200)]
    columns.of(ViewQueue(waiting, history := []))
    del waiting[7], asked[:]
    waiting.append(demand("new"))
    history += [7, waiting[-1]]
    assert columns.of(ViewQueue(waiting, history)).shape == (1, 200)
    assert asked == ["new"]


def test_costs_are_those_of_the_candidates_by_name():
    costs = Costs([instance("a"), instance("b")], np.array([2.0, 1.0]), chosen=1)
    assert (costs["a"], costs["b"], len(costs)) == (2.0, 1.0, 2)
    assert dict(costs) == {"a": 2.0, "b": 1.0} == dict(costs.items())
    assert list(costs) == ["a", "b"]
    assert least(costs) == min(costs.values()) == least(dict(costs)) == 1.0
    assert all(type(cost) is float for cost in (*costs.values(), costs["b"]))
    with pytest.raises(KeyError):
        costs["c"]
