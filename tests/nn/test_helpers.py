"""Ranks attend for each other: the same bits as alone, whoever comes to a piece first."""

import mmap
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import RankFailed
from penstock.core.plan import BLOCK_TOKENS, HELPED_BLOCKS, Helped, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.nn import native, ops
from penstock.nn.batch import Batch
from penstock.nn.helpers import Helpers, Places
from penstock.nn.kv import LayerKV
from penstock.nn.layers import attend
from penstock.nn.ranks import SharedMemoryRanks

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
CPU, PIECE = torch.device("cpu"), HELPED_BLOCKS * BLOCK_TOKENS
BLOCKS = 5 * HELPED_BLOCKS


def cache_of(kv_heads, dim, dtype, latent=0, scaled=False):
    shape = (BLOCKS, 1 if latent else 2, kv_heads, BLOCK_TOKENS, dim)
    if scaled:
        return LayerKV(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[:-1]) / 50, 0, latent)
    return LayerKV(torch.randn(shape).to(dtype), None, 0, latent)


def copied(cache, there, blocks):
    """A cache that has noise, but at `there` these blocks."""
    values, scales = torch.ones_like(cache.values) * 3, cache.scales
    values[there] = cache.values[blocks]
    if scales is not None:
        scales = torch.ones_like(scales)
        scales[there] = cache.scales[blocks]
    return LayerKV(values, scales, 0, cache.latent)


class Pair:
    """Two ranks in one process, of which the first one's contexts are long."""

    def __init__(self, layers, copies, dtype):
        first = SharedMemoryRanks.bytes_for(2)
        memory = mmap.mmap(-1, first + Helpers.bytes_for(2), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        self.ranks = [SharedMemoryRanks(memory, number, 2) for number in range(2)]
        words = memoryview(bytearray(4 * 8)).cast("q")
        words[2] = 1  # the second has copies for the first
        places = [Places(memory, first, number, 2, self.ranks[number], 1, 0, words) for number in range(2)]
        self.owner, self.helper = (Helpers(each, copies, layers, dtype) for each in places)

    def help(self):
        thread = threading.Thread(target=self.helper.meet, kwargs={"wait": True})
        thread.start()
        return thread


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_same_bits_whoever_attends(data):
    kv_heads, group, dim, latent = data.draw(st.sampled_from([(1, 4, 48, 36), (1, 16, 40, 32), (2, 2, 24, 0)]))
    dtype, scaled = data.draw(st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]))
    layers = [cache_of(kv_heads, dim, dtype, latent, scaled) for _ in range(2)]
    lengths = data.draw(st.lists(st.integers(1, 5 * PIECE), min_size=1, max_size=3))
    steps, parts = [], []
    for number, length in enumerate(lengths):
        rows = data.draw(st.integers(1, min(3, length)))
        blocks = torch.randperm(BLOCKS)[: -(-length // BLOCK_TOKENS)].tolist()
        steps.append(SequenceStep(f"{number}", length - rows, [0] * rows, blocks, 1, SamplingParams(), 0))
        whole = (length - rows) // PIECE
        if whole and not parts:
            first = data.draw(st.integers(0, whole - 1))
            own = blocks[first * HELPED_BLOCKS : data.draw(st.integers(first + 1, whole)) * HELPED_BLOCKS]
            parts.append((number, Helped(f"{number}", 1, first, tuple(torch.randperm(BLOCKS)[: len(own)].tolist()))))
            copies = [copied(layer, list(parts[0][1].blocks), own) for layer in layers]
    batch, q = Batch(steps, CPU), torch.randn(sum(len(s.tokens) for s in steps), kv_heads * group, dim).to(dtype)
    expected = [ops.attention(q, layer, batch, 0.2, None) for layer in layers]
    pair = Pair(layers, copies if parts else layers, dtype)
    batch.together = partial(pair.owner.attend, parts)
    for helps in (False, True):
        for layer, want in zip(layers, expected, strict=True):
            thread = pair.help() if helps else None
            assert torch.equal(attend(q, layer, batch, 0.2), want)
            pair.owner.meet(wait=True)  # it has no copies for anybody, and waits for nobody
            if thread is None:
                pair.helper.meet(wait=False)
            else:
                thread.join()
    assert torch.equal(attend(q, cache_of(kv_heads, dim, dtype, latent, scaled), batch, 0.2)[:0], expected[0][:0])


def long_one():
    layer = cache_of(1, 576, torch.float32, 512)
    blocks = tuple(range(4 * HELPED_BLOCKS))
    step = SequenceStep("", 4 * PIECE, [0], [*blocks, len(blocks)], 1, SamplingParams(), 0)
    return layer, Batch([step], CPU), torch.randn(1, 64, 576), [(0, Helped("", 1, 0, blocks))]


def test_who_waits_helps():
    layer, batch, q, parts = long_one()
    expected = ops.attention(q, layer, batch, 0.1, None)
    pair = Pair([layer], [copied(layer, list(parts[0][1].blocks), list(parts[0][1].blocks))], torch.float32)
    batch.together = partial(pair.owner.attend, parts)
    for _ in range(100):
        thread = pair.help()
        assert torch.equal(attend(q, layer, batch, 0.1), expected)
        pair.owner.meet(wait=True)
        thread.join()
        if pair.owner.helped:
            break
    assert pair.owner.helped, "of 400 pieces not one was taken by a rank that had nothing else to do"
    assert not pair.owner.tokens
    batch.together = partial(pair.owner.attend, [])
    assert torch.equal(attend(q, layer, batch, 0.1), expected)
    assert pair.owner.tokens == 4 * PIECE + 1, "what it has attended to alone is measured"


def test_a_rank_that_fails_ends_the_wait_for_it():
    layer, _, _, _ = long_one()
    pair, failed = Pair([layer], [layer], torch.float32), []

    def wait():
        try:
            pair.helper.meet(wait=True)
        except RankFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    pair.ranks[0].fail(0)
    thread.join(60)
    assert failed == ["rank 0 has failed"]
