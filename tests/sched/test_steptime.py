"""Step times against hand-computed ones, and what must hold of any."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.device import Experts, Latents
from penstock.core.errors import ConfigError
from penstock.sched.collectives import all_to_alls_ms
from penstock.sched.local.limits import fitting_blocks
from penstock.sched.steptime import DEVICES, GEOMETRIES, GRAIN, DeviceModel, ModelShape, StepTime, read_shape

# 1 PFLOP/s and 1 TB/s: 1e12 flops and 1e9 bytes take a millisecond each
DEVICE = DeviceModel(peak_flops=1e15, bandwidth=1e12, memory=10**11, overhead_ms=0.25)
SHAPE = ModelShape(layers=10, hidden=1000, heads=10, kv_heads=2, head_dim=100, intermediate=3000, vocab=50_000)
# 1000 values, 8 experts of 500 in 8 of 10 layers, of which a token has 2, besides a shared one
EXPERTS = Experts(count=8, per_token=2, intermediate=500, shared_intermediate=500, dense_layers=2)
SPARSE = replace(SHAPE, experts=EXPERTS)
LATENT = replace(SHAPE, latents=Latents(kv_rank=64, rope_dim=16, nope_dim=100, value_dim=80, q_rank=200))
TIMES = StepTime(DEVICE, SHAPE)
H200 = StepTime(DEVICES["h200"], GEOMETRIES["llama-3.1-8b"])

prompts = st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 32768)), max_size=4)


def test_sizes_of_a_model():
    # per layer: q and o 1000 x 1000 each, k and v 1000 x 200 each, three matrices of 1000 x 3000
    assert SHAPE.layer_params == 10 * (2_000_000 + 400_000 + 9_000_000)
    assert SHAPE.head_params == 50_000_000
    assert SHAPE.weight_bytes == (114_000_000 + 2 * 50_000_000) * 2
    assert SHAPE.kv_bytes_per_token == 2 * 10 * 2 * 100 * 2


def test_kv_in_8_bits_is_read_and_held_for_half_the_bytes():
    shape = SHAPE.storing("int8")
    assert shape.kv_bytes_per_token == 2 * 10 * 2 * (100 + 4)
    assert (SHAPE.storing("auto"), shape.weight_bytes) == (SHAPE, SHAPE.weight_bytes)
    whole, half = (StepTime(TIMES.device, s).parts(decodes=8, kv_tokens=40_000) for s in (SHAPE, shape))
    assert half["decode_attention"].memory_ms == pytest.approx(whole["decode_attention"].memory_ms * 104 / 200)
    assert half["gemm"] == whole["gemm"]
    assert StepTime(TIMES.device, shape).load_ms(64) < 0.53 * TIMES.load_ms(64)
    assert fitting_blocks(TIMES.device, shape) > 1.9 * fitting_blocks(TIMES.device, SHAPE) > 0


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("qwen3-0.6b", 0.6, 114688),
        ("qwen3-8b", 8.2, 147456),
        ("qwen3-32b", 32.8, 262144),
        ("llama-3.1-8b", 8.0, 131072),
        ("qwen-7b", 7.7, 524288),
        ("qwen2-7b", 7.6, 57344),
        ("qwen2.5-32b", 32.8, 262144),
        ("llama-2-70b", 69.0, 327680),
        ("mixtral-8x7b", 46.7, 131072),
        ("qwen3-30b-a3b", 30.5, 98304),
        ("qwen3-235b-a22b", 235.1, 192512),
        ("deepseek-v3", 671.0, 70272),  # without its head for multi-token prediction
    ],
)
def test_named_geometries_have_the_sizes_they_are_named_for(name, billions, kv_bytes):
    shape = GEOMETRIES[name]
    assert replace(shape, layer_bits=None).weight_bytes / 2e9 == pytest.approx(billions, rel=0.02)
    assert shape.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)]
)
def test_a_token_is_computed_by_as_many_parameters_as_is_said_of_named_mixtures(name, billions):
    shape = GEOMETRIES[name]
    assert (shape.active_params + 2 * shape.head_params) / 1e9 == pytest.approx(billions, rel=0.04)


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


def test_each_bound_of_a_part_has_its_own_factor():
    slow = StepTime(DEVICE, SHAPE, {"gemm:memory": 2.0, "gemm": 3.0, "overhead": 4.0, "unheard-of": 5.0})
    assert slow.step_ms(decodes=8, kv_tokens=40_000) == pytest.approx(1.0 + 2 * 0.228 + 0.1 + 0.32)
    # 6000 tokens: 1.368 ms of arithmetic, three times; attention is 8000 * 6000**2 / 2 flops
    assert slow.step_ms([(6000, 0)]) == pytest.approx(1.0 + 3 * 1.368 + 0.1 + 4 * 10 * 10 * 100 * 18e6 / 1e12)


def test_several_devices_share_a_step_and_sum_up_over_their_links():
    pair = DEVICE.parallel(2)
    assert pair.memory == 2 * DEVICE.memory
    parts = StepTime(pair, SHAPE).parts(decodes=8, kv_tokens=40_000)
    assert parts["gemm"].ms == pytest.approx(0.228 / 2)
    # two a layer, of 8 rows of 1000 values of 2 bytes, over 32 GB/s; and 10 us each
    assert parts["collectives"].ms == pytest.approx(20 * (8 * 1000 * 2 / 32e9 * 1e3 + 0.01))
    whole = sum(part.ms for part in parts.values())
    assert StepTime(pair, SHAPE).step_ms(decodes=8, kv_tokens=40_000) == pytest.approx(0.25 + whole)
    half = StepTime(pair, SHAPE, {"collectives": 0.5}).step_ms(decodes=8, kv_tokens=40_000)
    assert half == pytest.approx(0.25 + whole - parts["collectives"].ms / 2)
    assert StepTime(pair, SHAPE).step_ms() == 0.25


def test_a_slowed_device_takes_so_many_times_as_long():
    device = DEVICES["h100"].parallel(4)
    prefills = [(700, 300)]
    slowed = StepTime(device.slowed(2.5), GEOMETRIES["qwen3-8b"]).step_ms(prefills, 9, 70_000)
    assert slowed == pytest.approx(2.5 * StepTime(device, GEOMETRIES["qwen3-8b"]).step_ms(prefills, 9, 70_000))


def test_utilisation_by_hand():
    compute, memory = TIMES.utilisation(decodes=8, kv_tokens=40_000)
    total = 0.25 + 0.228 + 0.1 + 0.32
    assert memory == pytest.approx((total - 0.25) / total)
    assert compute == pytest.approx((2 * 164e6 * 8 + 4 * 10 * 10 * 100 * 40_000) / 1e12 / total)
    assert TIMES.utilisation() == (0, 0)
    compute, memory = TIMES.utilisation([(8000, 0)])
    assert compute > 0.8 > memory


def test_an_engine_can_tell_what_its_device_is():
    device = DEVICES["h200"].parallel(2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(device), type=DeviceModel) == device
    for shape in (GEOMETRIES["qwen3-0.6b"], GEOMETRIES["deepseek-v3"]):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(shape), type=ModelShape) == shape


GROUPS = StepTime(DEVICES["h20"].parallel(2, data=8, experts=True), GEOMETRIES["deepseek-v3"], imbalance=1.3)


@given(st.sampled_from([H200, GROUPS]), prompts, st.integers(0, 256), st.integers(0, 10**6), st.integers(1, 5000))
def test_more_work_never_takes_less_time(times, prefills, decodes, kv_tokens, more):
    base = times.step_ms(prefills, decodes, kv_tokens)
    assert times.step_ms(prefills, decodes + more, kv_tokens) >= base
    assert times.step_ms(prefills, decodes, kv_tokens + more) >= base
    assert times.step_ms([*prefills, (more, 0)], decodes, kv_tokens) >= base
    for i, (new, cached) in enumerate(prefills):
        for longer in ((new + more, cached), (new, cached + more)):
            assert times.step_ms([*prefills[:i], longer, *prefills[i + 1 :]], decodes, kv_tokens) >= base


@given(st.integers(0, 8192), st.integers(0, 8192))
def test_a_prompt_in_chunks_takes_no_less_than_at_once(first, second):
    whole = H200.step_ms([(first + second, 0)])
    assert H200.step_ms([(first, 0)]) + H200.step_ms([(second, first)]) >= whole * (1 - 1e-12)


# devices on which attention over little is bound by memory and over much by arithmetic, besides real ones
times = st.builds(
    StepTime,
    st.sampled_from(
        [
            *(*DEVICES.values(), DEVICE, DEVICES["a100"].parallel(4)),
            DEVICES["h20"].parallel(2, pipeline=2, data=8, experts=True),
        ]
    )
    | st.builds(DeviceModel, peak_flops=st.floats(1e10, 1e15), bandwidth=st.floats(1e9, 1e13), memory=st.just(1)),
    st.sampled_from([*GEOMETRIES.values(), SHAPE, LATENT]),
    st.dictionaries(
        st.sampled_from(["overhead", "gemm", "gemm:memory", "prefill_attention:compute", "prefill_attention:memory"]),
        st.floats(0.2, 10),
    ),
)


@given(
    times,
    st.integers(0, 40_000),
    st.integers(0, 100_000),
    st.integers(1, 9000),
    st.integers(0, 256),
    st.integers(0, 10**6),
)
@example(StepTime(DeviceModel(peak_flops=3.66e11, bandwidth=1e9, memory=1), SHAPE), 3000, 0, 75, 3, 1000)
def test_a_prompt_takes_as_long_as_its_chunks(times, tokens, cached, budget, decodes, kv_tokens):
    budget = max(budget, tokens // 500)  # so that the sum is done soon
    whole = times.prefill_ms(tokens, cached, budget=budget, decodes=decodes, kv_tokens=kv_tokens)
    chunks = [(min(budget, tokens - start), cached + start) for start in range(0, tokens, budget)]
    rows = [decodes] * (len(chunks) - 1) + [decodes + 1]
    steps = [times.step_ms([c], decodes, kv_tokens, r) for c, r in zip(chunks, rows, strict=bool(chunks))]
    assert whole == pytest.approx(sum(steps), rel=1e-9)


def test_attention_that_goes_from_one_bound_to_the_other_within_a_prompt():
    """The example above is one, or the closed form's search for the crossing is not tested."""
    times = StepTime(DeviceModel(peak_flops=3.66e11, bandwidth=1e9, memory=1), SHAPE)
    bounds = [times.parts([(75, start)])["prefill_attention"] for start in range(0, 3000, 75)]
    by_memory = [part.memory_ms > part.compute_ms for part in bounds]
    assert by_memory == sorted(by_memory, reverse=True)
    assert 3 < sum(by_memory) < 37


@given(
    times,
    st.floats(0.01, 2000) | st.just(float("inf")),
    st.integers(0, 100_000),
    st.integers(0, 256),
    st.integers(0, 10**6),
    st.integers(0, 20_000),
)
def test_the_largest_chunk_is_the_largest(times, limit, cached, decodes, kv_tokens, high):
    best = times.largest_chunk(limit, cached, decodes, kv_tokens, high)
    assert 0 <= best <= high
    assert not best or times.step_ms([(best, cached)], decodes, kv_tokens) <= limit
    assert best == high or times.step_ms([(best + 1, cached)], decodes, kv_tokens) > limit


@given(times, prompts, st.integers(0, 256), st.integers(0, 10**6))
def test_a_step_is_as_long_as_its_parts(times, prefills, decodes, kv_tokens):
    plain = StepTime(times.device, times.shape)
    parts = plain.parts(prefills, decodes, kv_tokens).values()
    expected = times.device.overhead_ms + sum(part.ms for part in parts)
    assert plain.step_ms(prefills, decodes, kv_tokens) == pytest.approx(expected)
    compute, memory = times.utilisation(prefills, decodes, kv_tokens)
    assert 0 <= compute <= 1
    assert 0 <= memory <= 1


@given(st.floats(0.1, 500), st.integers(1, 300), st.integers(300, 20_000))
def test_the_largest_prefill_is_the_largest(limit, low, high):
    best = H200.largest_prefill(limit, low, high)
    assert low <= best <= high
    if best > low:
        assert best % GRAIN == 0
        assert H200.step_ms([(best, 0)]) <= limit
    following = best // GRAIN * GRAIN + GRAIN
    assert following > high or H200.step_ms([(following, 0)]) > limit


MIXED = replace(SHAPE, windows=(None, *[100] * 4) * 2)
WINDOWED = StepTime(DEVICE, MIXED)


def test_layers_with_a_window_read_and_multiply_that_much():
    """Eight of ten layers see 100 tokens."""
    of_decodes = WINDOWED.parts(decodes=8, kv_tokens=40_000)["decode_attention"]
    whole = TIMES.parts(decodes=8, kv_tokens=40_000)["decode_attention"]
    assert of_decodes.memory_ms == pytest.approx(whole.memory_ms * (0.2 + 0.8 * 100 / 5000))
    assert WINDOWED.step_ms(decodes=8, kv_tokens=400) == TIMES.step_ms(decodes=8, kv_tokens=400), "nothing is hidden"
    of_prompts = WINDOWED.parts([(64, 1000)])["prefill_attention"]
    whole = TIMES.parts([(64, 1000)])["prefill_attention"]
    assert of_prompts.compute_ms == pytest.approx(whole.compute_ms * (0.2 + 0.8 * 100 / 1032))
    assert of_prompts.memory_ms == pytest.approx(whole.memory_ms * (64 + 0.2 * 1000 + 0.8 * 100) / 1064)
    assert MIXED.kv_bytes_per_token == SHAPE.kv_bytes_per_token
    assert MIXED.block_bytes == SHAPE.block_bytes // 5


@given(prompts, st.integers(0, 64), st.integers(0, 10**6), st.integers(1, 500), st.floats(0.1, 50.0))
def test_windows_never_make_a_step_longer_and_chunks_add_up(prompts, decodes, kv_tokens, budget, limit):
    kv_tokens *= decodes > 0
    assert WINDOWED.step_ms(prompts, decodes, kv_tokens) <= TIMES.step_ms(prompts, decodes, kv_tokens) * (1 + 1e-9)
    chunk = WINDOWED.largest_chunk(limit, 500, decodes, kv_tokens, 600)
    assert not chunk or WINDOWED.step_ms([(chunk, 500)], decodes, kv_tokens) <= limit
    assert chunk == 600 or WINDOWED.step_ms([(chunk + 1, 500)], decodes, kv_tokens) > limit
    steps = [(min(budget, 1000 - done), done) for done in range(0, 1000, budget)]
    each = sum(WINDOWED.step_ms([step], logit_rows=int(sum(step) == 1000)) for step in steps)
    assert WINDOWED.prefill_ms(1000, budget=budget) == pytest.approx(each)


def test_windows_are_read_from_config_json():
    config = {"num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
    config |= {"num_hidden_layers": 3, "sliding_window": 100}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read_shape({**config, "layer_types": kinds}).windows == (100, None, 100)
    assert read_shape({**config, "sliding_window_pattern": 3}).windows == (100, 100, None)
    assert read_shape({**config, "use_sliding_window": True, "max_window_layers": 2}).windows == (None, None, 100)
    for same in ({}, {"use_sliding_window": False, "max_window_layers": 2}, {"layer_types": kinds[1:2] * 3}):
        assert read_shape({**config, **same}).windows == ()


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
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size is missing"):
        read_shape({})


def test_a_mixture_reads_the_experts_that_are_chosen_and_multiplies_by_a_tokens_own():
    each = 3 * 1000 * 500
    assert SPARSE.expert_params == 8 * 8 * each
    assert SPARSE.dense_params == 10 * 2_400_000 + 2 * 9_000_000 + 8 * (each + 8 * 1000)
    assert SPARSE.active_params == SPARSE.dense_params + 8 * 2 * each
    parts = StepTime(DEVICE, SPARSE).parts(decodes=3, kv_tokens=300)
    assert parts["gemm"].memory_ms == pytest.approx(2 * SPARSE.dense_params / 1e9)
    assert parts["experts"].memory_ms == pytest.approx(2 * SPARSE.expert_params * (1 - 0.75**3) / 1e9)
    assert parts["experts"].compute_ms == pytest.approx(2 * 8 * 2 * each * 3 / 1e12)
    one, all_of_them = (StepTime(DEVICE, SPARSE).parts(decodes=n)["experts"].memory_ms for n in (1, 10_000))
    assert one == pytest.approx(all_of_them / 4), "one token reads its own two of eight"


def test_the_busiest_device_is_waited_for():
    even, skewed = StepTime(DEVICE, SPARSE), StepTime(DEVICE, SPARSE, imbalance=1.5)
    few, many = ({"decodes": 2}, {"decodes": 20_000})
    for work, bound in ((few, "memory_ms"), (many, "compute_ms")):
        more = getattr(skewed.parts(**work)["experts"], bound)
        assert more == pytest.approx(1.5 * getattr(even.parts(**work)["experts"], bound))
    longest = skewed.parts(**many)["experts"].memory_ms
    assert longest == pytest.approx(even.parts(**many)["experts"].memory_ms), "it has no more experts than it has"


def test_groups_have_the_experts_together_and_send_rows_there():
    """Two groups of two: experts are on four devices, and each group's own weights on two."""
    device = DEVICE.parallel(2, data=2, experts=True)
    alone, group = StepTime(DEVICE.parallel(2), SPARSE), StepTime(device, SPARSE)
    assert (device.devices, device.memory) == (4, 2 * DEVICE.memory)
    assert SPARSE.held_bytes(device) == SPARSE.weight_bytes - SPARSE.expert_bytes // 2
    ours, theirs = (t.parts(decodes=3, kv_tokens=300) for t in (group, alone))
    assert ours["gemm"] == theirs["gemm"]
    assert ours["experts"].memory_ms == pytest.approx(2 * SPARSE.expert_params * (1 - 0.75**6) / 2e9 / 2)
    assert ours["experts"].compute_ms == theirs["experts"].compute_ms, "as many rows come as go"
    # all-reduces of 2 devices after 10 attentions and 2 dense MLPs, those before experts half before and half after 2
    # all-to-alls, of 2 rows a token of which 3/4 are not for the device itself, from both devices
    row = 2000 / 32e9 * 1e3
    reduces = 12 * (0.01 + 3 * row)
    to_all = 8 * (2 * 0.035 + 3 / 2 * 2 * (3 / 4) * 2 * row)
    assert ours["collectives"].ms == pytest.approx(reduces + to_all)
    sliced = DEVICE.parallel(2, data=2)
    assert StepTime(sliced, SPARSE).parts(decodes=3, kv_tokens=300) == theirs, "each group has all experts"
    assert SPARSE.held_bytes(sliced) == SPARSE.weight_bytes


def test_a_lone_group_has_all_devices_for_its_experts():
    device = DEVICE.parallel(1, data=4, experts=True)
    lone, all_busy = (StepTime(device, SPARSE, busy=busy).parts([(4000, 0)])["experts"] for busy in (0.25, 1.0))
    assert lone.compute_ms == pytest.approx(all_busy.compute_ms / 4)
    one = StepTime(device, SPARSE, busy=0.25).parts(decodes=1)["experts"].memory_ms
    assert one == pytest.approx(2 * SPARSE.expert_params / 4 / 1e9 / 4)


@pytest.mark.parametrize(("ranks", "dispatch_us", "combine_us"), [(8, 77, 114), (16, 118, 195), (64, 173, 314)])
def test_an_all_to_all_takes_what_deepep_publishes(ranks, dispatch_us, combine_us):
    """Its low-latency kernels on H800 (DeepEP, docs/legacy.md): 128 tokens on each device, 7168 values, 8 experts."""
    device = DeviceModel(peak_flops=1e15, bandwidth=3e12, memory=1, link_bandwidth=160e9)
    ms = all_to_alls_ms(device.parallel(1, data=ranks, experts=True), GEOMETRIES["deepseek-v3"], 128)
    assert ms / 58 * 1e3 == pytest.approx(dispatch_us + combine_us, rel=0.1)


def test_many_rows_go_once_to_each_host():
    """Its normal kernels: 4096 tokens to two hosts, 43 GB/s of what is sent over the network."""
    device = DeviceModel(peak_flops=1e15, bandwidth=3e12, memory=1, link_bandwidth=160e9, network_bandwidth=43e9)
    ms = all_to_alls_ms(device.parallel(1, data=16, experts=True), GEOMETRIES["deepseek-v3"], 4096)
    once, by_link = 4096 * 7168 * 3 * (1 - 0.5**8) / 43e9, 4096 * 7168 * 3 * 7 * (1 - 0.875**8) / 160e9
    assert ms / 58 == pytest.approx(1e3 * max(once, by_link) + 2 * 4 * 0.047)
    assert ms < 4096 / 128 * all_to_alls_ms(device.parallel(1, data=16, experts=True), GEOMETRIES["deepseek-v3"], 128)


def test_stages_compute_one_after_another_and_hand_rows_on():
    device = DEVICE.parallel(1, pipeline=2)
    parts, alone = (StepTime(d, SHAPE).parts(decodes=8, kv_tokens=800) for d in (device, DEVICE))
    assert parts["collectives"].ms == pytest.approx(0.01 + 8 * 2000 / 32e9 * 1e3)
    assert {**parts, "collectives": alone["collectives"]} == alone
    assert fitting_blocks(device, SHAPE) > 2 * fitting_blocks(DEVICE, SHAPE)


def test_latent_attention_by_hand():
    assert LATENT.kv_bytes_per_token == 10 * 80 * 2
    queries, kv, out = 200 * (1000 + 10 * 116), 1000 * 80 + 64 * 10 * 180, 10 * 80 * 1000
    assert LATENT.dense_params == 10 * (queries + kv + out + 9_000_000)
    times = StepTime(DEVICE, LATENT)
    decode = times.parts(decodes=8, kv_tokens=40_000)["decode_attention"]
    assert decode.compute_ms == pytest.approx(2 * 10 * 10 * (2 * 64 + 16) * 40_000 / 1e12)
    assert decode.memory_ms == pytest.approx(1600 * 40_000 / 1e9)
    prefill = times.parts([(500, 1000)])["prefill_attention"]
    pairs = 500 * 1250 * 2 * (100 + 16 + 80)
    assert prefill.compute_ms == pytest.approx(10 * 10 * (pairs + 1000 * 2 * 64 * 180) / 1e12)
    copies = StepTime(DEVICE.parallel(4), LATENT).parts(decodes=8, kv_tokens=40_000)["decode_attention"]
    assert copies.memory_ms == pytest.approx(decode.memory_ms), "every device reads the latents of all heads"
    assert copies.compute_ms == pytest.approx(decode.compute_ms / 4)
    assert fitting_blocks(DEVICE.parallel(4), LATENT) < 1.2 * fitting_blocks(DEVICE, LATENT)


def test_mixtures_and_latents_are_read_from_config_json():
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 300}
    config |= {"intermediate_size": 128, "num_experts_per_tok": 2}
    assert read_shape({**config, "num_local_experts": 8}).experts == Experts(count=8, per_token=2, intermediate=128)
    qwen = {**config, "num_experts": 16, "moe_intermediate_size": 32, "head_dim": 8}
    assert read_shape(qwen).experts == Experts(count=16, per_token=2, intermediate=32)
    shared = read_shape({**qwen, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]}).experts
    assert (shared.shared_intermediate, shared.dense_layers) == (96, 1)
    deepseek = {**config, "n_routed_experts": 32, "moe_intermediate_size": 32, "n_shared_experts": 2}
    deepseek |= {"first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24}
    shape = read_shape({**deepseek, "v_head_dim": 20, "q_lora_rank": None})
    assert shape.latents == Latents(kv_rank=16, rope_dim=8, nope_dim=24, value_dim=20)
    assert shape.experts == Experts(count=32, per_token=2, intermediate=32, shared_intermediate=64, dense_layers=1)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok is 0, allowed is a whole number from 1"):
        read_shape({**qwen, "num_experts_per_tok": 0})
    with pytest.raises(ConfigError, match=r"v_head_dim is missing"):
        read_shape(deepseek)
