"""Step times against hand-computed ones, and what must hold of any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.sched.steptime import DEVICES, GEOMETRIES, GRAIN, DeviceModel, ModelShape, StepTime, read_shape

# 1 PFLOP/s and 1 TB/s: 1e12 flops and 1e9 bytes take a millisecond each
DEVICE = DeviceModel(peak_flops=1e15, bandwidth=1e12, memory=10**11, overhead_ms=0.25)
SHAPE = ModelShape(layers=10, hidden=1000, heads=10, kv_heads=2, head_dim=100, intermediate=3000, vocab=50_000)
TIMES = StepTime(DEVICE, SHAPE)
H200 = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])

prompts = st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 32768)), max_size=4)


def test_sizes_of_a_model():
    # per layer: q and o 1000 x 1000 each, k and v 1000 x 200 each, three matrices of 1000 x 3000
    assert SHAPE.layer_params == 10 * (2_000_000 + 400_000 + 9_000_000)
    assert SHAPE.head_params == 50_000_000
    assert SHAPE.weight_bytes == (114_000_000 + 2 * 50_000_000) * 2
    assert SHAPE.kv_bytes_per_token == 2 * 10 * 2 * 100 * 2


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("qwen3-0.6b", 0.6, 114688),
        ("qwen3-8b", 8.2, 147456),
        ("qwen3-32b", 32.8, 262144),
        ("llama-3.1-8b", 8.0, 131072),
    ],
)
def test_named_geometries_have_the_sizes_they_are_named_for(name, billions, kv_bytes):
    shape = GEOMETRIES[name]
    assert shape.weight_bytes / 2e9 == pytest.approx(billions, rel=0.02)
    assert shape.kv_bytes_per_token == kv_bytes


def test_a_decode_step_by_hand():
    parts = TIMES.parts(decodes=8, kv_tokens=40_000)
    assert parts["gemm"].compute_ms == pytest.approx(2 * 114e6 * 8 / 1e12)
    assert parts["gemm"].memory_ms == pytest.approx(0.228)
    assert parts["lm_head"].ms == pytest.approx(0.1)  # 100 MB
    assert parts["decode_attention"].ms == pytest.approx(8000 * 40_000 / 1e9)  # 0.32 ms of memory
    assert parts["prefill_attention"].ms == 0
    assert TIMES.step_ms(decodes=8, kv_tokens=40_000) == pytest.approx(0.25 + 0.228 + 0.1 + 0.32)


def test_a_prefill_step_by_hand():
    parts = TIMES.parts(prefills=[(4000, 1000), (2000, 0)], logit_rows=1)
    assert parts["gemm"].ms == pytest.approx(2 * 114e6 * 6000 / 1e12)  # 1.368 ms of arithmetic
    pairs = 4000 * (1000 + 2000) + 2000 * 1000
    assert parts["prefill_attention"].compute_ms == pytest.approx(4 * 10 * 10 * 100 * pairs / 1e12)
    assert parts["prefill_attention"].memory_ms == pytest.approx(8000 * 7000 / 1e9)
    assert parts["lm_head"].ms == pytest.approx(0.1)
    assert TIMES.step_ms([(4000, 1000), (2000, 0)], logit_rows=1) == pytest.approx(0.25 + 1.368 + 0.56 + 0.1)


def test_factors_scale_their_parts():
    slow = StepTime(DEVICE, SHAPE, {"gemm": 2.0})
    assert slow.step_ms(decodes=8, kv_tokens=40_000) == pytest.approx(0.25 + 2 * 0.228 + 0.1 + 0.32)


def test_nothing_costs_the_overhead():
    assert TIMES.step_ms() == 0.25


@given(prompts, st.integers(0, 256), st.integers(0, 10**6), st.integers(1, 5000))
def test_more_work_never_takes_less_time(prefills, decodes, kv_tokens, more):
    base = H200.step_ms(prefills, decodes, kv_tokens)
    assert H200.step_ms(prefills, decodes + more, kv_tokens) >= base
    assert H200.step_ms(prefills, decodes, kv_tokens + more) >= base
    assert H200.step_ms([*prefills, (more, 0)], decodes, kv_tokens) >= base
    for i, (new, cached) in enumerate(prefills):
        for longer in ((new + more, cached), (new, cached + more)):
            assert H200.step_ms([*prefills[:i], longer, *prefills[i + 1 :]], decodes, kv_tokens) >= base


@given(st.integers(0, 8192), st.integers(0, 8192))
def test_a_prompt_in_chunks_takes_no_less_than_at_once(first, second):
    whole = H200.step_ms([(first + second, 0)])
    assert H200.step_ms([(first, 0)]) + H200.step_ms([(second, first)]) >= whole * (1 - 1e-12)


@given(st.floats(0.1, 500), st.integers(1, 300), st.integers(300, 20_000))
def test_the_largest_prefill_is_the_largest(limit, low, high):
    best = H200.largest_prefill(limit, low, high)
    assert low <= best <= high
    if best > low:
        assert best % GRAIN == 0
        assert H200.step_ms([(best, 0)]) <= limit
    following = best // GRAIN * GRAIN + GRAIN
    assert following > high or H200.step_ms([(following, 0)]) > limit


def test_a_shape_is_read_from_config_json():
    config = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 300,
    }
    assert read_shape(config) == ModelShape(
        layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=128, vocab=300
    )
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size is None"):
        read_shape({})
