"""A step as one call computes what its ops compute one by one, to the bit."""

import threading
import time
from itertools import product

import pytest
import torch

from penstock.core.plan import BLOCK_TOKENS, Branches, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.core.stop import Interrupted, Stop
from penstock.engine.cache import KVCache, make_layout
from penstock.nn import native
from penstock.nn.batch import Batch, Scratch
from penstock.nn.experts import Experts
from penstock.nn.graph import Forward, obstacle
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from penstock.nn.methods import PLAIN
from penstock.nn.ops import OPS
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
# of a step: (start, tokens) of its sequences
STEPS = ([(0, 5), (0, 130), (0, 1)], [(5, 1), (130, 70), (1, 1)], [(6, 1), (200, 1), (2, 1)])


DENSE = ["qwen3", "qwen2", "llama-tied", "llama-bias", "mistral-window", "gemma3", "phi3-partial"]
EXPERTS = ["mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-mixed"]
LATENT = ["deepseek-v2", "deepseek-v2-yarn", "deepseek-v3", "deepseek-v3-halves"]


@pytest.fixture(scope="module", params=[*DENSE, *EXPERTS, *LATENT])
def checkpoint(request, tmp_path_factory):
    pytest.importorskip("transformers")
    return write_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def run(forward: Forward, order: str, consecutive: bool, kv: str = "auto", together: bool = True) -> list[torch.Tensor]:
    """[rows, hidden] of every step, and what the cache holds afterwards."""
    model = forward.model
    layout = make_layout(model.config, model.dtype, order, "", kv)
    groups = len(layout.groups)
    cache = KVCache.on_device(layout, 24 * groups, CPU)
    cache.slots.zero_()
    generator, results = torch.Generator().manual_seed(3), []
    for lengths in STEPS:
        sequences = []
        for i, (start, rows) in enumerate(lengths):
            tokens = torch.randint(1, 320, (rows,), generator=generator).tolist()
            blocks = range(8 * i * groups, (8 * i + -(-(start + rows) // BLOCK_TOKENS)) * groups)
            ids = blocks if consecutive else tuple(blocks)
            sequences.append(SequenceStep(str(i), start, tokens, ids, 1, SamplingParams(), 0))
        for batch in [sequences] if together else [[s] for s in sequences]:
            results.append(forward(Batch(batch, CPU, groups=groups), cache.layers))
    return [torch.cat(results[:1] if together else results[:3]), *results, stored(cache)]


def stored(cache: KVCache) -> torch.Tensor:
    """[layers, slots, ...]"""
    return torch.stack([layer.of_blocks(slice(None), torch.float32) for layer in cache.layers])


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "kv"), [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")])
def test_one_call_is_all_ops_to_the_bit(checkpoint, dtype, kv):
    model = load_model(checkpoint, CPU, dtype)
    assert obstacle(model, "full") is None
    eager = Forward(model, "eager")
    expected = run(eager, "block", False, kv)
    assert eager._graph is None
    assert expected[0].isfinite().all()
    for threads in (1, 2):
        native.set_threads(threads)
        for mode, order, consecutive in product(("full", "partial"), ("block", "token"), (False, True)):
            forward = Forward(model, mode)
            found = run(forward, order, consecutive, kv)
            assert forward._graph is not None
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)
    native.set_threads(1)
    alone = run(Forward(model, "full"), "block", True, kv, together=False)
    assert torch.equal(alone[0], expected[0])
    assert torch.equal(alone[-1], expected[-1])


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["eager", "partial", "full"])
def test_rows_that_nobody_wants_change_nothing_for_the_others(checkpoint, mode):
    model = load_model(checkpoint, CPU, torch.bfloat16)
    forward = Forward(model, mode)
    layout = make_layout(model.config, model.dtype, "block", "")
    groups = len(layout.groups)
    cache = KVCache.on_device(layout, 9 * groups, CPU)

    def step(*wanted: range) -> tuple[torch.Tensor, torch.Tensor, list[range]]:
        cache.slots.zero_()
        lengths = (20, 1, 33)
        steps = [
            SequenceStep(
                str(i),
                0,
                list(range(1, n + 1)),
                tuple(range(3 * i * groups, (3 * i + -(-n // BLOCK_TOKENS)) * groups)),
                True,
                SamplingParams(),
                0,
            )
            for i, n in enumerate(lengths)
        ]
        batch = Batch(steps, CPU, groups=groups)
        places = batch.keep(wanted) if wanted else []
        return forward(batch, cache.layers), cache.slots.clone(), places

    whole, stored, _ = step()
    for wanted in [(range(19, 20), range(20, 21), range(21, 54)), (range(19, 20), range(20, 20), range(53, 54))]:
        found, also_stored, places = step(*wanted)
        assert [len(rows) for rows in places] == [len(rows) for rows in wanted]
        for rows, place in zip(wanted, places, strict=True):
            assert torch.equal(found[place.start : place.stop], whole[rows.start : rows.stop])
        assert torch.equal(stored, also_stored)
    nothing, also_stored, _ = step(range(0), range(20, 20), range(21, 21))
    assert nothing.shape == (0, model.config.hidden_size)
    assert torch.equal(stored, also_stored)


@torch.inference_mode()
def test_what_has_no_kernel_is_computed_op_by_op(tmp_path):
    pytest.importorskip("transformers")
    directory = write_checkpoint(tmp_path, "qwen3")
    half = load_model(directory, CPU, torch.float16)
    assert obstacle(half, "full") == obstacle(half, "partial") == "there are no kernels for float16 on cpu"
    assert run(Forward(half), "block", consecutive=True)[0].isfinite().all()
    model = load_model(directory, CPU)
    forward = Forward(model)
    with OPS["attention"].using("reference"):
        assert obstacle(model, "full") == "attention computed by other backends"
        run(forward, "block", consecutive=True)
        assert forward._graph is not None, "the rest is still two calls a layer"
    other = Forward(model)
    with OPS["gate_mul"].using("reference"):
        assert obstacle(model, "partial") == "gate_mul computed by other backends"
        run(other, "block", consecutive=True)
        assert other._graph is None
    scale, model.model.layers[1].mixer.scale = model.model.layers[1].mixer.scale, 0.5
    assert obstacle(model, "full") == "layers differ in more than windows and rotations"
    model.model.layers[1].mixer.scale = scale
    model.hold(PLAIN)
    assert obstacle(model, "full") == "there are no kernels for plain weights"
    model.model.layers[1].feed_forward = torch.nn.Identity()
    assert obstacle(model, "full") == "Identity computed op by op"


@torch.inference_mode()
def test_a_beam_search_is_computed_in_two_calls_a_layer(checkpoint):
    model = load_model(checkpoint, CPU, torch.bfloat16)
    layout = make_layout(model.config, model.dtype, "block", "")
    groups = len(layout.groups)
    blocks, region = tuple(range(3 * groups)), tuple(range(3 * groups, 4 * groups))
    prompt = SequenceStep("0", 0, list(range(1, 34)), blocks, 1, SamplingParams(), 0)
    beams = SequenceStep(
        "0", 33, [5, 6], blocks, 0, SamplingParams(), 0, candidates=2, branches=Branches([[], []], 2, region)
    )
    found = {}
    for mode in ("eager", "auto", "full"):
        forward = Forward(model, mode)
        cache = KVCache.on_device(layout, 8 * groups, CPU)
        cache.slots.zero_()
        found[mode] = [forward(Batch([step], CPU, groups=groups), cache.layers) for step in (prompt, beams)]
        assert (forward.mode_of(Batch([beams], CPU)) == "partial") == (mode != "eager")
    for mode in ("auto", "full"):
        assert all(map(torch.equal, found[mode], found["eager"]))


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["eager", "partial", "full"])
def test_a_step_that_is_stopped_leaves_nothing_that_is_no_number(checkpoint, mode):
    """Whenever that is; and what it had begun to store is stored again by the next one."""
    model = load_model(checkpoint, CPU, torch.bfloat16)
    forward, layout = Forward(model, mode), make_layout(model.config, model.dtype, "block", "")
    groups, rows = len(layout.groups), 700
    blocks = tuple(range(-(-rows // BLOCK_TOKENS) * groups))
    step = SequenceStep("a", 0, [i % 300 + 1 for i in range(rows)], blocks, 1, SamplingParams(), 0)
    clean, cache = (KVCache.on_device(layout, len(blocks), CPU) for _ in range(2))
    for each in (clean, cache):
        each.slots.zero_()
    expected = forward(Batch([step], CPU, groups=groups), clean.layers)
    stop = Stop()
    assert torch.equal(forward(Batch([step], CPU, groups=groups), cache.layers, stop), expected)
    cache.slots.zero_()
    began = time.perf_counter()
    forward(Batch([step], CPU, groups=groups), cache.layers)
    took = time.perf_counter() - began
    stopped = 0
    native.set_threads(2)
    for part in range(8):
        cache.slots.zero_()
        stop, batch, scratch = Stop(), Batch([step], CPU, groups=groups), Scratch()
        batch.scratch = scratch
        if mode != "eager":  # what is left in it is no number
            scratch.take("step", (rows * forward._graph._width,), model.dtype, CPU).fill_(float("nan"))
        timer = threading.Timer(took * part / 8, stop.set)
        if part:
            timer.start()
        else:
            stop.set()
        try:
            forward(batch, cache.layers, stop)
        except Interrupted:
            stopped += 1
            assert part or not cache.slots.any(), "it was stopped before it began"
        if part:
            timer.join()
        assert stored(cache).isfinite().all()
        assert torch.equal(forward(Batch([step], CPU, groups=groups), cache.layers), expected)
        assert torch.equal(stored(cache), stored(clean))
    native.set_threads(1)
    assert stopped


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "quantization", "dtype"),
    [
        ("llama-tied", "int8", torch.bfloat16),
        ("llama-tied", "int4", torch.float32),
        ("llama-tied", "hqq3", torch.bfloat16),
        ("llama-tied", "fp8", torch.bfloat16),
        ("qwen3-moe", "int8", torch.bfloat16),
        ("qwen2-moe", "int4", torch.bfloat16),
        ("deepseek-v3", "int4", torch.float32),
    ],
)
def test_quantised_models_are_chained_too(name, quantization, dtype, tmp_path):
    pytest.importorskip("transformers")
    model = load_model(write_checkpoint(tmp_path, name), CPU, dtype, quantization=quantization)
    assert obstacle(model, "full") is None
    expected = run(Forward(model, "eager"), "block", False)
    assert expected[0].isfinite().all()
    for mode, threads in (("full", 1), ("partial", 2)):
        native.set_threads(threads)
        for a, b in zip(run(Forward(model, mode), "block", False), expected, strict=True):
            assert torch.equal(a, b)
    native.set_threads(1)
    alone = run(Forward(model, "full"), "block", True, together=False)
    assert torch.equal(alone[0], expected[0])
    with OPS["packed_quantised_linear"].using("reference"):
        assert obstacle(model, "full") == "packed_quantised_linear computed by other backends"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3-moe-mixed", "deepseek-v3"])
def test_rows_of_experts_are_counted(name, tmp_path):
    pytest.importorskip("transformers")
    model = load_model(write_checkpoint(tmp_path, name), CPU)
    mixtures = [part for part in model.modules() if isinstance(part, Experts)]
    counts = []
    for mode in ("eager", "partial", "full"):
        for mixture in mixtures:
            mixture.counts.zero_()
        run(Forward(model, mode), "block", False)
        counts.append(torch.stack([mixture.counts for mixture in mixtures]))
    assert counts[0].any(1).all()
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])


def test_experts_of_several_ranks_are_computed_op_by_op(tmp_path):
    pytest.importorskip("transformers")
    shard = Shard(0, 1, experts=Shard(0, 2))
    model = load_model(write_checkpoint(tmp_path, "qwen3-moe"), CPU, shard=shard)
    assert obstacle(model, "full") == "experts of other ranks computed op by op"
