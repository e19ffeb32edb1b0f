"""Steps of single rows as graphs read them, without a device: kernels are interpreted (TRITON_INTERPRET=1), and what a
graph would replay is looked at."""

import os
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from penstock.core.plan import BLOCK_TOKENS, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.nn import cuda_graph
from penstock.nn.batch import MOST_PADDED, Batch, Packed, padded_rows
from penstock.nn.loader import load_model
from penstock.nn.ops import OPS
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")
LENGTHS = (70, 5, 520)  # before the row that is computed; of the last, more than one split


def steps(groups: int, lengths=LENGTHS) -> list[SequenceStep]:
    return [
        SequenceStep(str(i), before, [9 + i], blocks_of(i, before + 1, groups), 1, SamplingParams(), 0)
        for i, before in enumerate(lengths)
    ]


def blocks_of(sequence: int, length: int, groups: int) -> tuple[int, ...]:
    first = 20 * sequence * groups
    return tuple(range(first, first + -(-length // BLOCK_TOKENS) * groups))


def packed(batch: Batch) -> Packed:
    slots = [table.slot_blocks.tolist() for table in batch.tables]
    spans = [table.spans for table in batch.tables]
    return Packed.of(batch.tokens.tolist(), batch.positions.tolist(), slots, spans, CPU)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_packed_step_says_what_the_batch_says(groups, count):
    batch = Batch(steps(groups, LENGTHS[:count]), CPU, groups=groups)
    step = packed(batch)
    padded = padded_rows(count)
    assert (step.rows, len(step.tokens), step.longest) == (count, padded, max(LENGTHS[:count]) + 1)
    assert torch.equal(step.tokens[:count], batch.tokens)
    assert torch.equal(step.positions[:count], batch.positions)
    again = Packed.over(step.values.clone(), padded, groups, count, step.longest)
    for table, slots, places in zip(batch.tables, again.slot_blocks, again.places, strict=True):
        assert torch.equal(slots[:count], table.slot_blocks)
        assert (slots[count:] == -1).all()
        assert (places[count:] == 0).all()
        for span, (row, rows, start, place) in zip(table.spans, places.tolist(), strict=False):
            assert (row, rows, start) == (span.row, 1, span.start)
            assert tuple(step.ids[-1 - place :][: len(span.ids)].tolist()) == tuple(span.ids)


def test_steps_are_padded_to_few_numbers_of_rows():
    sizes = {padded_rows(rows) for rows in range(1, MOST_PADDED + 1)}
    assert len(sizes) == MOST_PADDED.bit_length()
    assert all(rows <= padded_rows(rows) < 2 * rows for rows in range(1, MOST_PADDED + 1))


@pytest.fixture(params=["qwen3", "gemma3"])
def model(request, tmp_path):
    pytest.importorskip("transformers")
    return load_model(write_checkpoint(tmp_path, request.param), CPU, torch.float32)


def cache_of(model) -> KVCache:
    layout = make_layout(model.config, model.dtype, "block", "")
    cache = KVCache.on_device(layout, 60 * len(layout.groups), CPU)
    cache.slots.zero_()
    return cache


def interpreted(stack: ExitStack) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are not interpreted")
    for name in cuda_graph.KERNELS:
        kernel = OPS[name].backend("triton").function
        stack.enter_context(OPS[name].wrapped("cpu", lambda _, kernel=kernel: kernel))


@torch.inference_mode()
def test_a_padded_step_computes_the_same_to_the_bit(model):
    one, other = cache_of(model), cache_of(model)
    groups = one.layers.groups
    for i, length in enumerate(LENGTHS):
        tokens = [(7 * i + j) % 300 + 1 for j in range(length)]
        prompt = SequenceStep(str(i), 0, tokens, blocks_of(i, length, groups), 1, SamplingParams(), 0)
        for cache in (one, other):
            model(Batch([prompt], CPU, groups=groups), cache.layers)
    with ExitStack() as stack:
        interpreted(stack)
        batch = Batch(steps(groups), CPU, groups=groups)
        expected = model(batch, one.layers)
        found = model(Batch.over(packed(batch), 1000), other.layers)
    assert torch.equal(found[:3], expected)
    assert torch.equal(one.slots, other.slots)


@torch.inference_mode()
def test_graphs_are_captured_for_what_may_come_and_filled_with_what_does(model):
    pytest.importorskip("triton")
    captures, replayed = [], []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            captures.append((pool, capture_error_mode))

        def capture_end(self):
            pass

        def pool(self):
            return 7, 7

        def replay(self):
            replayed.append(self)

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    fakes = {"CUDAGraph": Graph, "Stream": lambda _: stream, "current_stream": lambda _: stream}
    fakes["stream"] = lambda _: nullcontext()
    ran = lambda batch, cache: torch.zeros(len(batch.tokens), 8)  # noqa: E731
    with mock.patch.multiple(torch.cuda, **fakes), mock.patch.object(type(model), "forward", lambda _, *a: ran(*a)):
        graphs, cache = cuda_graph.CudaGraphs(model), cache_of(model)
        groups = cache.layers.groups
        graphs.capture(cache.layers, 3, 1000)
        assert captures == [(None, "thread_local"), *[((7, 7), "thread_local")] * 5]  # 4, 2, 1 rows, long and short
        batch = Batch(steps(groups), CPU, groups=groups)
        assert not graphs.serves(batch, cache.layers)  # nothing is packed on a CPU
        step = packed(batch)
        for table in batch.tables:
            table.packed = step
        assert graphs.serves(batch, cache.layers)
        batch.tokens = torch.tensor([100, 101, 102])  # placeholders that were filled
        assert graphs(batch, cache.layers).shape == (3, 8)
        (graph,) = replayed
        (captured,) = (x for x in graphs._captured.values() if x.graph is graph)
        assert captured.inputs.tokens.tolist() == [100, 101, 102, 0]
        assert torch.equal(captured.inputs.values[4 : len(step.values)], step.values[4:])
        assert captured.inputs.longest > 512
        assert len(captures) == 6
        batch.reach = 5000
        graphs(batch, cache.layers)
        assert len(captures) == 7  # which is longer than was expected
        graphs(batch, cache_of(model).layers)
        assert len(captures) == 8  # and lies elsewhere
