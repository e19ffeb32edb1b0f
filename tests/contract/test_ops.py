"""Every backend of every op against its reference, over odd shapes, wherever it runs."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import KVLayout
from penstock.core.plan import BLOCK_TOKENS, Branches, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import as_blocks
from penstock.nn import ops
from penstock.nn.batch import Batch
from penstock.nn.ops import OPS
from penstock.nn.ops.attention import sdpa
from penstock.nn.ops.gumbel import counter, gumbel_noise, row_key

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BACKENDS = [
    (name, backend.name, device)
    for name, op in OPS.items()
    for backend in op.backends
    for device in DEVICES
    if backend.serves(device)
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


BLOCKS = 150


def batch_of(lengths: list[tuple[int, int]], device: str, consecutive: bool) -> Batch:
    """A batch of (start, rows) sequences, on scattered blocks or on a run of blocks each."""
    steps, used = [], 0
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    for i, (start, rows) in enumerate(lengths):
        count = -(-(start + rows) // BLOCK_TOKENS)
        blocks = range(used, used + count) if consecutive else tuple(order[used : used + count])
        used += count
        steps.append(SequenceStep(str(i), start, list(range(rows)), blocks, True, SamplingParams(), 0))
    return Batch(steps, torch.device(device))


def cache_of(order: str, kv_heads: int, dim: int, padding: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """The second of three layers, filled with noise; `padding` elements lie between blocks."""
    exact = 3 * 2 * kv_heads * BLOCK_TOKENS * dim
    layout = KVLayout(
        model="",
        order=order,
        dtype=str(dtype).removeprefix("torch."),
        layers=3,
        kv_heads=kv_heads,
        head_dim=dim,
        block_bytes=(exact + padding) * dtype.itemsize,
    )
    return as_blocks(torch.randn(BLOCKS * (exact + padding)).to(device, dtype), layout)[:, 1]


def branches_of(prompt: int, rows: int, before: int, device: str, consecutive: bool) -> Batch:
    """A batch of one beam search whose beams have chosen among each other's rows at every step before."""
    generator = torch.Generator().manual_seed(2)
    count = -(-prompt // BLOCK_TOKENS)
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    blocks = range(3, 3 + count) if consecutive else tuple(order[:count])
    region = [block for block in order if block not in blocks][: -(-rows * (before + 1) // BLOCK_TOKENS)]
    past = torch.randint(0, rows, (rows, before), generator=generator).tolist()
    step = SequenceStep("", prompt + before, [0] * rows, blocks, False, SamplingParams(), 0)
    return Batch([replace(step, candidates=2, branches=Branches(past, rows, region))], torch.device(device))


def case(name: str, data, device: str, dtype: torch.dtype):
    """(arguments, tensors changed in place) for one op with random shapes."""

    def rand(*shape):
        return torch.randn(*shape).to(device, dtype)

    rows, width = data.draw(st.integers(1, 9)), 2 * data.draw(st.integers(1, 33))
    if name == "linear":
        return (rand(rows, width), rand(7, width), data.draw(st.sampled_from([None, rand(7)]))), []
    if name == "rms_norm":
        return (rand(rows, width), rand(width), 1e-6), []
    if name == "add_rms_norm":
        return (rand(rows, width), rand(rows, width), rand(width), 1e-6), []
    if name == "rotary":
        return (rand(rows, 3, width), rand(rows, width // 2), rand(rows, width // 2)), []
    if name == "silu_mul":
        return (rand(rows, width),), []
    if name == "gumbel_noise":
        keys = torch.tensor([row_key(data.draw(st.integers(-(2**63), 2**63 - 1)), i) for i in range(rows)])
        return (keys.to(device), torch.arange(width, device=device)[None]), []
    if name == "branch_attention":
        prompt, beams, before = (data.draw(st.integers(*range_)) for range_ in ((1, 700), (1, 9), (0, 150)))
        kv_heads, group, dim = data.draw(st.sampled_from([(1, 1, 8), (2, 3, 16), (4, 2, 24)]))
        order, padding = data.draw(st.sampled_from(["block", "token"])), data.draw(st.sampled_from([0, 0, 36]))
        cache = cache_of(order, kv_heads, dim, padding, device, dtype)
        batch = branches_of(prompt, beams, before, device, data.draw(st.booleans()))
        window = data.draw(st.sampled_from([None, 1, 100]))
        q = rand(beams, kv_heads * group, dim)
        return (q, cache, batch.branches[0], dim**-0.5, window, batch.scratch), []
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 700), st.sampled_from([1, 1, 2, 65, 600])), min_size=1, max_size=5)
    )
    batch = batch_of(lengths, device, consecutive=data.draw(st.booleans()))
    kv_heads, group, dim = data.draw(st.sampled_from([(1, 1, 8), (2, 3, 16), (4, 2, 24)]))
    order, padding = data.draw(st.sampled_from(["block", "token"])), data.draw(st.sampled_from([0, 0, 36]))
    cache = cache_of(order, kv_heads, dim, padding, device, dtype)
    total = sum(n for _, n in lengths)
    if name == "store_kv":
        return (rand(total, kv_heads, dim), rand(total, kv_heads, dim), cache, batch), [2]
    if name == "attention":
        window = data.draw(st.sampled_from([None, 1, 100]))
        return (rand(total, kv_heads * group, dim), cache, batch, dim**-0.5, window), []
    raise AssertionError(f"say here how to call {name}")


@pytest.mark.parametrize(("name", "backend", "device"), BACKENDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(list(TOLERANCE)))
def test_backend_agrees_with_the_reference(name, backend, device, data, dtype):
    op = OPS[name]
    alone = data.draw(st.sampled_from([0, 1 << 16, 1 << 30]))  # a small model is never long enough by itself
    with mock.patch.object(sdpa, "ALONE", alone), mock.patch.object(sdpa, "TOGETHER", 1 << 17):
        agree(op, name, backend, device, data, dtype)


def agree(op, name, backend, device, data, dtype):
    torch.manual_seed(0)
    arguments, changed = case(name, data, device, dtype)
    copies = tuple(a.clone() if i in changed else a for i, a in enumerate(arguments))
    with op.using(backend):
        ours = op.on(device)(*arguments)
    with op.using("reference"):
        theirs = op.on(device)(*copies)
    pairs = [(arguments[i], copies[i]) for i in changed]
    if not changed:
        pairs += list(zip(ours, theirs, strict=True)) if isinstance(ours, tuple) else [(ours, theirs)]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.allclose(a.float(), b.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alone", [0, 1 << 30])
@pytest.mark.parametrize("order", ["block", "token"])
def test_attention_of_a_row_is_the_same_to_the_bit_whoever_else_is_there(order, alone, device):
    torch.manual_seed(0)
    lengths = [(start, 1) for start in (5, 63, 64, 130, 250, 251, 300)]
    q = torch.randn(len(lengths), 6, 16).to(device)
    cache = cache_of(order, 2, 16, 0, device, torch.float32)
    with mock.patch.object(sdpa, "ALONE", alone):
        for consecutive in (False, True):
            batch = batch_of(lengths, device, consecutive)
            together = sdpa.attention(q, cache, batch, 0.25, None)
            for i, (start, _) in enumerate(lengths):
                blocks = batch.spans[i].ids
                step = SequenceStep("", start, [0], blocks, True, SamplingParams(), 0)
                by_itself = Batch([step], torch.device(device))
                assert torch.equal(sdpa.attention(q[i : i + 1], cache, by_itself, 0.25, None)[0], together[i])
                # nor does it matter whether its blocks are found by table
                by_table = Batch([replace(step, blocks=tuple(blocks))], torch.device(device))
                assert torch.equal(sdpa.attention(q[i : i + 1], cache, by_table, 0.25, None)[0], together[i])


@pytest.mark.parametrize("order", ["block", "token"])
def test_beams_attend_as_if_each_were_a_sequence_of_its_own(order):
    torch.manual_seed(0)
    prompt, rows, before = 130, 4, 40
    cache = cache_of(order, 2, 16, 0, "cpu", torch.float32)
    batch = branches_of(prompt, rows, before, "cpu", consecutive=False)
    (span,) = batch.branches
    assert not batch.spans
    assert batch.rows == [range(rows)]
    assert batch.positions.tolist() == [prompt + before] * rows
    q = torch.randn(rows, 6, 16)
    together = ops.branch_attention(q, cache, span, 0.25, None, batch.scratch)
    prompts = cache[span.prompt.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :prompt]
    for row, slots in enumerate(span.slots):
        # its places, copied to where a sequence of its own would have them
        own = cache[slots // BLOCK_TOKENS, :, :, slots % BLOCK_TOKENS].permute(1, 2, 0, 3)
        whole = torch.cat([prompts, own], 2)
        blocks = -(-whole.shape[2] // BLOCK_TOKENS)
        padded = torch.nn.functional.pad(whole, (0, 0, 0, blocks * BLOCK_TOKENS - whole.shape[2]))
        alone = padded.unflatten(2, (blocks, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4).contiguous()
        step = SequenceStep("", prompt + before, [0], range(blocks), True, SamplingParams(), 0)
        expected = ops.attention(q[row : row + 1], alone, Batch([step], torch.device("cpu")), 0.25, None)
        assert torch.allclose(together[row : row + 1], expected, atol=1e-5)
    # a search that stands elsewhere in a batch gets the same to the bit
    assert torch.equal(
        ops.branch_attention(q.clone(), cache, replace(span, row=17), 0.25, None, batch.scratch), together
    )


def test_rotation_keeps_lengths_and_relative_angles():
    x = torch.randn(5, 2, 8)
    angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01])
    turned = ops.rotary(x, angle.cos(), angle.sin())
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    same = ops.rotary(x[:1].expand(5, 2, 8), angle.cos(), angle.sin())
    products = (same[1:] * same[:-1]).sum(-1)
    assert torch.allclose(products, products[:1].expand_as(products), atol=1e-4)


def test_noise_is_gumbel_and_a_pure_function():
    keys = torch.tensor([row_key(3, p) for p in range(200)])
    noise = gumbel_noise(keys, torch.arange(500)[None])
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(1.6449, abs=0.03)
    assert torch.isfinite(noise).all()
    # columns and rows are uncorrelated
    assert torch.corrcoef(noise[:50]).fill_diagonal_(0).abs().max() < 0.25
    picked = gumbel_noise(keys[7:8], torch.tensor([[400, 3]]))
    assert torch.equal(picked[0], noise[7, [400, 3]])


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**20))
def test_tensor_arithmetic_agrees_with_integers(seed, position, token):
    key = row_key(seed, position)
    bits = counter.mix((key & counter.MASK) + (token + 1) * counter.GOLDEN) >> 32
    uniform = ((torch.tensor(bits, dtype=torch.int64).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    want = -torch.log(-torch.log1p(-uniform))
    assert torch.equal(gumbel_noise(torch.tensor([key]), torch.tensor([[token]]))[0, 0], want)
