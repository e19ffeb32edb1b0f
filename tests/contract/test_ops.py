"""Every backend of every op against its reference, over odd shapes, wherever it runs."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import KVLayout, attention_groups, bytes_per_token, latent_group
from penstock.core.plan import BLOCK_TOKENS, Branches, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import as_layers
from penstock.nn import native, ops, triton
from penstock.nn.batch import Batch
from penstock.nn.bounded_logits import BoundedLogits
from penstock.nn.config import Routing
from penstock.nn.experts import ExpertLinear
from penstock.nn.head_weight import HeadWeight
from penstock.nn.kv import LARGEST, LayerKV, quantised
from penstock.nn.methods import PACKED, PLAIN, method_for
from penstock.nn.native.isa import sets_here
from penstock.nn.ops import OPS, gumbel_noise, row_key, sdpa
from penstock.nn.ops.sample import GOLDEN, MASK, mix
from penstock.nn.packed import PackedWeight
from penstock.nn.packed_quantised import PackedQuantisedWeight
from penstock.nn.quantised import SCALES, Codes, QuantisedWeight
from tests.helpers.quantised import random_pieces

HERE = [one.name for one in sets_here()]
BEST = HERE[-1] if HERE else None
# instruction sets whose kernels are tested; those between the least and the best are made of what these are made of
SETS = [(isa, [] if isa in (HERE[0], BEST) else [pytest.mark.slow]) for isa in HERE] or [(None, [])]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # minutes; Triton 3.6 needs a NumPy before 2.4 for it
ON_PACKED = ("packed", "choose")  # names of ops on packed weights
TOGETHER = ("all_reduce",)  # computed by several ranks: see test_ranks.py
BACKENDS = [
    (name, backend.name, device)
    for name, op in OPS.items()
    if name not in TOGETHER
    for backend in op.backends
    for device in DEVICES
    if (backend.serves(device) or (INTERPRETED and (backend.name, device, triton.missing()) == ("triton", "cpu", None)))
    and (not name.startswith(ON_PACKED) or PACKED.missing(torch.device(device), torch.float32) is None)
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
STORED = [None, *LARGEST]  # what a cache has where it is not the rows' dtype
STEEP = 2  # times as much where scores are twelve times the usual ones, which are rounded by as much more, before exp
IN_WHOLE = 1.5e-2  # tolerance of products of values in 8 bits with what is rounded to 16
EXACT = [(name, backend, device) for name, backend, device in BACKENDS if backend == "native"]  # to the bit, they say
BY_SET = [pytest.param(isa, *case, marks=marks) for case in EXACT for isa, marks in SETS]

BLOCKS = 150
HEADS = [(1, 1, 8), (2, 3, 16), (4, 2, 24), (2, 8, 80), (1, 2, 128)]  # of K and V, queries for each, and their size
LATENT = {8: 6, 24: 16, 80: 40, 128: 112}  # size -> how many values of a latent vector are V


@pytest.fixture(scope="module", autouse=True)
def isa(request):
    """The instruction set whose kernels compute; by default the best one."""
    native.use(getattr(request, "param", None))
    yield
    native.use(None)


def batch_of(lengths: list[tuple[int, int]], device: str, consecutive: bool) -> Batch:
    """A batch of (start, rows) sequences, on scattered blocks or on a run of blocks each."""
    steps, used = [], 0
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    for i, (start, rows) in enumerate(lengths):
        count = -(-(start + rows) // BLOCK_TOKENS)
        blocks = range(used, used + count) if consecutive else tuple(order[used : used + count])
        used += count
        steps.append(SequenceStep(str(i), start, list(range(rows)), blocks, 1, SamplingParams(), 0))
    return Batch(steps, torch.device(device))


def cache_of(
    order: str, kv_heads: int, dim: int, padding: int, device: str, stored: torch.dtype, latent: int = 0
) -> LayerKV:
    """The second of three layers, filled with noise; `padding` elements lie between blocks. With `latent`, of vectors
    of which so many values are V."""
    dtype = str(stored).removeprefix("torch.")
    groups = attention_groups((None,) * 3, kv_heads, dim, dtype)
    if latent:
        groups = (latent_group(3, latent, dim - latent, dtype),)
    size = bytes_per_token(groups) * BLOCK_TOKENS + padding * stored.itemsize
    layout = KVLayout(model="", order=order, dtype=dtype, groups=groups, block_bytes=size)
    cache = as_layers(torch.zeros(BLOCKS * size, dtype=torch.uint8, device=device), layout)[1]
    noise = torch.randn(cache.values.shape)
    if cache.scales is not None:
        noise, scales = quantised(noise * torch.rand(noise.shape[:-1])[..., None] * 3, stored)
        cache.scales.copy_(scales)
    cache.values.copy_(noise)
    return cache


def using(name: str, backend: str, device: str):
    """As `Op.using`; Triton's kernels on a CPU are interpreted."""
    op = OPS[name]
    if (backend, device) == ("triton", "cpu"):
        return op.wrapped(device, lambda _: op.backend(backend).function)
    return op.using(backend)


def clone(x):
    if isinstance(x, LayerKV):
        return replace(x, values=x.values.clone(), scales=None if x.scales is None else x.scales.clone())
    return x.clone() if isinstance(x, torch.Tensor) else x


def tensors(x) -> list[torch.Tensor]:
    """Of a cache, what is stored and what it stands for."""
    if isinstance(x, LayerKV):
        return [x.of_blocks(slice(None), torch.float32), *([] if x.scales is None else [x.values.float(), x.scales])]
    return [x]


def branches_of(prompt: int, rows: int, before: int, device: str, consecutive: bool) -> Batch:
    """A batch of one beam search whose beams have chosen among each other's rows at every step before."""
    generator = torch.Generator().manual_seed(2)
    count = -(-prompt // BLOCK_TOKENS)
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    blocks = range(3, 3 + count) if consecutive else tuple(order[:count])
    region = [block for block in order if block not in blocks][: -(-rows * (before + 1) // BLOCK_TOKENS)]
    past = torch.randint(0, rows, (rows, before), generator=generator).tolist()
    step = SequenceStep("", prompt + before, [0] * rows, blocks, 0, SamplingParams(), 0)
    return Batch([replace(step, candidates=2, branches=Branches(past, rows, region))], torch.device(device))


def scale_of(data, dim: int) -> float:
    """Of attention's scores: usual, or such that the largest one is exceeded by far time and again."""
    return data.draw(st.sampled_from([1, 12])) * dim**-0.5


VOCABULARIES = [1, 15, 50, 3000, 40000]


def logits_of(rows: int, vocab: int, device: str) -> torch.Tensor:
    return (torch.randn(rows, vocab) * 3).to(device)


def draws(data, rows: int) -> list[ops.Draw]:
    one = st.builds(
        ops.Draw,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.99, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5]),
        top_k=st.sampled_from([0, 0, 1, 5, 700, 2000]),
        key=st.integers(-(2**63), 2**63 - 1),
    )
    return data.draw(st.lists(one, min_size=rows, max_size=rows))


def rows_of(data, rows: int, width: int) -> torch.Tensor:
    """Noise, of which some rows are zeros, some equal, and some hold one number that is far larger than the others."""
    x = torch.randn(rows, width) * data.draw(st.sampled_from([1e-25, 1e-3, 1.0, 50.0]))
    x[data.draw(st.integers(0, rows - 1))] = 0
    x[rows // 2 :: 7] = x[0].clone()
    x[data.draw(st.integers(0, rows - 1)) :: 2, data.draw(st.integers(0, width - 1))] *= 100
    return x


def masked(data, rows: int, device: str):
    """Logits, some of their rows, and what is allowed there: all or nothing of a word, or some of it."""
    vocab = data.draw(st.sampled_from([1, 31, 32, 33, 4000]))
    which, masks = masks_of(data, rows, vocab)
    return logits_of(rows, vocab, device), which.to(device), masks.to(device)


def masks_of(data, rows: int, vocab: int):
    which = torch.randperm(rows)[: data.draw(st.integers(1, rows))]
    masks = torch.randint(-(2**31), 2**31, (len(which), vocab // 32 + 2), dtype=torch.int32)
    masks[::2, ::3], masks[::3, 1::3] = 0, -1
    return which, masks


def choice(name: str, data, rows: int, dtype: torch.dtype):
    """Arguments of the ops that tell tokens from few logits."""
    wanted = [draw if draw.temperature == 0 or draw.top_k else draw._replace(top_k=9) for draw in draws(data, rows)]
    if name == "choose_among":
        count = data.draw(st.integers(1, 40))
        ids = torch.stack([torch.randperm(3000)[:count] for _ in range(rows)])
        ids[torch.rand(rows, count) < 0.2] = -1
        ids[torch.rand(rows, count) < 0.02] = -2
        return torch.randn(rows, count), ids, wanted
    outs, width = data.draw(st.sampled_from([1, 15, 64, 150, 3000])), data.draw(st.integers(1, 200))
    weight = PackedWeight.of(rows_of(data, outs, width).to(dtype))
    last = max(1 if draw.temperature == 0 else draw.top_k for draw in wanted)
    if name == "choose" and (last := data.draw(st.none() | st.just(masks_of(data, rows, outs)))) is not None:
        last[1][:, data.draw(st.integers(0, 9)) :] &= data.draw(st.sampled_from([-1, 0, 1 << 9]))
        token = data.draw(st.integers(0, outs - 1))
        last[1][:, token // 32] |= (1 << token % 32) - (1 << 32) * (token % 32 == 31)  # none is without any
    return rows_of(data, rows, width).to(dtype), weight, BoundedLogits.of(weight), wanted, last


def quantised_weight(kind_of_weight, data, outs: int, ins: int, device: str, dtype: torch.dtype):
    """Of any codes, with values as those of `rand`."""
    bits, kind = data.draw(
        st.sampled_from([(2, "integer"), (3, "integer"), (4, "integer"), (8, "integer"), (8, "e4m3")])
    )
    group = data.draw(st.sampled_from([0, 32, 64, 128]))
    zeros = kind == "integer" and data.draw(st.booleans())
    whole = not group or ins % group == 0
    scales = data.draw(st.sampled_from(SCALES))
    codes = Codes(bits, kind, group, zeros, whole and data.draw(st.booleans()), scales)
    weight = kind_of_weight(outs, ins, codes, dtype, torch.device(device))
    weight.prepare()
    weight.put(0, random_pieces(outs, ins, codes))
    return weight


def routing_of(data, count: int, top_k: int) -> Routing:
    groups = data.draw(st.sampled_from([g for g in (1, 2, 4) if count % g == 0 and count // g >= 2] or [1]))
    kept = data.draw(st.integers(-(-top_k * groups // count), groups))
    scoring, renormalised = data.draw(st.sampled_from(["softmax", "sigmoid"])), data.draw(st.booleans())
    corrected, scale = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 2.5]))
    return Routing(
        count=count,
        top_k=top_k,
        scoring=scoring,
        groups=groups,
        kept_groups=kept,
        corrected=corrected,
        renormalised=renormalised,
        scale=scale,
    )


def stacked(data, slots: int, outs: int, ins: int, device: str, dtype: torch.dtype) -> ops.Stacked:
    """Of experts, as some method holds them."""
    linear = ExpertLinear(ins, (outs,), slots, range(slots)).to(dtype)
    codes = data.draw(st.sampled_from([None, Codes(8), Codes(4, group=32, scales=torch.float16), Codes(8, "e4m3")]))
    plain = codes is None and data.draw(st.booleans())
    linear.hold(PLAIN if plain else method_for(torch.device(device), dtype, codes))
    linear._apply(lambda place: torch.full(place.shape, 3, dtype=place.dtype, device=device))
    linear.prepare()
    for i in range(slots):
        rows = torch.randn(outs, ins) / ins**0.5 if codes is None else random_pieces(outs, ins, codes)
        linear.method.put(linear.weight, linear._place(i), rows)
    return linear.stacked


def of_experts(name: str, data, rows: int, device: str, dtype: torch.dtype):
    """Arguments of the ops of a mixture of experts."""
    count = data.draw(st.sampled_from([1, 3, 8, 20]))
    top_k = data.draw(st.integers(1, min(count, 4)))
    if name == "route":
        routing = routing_of(data, count, top_k)
        correction = torch.randn(count).to(device) if routing.corrected else None
        return (4 * torch.randn(rows, count)).to(device), correction, routing
    experts = torch.stack([torch.randperm(count)[:top_k].sort().values for _ in range(rows)]).to(device)
    if name == "group_experts":
        return experts, count
    hidden, width = data.draw(st.sampled_from([32, 64, 96, 150])), data.draw(st.sampled_from([32, 64, 160]))
    if name == "combine_experts":
        made = torch.randn(rows * top_k, hidden + 10).to(device, dtype)[:, :hidden]
        return made, torch.randperm(rows * top_k).view(rows, top_k).to(device), torch.rand(rows, top_k).to(device)
    pairs, bounds, _ = ops.group_experts(experts, count)
    gate_up, down = (
        stacked(data, count, outs, ins, device, dtype) for outs, ins in ((2 * width, hidden), (hidden, width))
    )
    x = torch.randn(rows, hidden).to(device, dtype)
    return x, pairs, bounds, top_k, gate_up, down, data.draw(st.sampled_from(ops.ACTIVATIONS))


def case(name: str, data, device: str, dtype: torch.dtype):
    """(arguments, tensors changed in place) for one op with random shapes."""

    def rand(*shape):
        return torch.randn(*shape).to(device, dtype)

    def weight_of(size):  # of a norm: of what is normed, or wide
        return torch.randn(size).to(device, data.draw(st.sampled_from([dtype, torch.float32])))

    rows, width = data.draw(st.integers(1, 9)), 2 * data.draw(st.integers(1, 33))
    if name == "linear":
        return (rand(rows, width), rand(7, width), data.draw(st.sampled_from([None, rand(7)]))), []
    if name == "packed_linear":
        outs, wide = data.draw(st.sampled_from([1, 16, 63, 64, 150])), data.draw(st.booleans())
        width += data.draw(st.integers(0, 1))
        weight, bias = PackedWeight.of(rand(outs, width)), data.draw(st.sampled_from([None, rand(outs)]))
        return (rand(rows, width), weight, bias, torch.float32 if wide else dtype), []
    if name == "packed_rows":
        return (PackedWeight.of(rand(150, width + data.draw(st.integers(0, 1)))), torch.randint(0, 150, (rows,))), []
    if name in ("route", "group_experts", "expert_rows", "combine_experts"):
        return of_experts(name, data, rows, device, dtype), []
    if name == "add_shared":
        return (rand(rows, width), rand(rows, width), data.draw(st.sampled_from([None, 9 * rand(rows, 1)]))), []
    if "quantised" in name:
        outs, ins = data.draw(st.sampled_from([1, 16, 63, 150])), width + data.draw(st.sampled_from([0, 1, 200]))
        of = PackedQuantisedWeight if name.startswith("packed") else QuantisedWeight
        weight, bias = (
            quantised_weight(of, data, outs, ins, device, dtype),
            data.draw(st.sampled_from([None, rand(outs)])),
        )
        if name.endswith("rows"):
            return (weight, torch.randint(0, outs, (rows,)).to(device)), []
        return (rand(rows, ins), weight, bias, torch.float32 if data.draw(st.booleans()) else dtype), []
    if name == "rms_norm":
        return (rand(rows, width), weight_of(width), 1e-6), []
    if name == "add_rms_norm":
        return (rand(rows, width), rand(rows, width), weight_of(width), 1e-6), []
    if name == "rotary":
        half, out = data.draw(st.integers(1, width // 2)), None
        if data.draw(st.booleans()):
            out = rand(rows, 3, width + 5)[..., 2 : width + 2]
        return (rand(rows, 3, width), rand(rows, half), rand(rows, half), data.draw(st.booleans()), out), []
    if name == "head_linear":
        heads, outs, ins = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([1, 16, 70])), width // 2
        weight = HeadWeight(heads, outs, ins, dtype, device, device == "cpu" and native.missing() is None)
        weight.prepare()
        weight.put(rand(heads, outs, ins))
        return (rand(rows, heads, width)[..., 1 : ins + 1], weight, rand(rows, heads, outs + 3)[..., 2 : outs + 2]), [2]
    if name == "gate_mul":
        return (3 * rand(rows, width), data.draw(st.sampled_from(ops.ACTIVATIONS))), []
    if name == "mask_logits":
        return masked(data, rows, device), [0]
    if name == "argmax":
        return (torch.randn(rows, data.draw(st.sampled_from([1, 15, 16, 33, 40000]))).to(device),), []
    if name == "sample":
        return (logits_of(rows, data.draw(st.sampled_from(VOCABULARIES)), device), draws(data, rows)), []
    if name.startswith("choose"):
        return choice(name, data, rows, dtype), []
    if name == "gumbel_noise":
        keys = torch.tensor([row_key(data.draw(st.integers(-(2**63), 2**63 - 1)), i) for i in range(rows)])
        return (keys.to(device), torch.arange(width, device=device)[None]), []
    if name == "branch_attention":
        prompt, beams, before = (data.draw(st.integers(*range_)) for range_ in ((1, 700), (1, 9), (0, 150)))
        kv_heads, group, dim = data.draw(st.sampled_from([(1, 1, 8), (2, 3, 16), (4, 2, 24)]))
        order, padding = data.draw(st.sampled_from(["block", "token"])), data.draw(st.sampled_from([0, 0, 36]))
        latent = data.draw(st.sampled_from([0, LATENT.get(dim, 0)])) if kv_heads == 1 else 0
        cache = cache_of(order, kv_heads, dim, padding, device, data.draw(st.sampled_from(STORED)) or dtype, latent)
        batch = branches_of(prompt, beams, before, device, data.draw(st.booleans()))
        window = data.draw(st.sampled_from([None, 1, 100]))
        q = rand(beams, kv_heads * group, dim)
        return (q, cache, batch.branches[0], dim**-0.5, window, batch.scratch), []
    return paged(name, data, device, dtype, rand)


def paged(name: str, data, device: str, dtype: torch.dtype, rand):
    """The same for ops on a cache."""
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 700), st.sampled_from([1, 1, 2, 65, 600])), min_size=1, max_size=5)
    )
    batch = batch_of(lengths, device, consecutive=data.draw(st.booleans()))
    kv_heads, group, dim = data.draw(st.sampled_from(HEADS))
    latent = 0
    if name in ("store_kv", "attention") and data.draw(st.booleans()):
        dim, latent = data.draw(st.sampled_from(list(LATENT.items())))
        kv_heads, group = 1, data.draw(st.sampled_from([1, 3, 16]))
    order, padding = data.draw(st.sampled_from(["block", "token"])), data.draw(st.sampled_from([0, 0, 36]))
    cache = cache_of(order, kv_heads, dim, padding, device, data.draw(st.sampled_from(STORED)) or dtype, latent)
    total = sum(n for _, n in lengths)
    if name == "qkv_to_cache":
        wide = data.draw(st.sampled_from([dtype, torch.float32]))
        norms = data.draw(st.sampled_from([None, (rand(dim).to(wide), rand(dim).to(wide))]))
        half = data.draw(st.sampled_from([dim // 2, dim // 4]))
        rotation = rand(total, half), rand(total, half)
        return (rand(total, kv_heads * (group + 2) * dim), norms, 1e-6, rotation, cache, batch), [4]
    if name == "store_kv":
        return (rand(total, kv_heads, dim), None if latent else rand(total, kv_heads, dim), cache, batch), [2]
    if name == "attention":
        window = None if latent else data.draw(st.sampled_from([None, 1, 100]))
        return (rand(total, kv_heads * group, dim), cache, batch, scale_of(data, dim), window), []
    raise AssertionError(f"say here how to call {name}")


@pytest.mark.parametrize(
    ("isa", "name", "backend", "device"),
    [*BY_SET, *((None, *case) for case in BACKENDS if case not in EXACT)],
    indirect=["isa"],
)
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(list(TOLERANCE)))
def test_backend_agrees_with_the_reference(name, backend, device, data, dtype):
    op = OPS[name]
    alone = data.draw(st.sampled_from([0, 1 << 16, 1 << 30]))  # a small model is never long enough by itself
    with mock.patch.object(sdpa, "ALONE", alone), mock.patch.object(sdpa, "TOGETHER", 1 << 17):
        agree(op, name, backend, device, data, dtype)


def agree(op, name, backend, device, data, dtype):
    torch.manual_seed(0)
    arguments, changed = case(name, data, device, dtype)
    copies = tuple(map(clone, arguments))
    with using(name, backend, device):
        ours = op[device](*arguments)
    with op.using("reference"):
        theirs = op[device](*copies)
    pairs = [pair for i in changed for pair in zip(tensors(arguments[i]), tensors(copies[i]), strict=True)]
    scaled = any(isinstance(a, LayerKV) and a.scales is not None for a in arguments)
    tolerance = max(TOLERANCE[dtype], IN_WHOLE if scaled else 0)
    if name == "attention" and arguments[3] * arguments[0].shape[-1] ** 0.5 > 1:
        tolerance *= STEEP
    if isinstance(ours, tuple):
        pairs += zip(ours, theirs, strict=True)
    elif ours is not None:
        pairs.append((ours, theirs))
    for a, b in pairs:
        assert a.dtype == b.dtype
        if name == "choose":
            assert torch.equal(a, b)
        assert torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance)


def step_of(start: int, rows: int, blocks) -> SequenceStep:
    return SequenceStep("", start, list(range(rows)), blocks, 1, SamplingParams(), 0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = native.threads()
    native.set_threads(count)
    try:
        yield
    finally:
        native.set_threads(before)


@pytest.mark.parametrize("device", [device for name, _, device in EXACT if name == "attention"])
@pytest.mark.parametrize("order", ["block", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100, "latent"])
@pytest.mark.parametrize("isa", [pytest.param(isa, marks=marks) for isa, marks in SETS], indirect=True)
@settings(max_examples=6)
@given(data=st.data(), stored=st.sampled_from([None, torch.int8]))
def test_attention_is_the_same_to_the_bit_however_rows_are_cut(order, dtype, window, device, data, stored):
    """One sequence over two splits of the kernel: whole, in chunks, row by row, beside others, on one thread."""
    kv_heads, group, dim = data.draw(st.sampled_from(HEADS))
    latent = 0
    if window == "latent":
        window, kv_heads, group = None, 1, data.draw(st.sampled_from([2, 16]))
        dim, latent = data.draw(st.sampled_from(list(LATENT.items())))
    length = data.draw(st.sampled_from([70, 1000, 1100, 2100]))
    torch.manual_seed(0)
    q, scale = torch.randn(length, kv_heads * group, dim).to(device, dtype), scale_of(data, dim)
    cache = cache_of(order, kv_heads, dim, 0, device, stored or dtype, latent)
    (span,) = batch_of([(0, length)], device, consecutive=False).spans

    def compute(start: int, rows: int, others=()):
        steps = [step_of(start, rows, tuple(span.ids)), *others]
        mine = q[start : start + rows]
        rest = torch.randn(sum(len(s.tokens) for s in others), *q.shape[1:]).to(q)
        batch = Batch(steps, torch.device(device))
        return ops.attention(torch.cat((mine, rest)), cache, batch, scale, window)[:rows]

    with OPS["attention"].using("native"):
        whole = compute(0, length)
        for rows in (1, 2, 3, 64, 65, 500):
            start = data.draw(st.integers(0, length - min(rows, length)))
            part = compute(start, min(rows, length), [step_of(i, 1 + i % 2, (7, 9)) for i in range(60, 70)])
            assert torch.equal(part, whole[start : start + rows]), (start, rows)
            with threads(1):
                assert torch.equal(compute(start, min(rows, length)), part), (start, rows)
        where = range(20, 20 + len(span.ids))  # the same blocks in consecutive places
        for x in (cache.values, cache.scales):
            if x is not None:
                x[list(where)] = x[list(span.ids)].clone()
        batch = Batch([step_of(length - 1, 1, where)], torch.device(device))
        assert torch.equal(ops.attention(q[-1:], cache, batch, scale, window)[0], whole[-1])


@pytest.mark.parametrize(("isa", "name", "backend", "device"), BY_SET, indirect=["isa"])
@settings(max_examples=6)
@given(data=st.data(), dtype=st.sampled_from(list(TOLERANCE)))
def test_threads_change_no_bit(name, backend, device, data, dtype):
    torch.manual_seed(0)
    arguments, changed = case(name, data, device, dtype)
    copies = tuple(map(clone, arguments))
    with OPS[name].using(backend):
        ours = OPS[name][device](*arguments)
        with threads(1):
            theirs = OPS[name][device](*copies)
    for i in changed:
        assert all(map(torch.equal, tensors(arguments[i]), tensors(copies[i])))
    if ours is not None:
        assert all(map(torch.equal, *((x if isinstance(x, tuple) else (x,)) for x in (ours, theirs))))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("normed", "stored"), [(None, None), ("alike", None), ("wide", None), ("wide", torch.int8)])
@pytest.mark.parametrize("half", [12, 9])
def test_one_pass_is_the_same_to_the_bit_as_its_parts(half, normed, stored, dtype):
    if native.missing():
        pytest.skip("no kernels")
    torch.manual_seed(0)
    batch = batch_of([(0, 100), (63, 1)], "cpu", consecutive=False)
    qkv = torch.randn(101, (6 + 2 * 2) * 24).to(dtype)
    rotation = torch.randn(101, half).to(dtype), torch.randn(101, half).to(dtype)
    weight = torch.float32 if normed == "wide" else dtype
    norms = (torch.randn(24).to(weight), torch.randn(24).to(weight)) if normed else None
    cache = cache_of("block", 2, 24, 0, "cpu", stored or dtype)
    other = clone(cache)
    q, k, v = qkv.clone().unflatten(1, (10, 24)).split((6, 2, 2), dim=1)
    if norms:
        q, k = ops.rms_norm(q, norms[0], 1e-6), ops.rms_norm(k, norms[1], 1e-6)
    ops.store_kv(ops.rotary(k, *rotation), v, other, batch)
    assert torch.equal(ops.qkv_to_cache(qkv, norms, 1e-6, rotation, cache, batch), ops.rotary(q, *rotation))
    assert all(map(torch.equal, tensors(cache), tensors(other)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [backend.name for backend in OPS["store_kv"].backends])
@pytest.mark.parametrize("stored", LARGEST)
def test_what_is_stored_in_8_bits_is_near_and_where_it_is_no_number_it_says_so(stored, backend, device):
    """Over what places had; a head's values count by themselves."""
    if not OPS["store_kv"].backend(backend).serves(device):
        pytest.skip(f"not on {device}")
    torch.manual_seed(0)
    batch = batch_of([(60, 70)], device, consecutive=False)
    cache = cache_of("block", 2, 24, 0, device, stored)
    k, v = torch.randn(2, 70, 2, 24).to(device) * torch.rand(70, 2, 1).to(device)
    k[3, 1], v[5, 0], k[6, 0, 7], v[7, 1, 2] = 0.0, 1e-35, float("inf"), float("nan")
    with OPS["store_kv"].using(backend):
        for rows in (v, k):  # what is written last counts
            ops.store_kv(rows, rows, cache, batch)
        ops.store_kv(k, v, cache, batch)
    found = cache.of_tokens(batch.slot_blocks, batch.slot_offsets, torch.float32)
    for mine, rows in ((found[:, 0], k), (found[:, 1], v)):
        finite = rows.isfinite().all(-1)
        assert finite.sum() == 139
        assert not mine[~finite].isfinite().any()
        largest = rows[finite].abs().amax(-1, keepdim=True)
        within = largest * (0.0041 if stored == torch.int8 else 0.04) + 1e-30
        assert ((mine[finite] - rows[finite]).abs() <= within).all()
    if stored == torch.int8 and device == "cpu":  # and from there it reaches whoever attends to it
        q = torch.randn(70, 4, 24)
        for how in OPS["attention"].backends:
            if how.serves(device):
                with OPS["attention"].using(how.name):
                    rows = ops.attention(q, cache, batch, 0.2).isfinite().all(-1)
                assert not rows[7:].any()


@pytest.mark.parametrize(("name", "backend", "device"), [b for b in BACKENDS if b[0] == "sample"])
@settings(max_examples=15)
@given(data=st.data(), vocab=st.sampled_from(VOCABULARIES))
def test_a_row_is_sampled_alike_in_any_company(name, backend, device, data, vocab):
    torch.manual_seed(0)
    logits, wanted = logits_of(9, vocab, device), draws(data, 9)
    with OPS[name].using(backend):
        together = ops.sample(logits, wanted).tolist()
        assert together == [int(ops.sample(logits[i : i + 1], [wanted[i]])) for i in range(9)]


@pytest.mark.parametrize(("name", "backend", "device"), [b for b in BACKENDS if b[0] == "sample"])
def test_every_backend_draws_the_same_noise(name, backend, device):
    """Over equal logits, and over ones that leave a few tokens far ahead, the noise of every token decides."""
    wanted = [ops.Draw(1.0, 1.0, 0.0, 0, row_key(seed, 7)) for seed in range(30)]
    logits = torch.zeros(30, 50001, device=device)
    noise = gumbel_noise(torch.tensor([d.key for d in wanted], device=device), torch.arange(50001, device=device)[None])
    with OPS[name].using(backend):
        assert torch.equal(ops.sample(logits, wanted), noise.argmax(-1))
        logits[:, 5::97] = 1e6
        assert torch.equal(ops.sample(logits, wanted), (logits + noise).argmax(-1))


@pytest.mark.parametrize(("name", "backend", "device"), [b for b in BACKENDS if b[0] == "sample"])
def test_equal_logits_are_kept_by_the_lowest_id(name, backend, device):
    logits = torch.zeros(200, 500, device=device)
    logits[:, 300:] = 1.0
    keys = [row_key(seed, 7) for seed in range(200)]
    with OPS[name].using(backend):
        share = 100 * math.e / (300 + 200 * math.e)  # of the first hundred of the likely ones
        kept = ops.sample(logits, [ops.Draw(1.0, share, 0.0, 0, key) for key in keys])
        assert 300 <= int(kept.min()) < 310
        assert 390 <= int(kept.max()) <= 400  # rounding may add one


@pytest.mark.parametrize(("name", "backend", "device"), [b for b in BACKENDS if b[0] == "argmax"])
@pytest.mark.parametrize("vocab", [1, 16, 37, 5000])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_argmax_is_the_first_and_tells_rows_that_are_no_numbers(name, backend, device, vocab, wrong):
    logits = torch.zeros(3, vocab, device=device)
    logits[0, vocab // 2 :] = 1.0
    logits[1, vocab - 1] = wrong
    with using(name, backend, device):
        tokens, finite = ops.argmax(logits)
    assert tokens[0] == vocab // 2
    assert tokens[2] == 0
    assert finite.tolist() == [True, False, True]
    assert 0 <= tokens[1] < vocab


@pytest.mark.parametrize(("name", "backend", "device"), [b for b in BACKENDS if b[0] == "choose"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_nothing_is_chosen_from_what_is_no_number(name, backend, device, wrong):
    weight = PackedWeight.of(torch.eye(40))
    x = torch.eye(40)[[7, 7, 39]]
    x[1, 3] = wrong
    with OPS[name].using(backend):
        chosen = ops.choose(x, weight, BoundedLogits.of(weight), [ops.Draw(0.0, 1.0, 0.0, 0, 0)] * 3)
        assert chosen.tolist() == [7, -1, 39]


def test_there_are_no_bounds_of_what_is_no_number_or_too_large():
    if native.missing() is not None:
        pytest.skip("no kernels")
    for wrong in (torch.nan, torch.inf, 1e30):
        weight = torch.ones(20, 33)
        weight[19, 32] = wrong
        assert BoundedLogits.of(PackedWeight.of(weight)) is None


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
                step = SequenceStep("", start, [0], blocks, 1, SamplingParams(), 0)
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
    prompts = cache.values[span.prompt.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :prompt]
    for row, slots in enumerate(span.slots):
        # its places, copied to where a sequence of its own would have them
        own = cache.values[slots // BLOCK_TOKENS, :, :, slots % BLOCK_TOKENS].permute(1, 2, 0, 3)
        whole = torch.cat([prompts, own], 2)
        blocks = -(-whole.shape[2] // BLOCK_TOKENS)
        padded = torch.nn.functional.pad(whole, (0, 0, 0, blocks * BLOCK_TOKENS - whole.shape[2]))
        alone = LayerKV(padded.unflatten(2, (blocks, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4).contiguous())
        step = SequenceStep("", prompt + before, [0], range(blocks), 1, SamplingParams(), 0)
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
    bits = mix((key & MASK) + (token + 1) * GOLDEN) >> 32
    uniform = ((torch.tensor(bits, dtype=torch.int64).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    want = -torch.log(-torch.log1p(-uniform))
    assert torch.equal(gumbel_noise(torch.tensor([key]), torch.tensor([[token]]))[0, 0], want)
