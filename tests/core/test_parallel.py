"""How ranks share a model: each has its own part, together they have all, and what cannot be is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.parallel import Divisible, Layout, Place

SIZES = st.integers(1, 4)
MODEL = {"layers": 6, "heads": 8, "kv_heads": 2, "intermediate": 24}


@given(SIZES, SIZES, SIZES, st.integers(0, 9))
def test_every_rank_has_a_place_of_its_own_and_stages_have_all_layers_in_order(tensor, pipeline, data, more):
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data)
    places = [layout.place(rank) for rank in range(layout.size)]
    assert sorted(places) == places
    assert len(set(places)) == layout.size == tensor * pipeline * data
    assert [layout.rank(place) for place in places] == list(range(layout.size))
    assert max(places) == Place(data - 1, pipeline - 1, tensor - 1)
    stages = [layout.layers(stage, pipeline + more) for stage in range(pipeline)]
    assert [layer for stage in stages for layer in stage] == list(range(pipeline + more))
    assert len(stages[0]) - 1 <= min(map(len, stages)) == len(stages[-1])


def test_layouts_are_named_as_papers_do():
    assert str(Layout(tensor=4)) == "4TP"
    assert str(Layout(data=8, experts=True)) == "1TP8DPEP"
    assert str(Layout(tensor=2, pipeline=2)) == "2TP2PP"


@pytest.mark.parametrize(
    ("layout", "model", "says"),
    [
        ({"tensor": 3}, {}, "tensor-parallel-size: 3, allowed is what divides the model's num_attention_heads, 8"),
        ({"tensor": 8}, {"intermediate": 12}, "tensor-parallel-size: 8, allowed is what divides the model's interm"),
        ({"tensor": 2}, {"kv_heads": 3}, "tensor-parallel-size: 2, allowed is a divisor or a multiple of the model's"),
        ({"pipeline": 7}, {}, "pipeline-parallel-size: 7, allowed is at most the model's num_hidden_layers, 6"),
        ({"experts": True}, {}, "enable-expert-parallel: the model has no experts, allowed is false"),
        (
            {"tensor": 2, "data": 4, "experts": True},
            {"experts": 6},
            "enable-expert-parallel: 2TP4DPEP spreads them over 8, allowed is at most as many ranks as the model has",
        ),
    ],
)
def test_what_a_model_cannot_be_divided_into_is_refused_by_name(layout, model, says):
    with pytest.raises(ConfigError) as refused:
        Layout(**layout).check(Divisible(**(MODEL | model)))
    assert str(refused.value).startswith(says)
    assert says.startswith(refused.value.field)


def test_sizes_have_bounds():
    for sizes, field in (
        ({"tensor": 0}, "tensor-parallel-size"),
        ({"pipeline": 65}, "pipeline-parallel-size"),
        ({"tensor": 8, "pipeline": 16}, "pipeline-parallel-size"),
        ({"tensor": 8, "data": 16}, "data-parallel-size"),
    ):
        with pytest.raises(ConfigError, match="allowed") as refused:
            Layout(**sizes)
        assert refused.value.field == field
    Layout(tensor=2, pipeline=2, data=2, experts=True).check(Divisible(**MODEL, experts=8))
    Layout(tensor=4).check(Divisible(**MODEL))


def test_only_what_sums_are_parts_of_rounds_otherwise():
    alone, two, whole = Layout(), Layout(tensor=2), Layout(tensor=2, experts=True)
    assert len({alone.rounding, two.rounding, whole.rounding}) == 3
    assert Layout(pipeline=2, data=3, experts=True).rounding == alone.rounding
    assert Layout(tensor=2, pipeline=2, data=2, experts=True).rounding == whole.rounding
