"""How long a step takes on a device: a sum of rooflines (xLLM, section 3.1).

The parts of a step run one after the other, so each has its own roofline and the step is their sum:

    t = overhead + sum over parts of max(compute factor * flops / peak, memory factor * bytes / bandwidth)

Prompts i bring n_i new tokens over c_i cached ones; B sequences decode one token each, with K tokens of KV together.

    part               flops                                       bytes
    gemm               2 * layer_params * (sum n_i + B)            weights of the layers
    lm_head            2 * head_params * (rows with logits)        weights of the head
    prefill_attention  4 * L * H * d * sum n_i * (c_i + n_i / 2)   KV of c_i + n_i
    decode_attention   4 * L * H * d * K                           KV of K
    collectives        two all-reduces of a row of `hidden` values per layer and token, over the devices' links

with L layers, H query heads and d their width. Activations and the writing of new KV are small beside these and left
out. Factors are 1 until something has been measured (`sched.factors`).

Layers with a window read and multiply at most that: K and c_i + n_i / 2 are means over the layers (`StepTime.seen`).

A part's size decides which of its two bounds holds, small ones memory and large ones arithmetic, and each bound has a
factor of its own. So a time never falls when its work grows, whatever the factors are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, inf, sqrt
from typing import Any, NamedTuple

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.hf_config import count, mixed_windows

__all__ = [
    "DEVICES",
    "GEOMETRIES",
    "GRAIN",
    "PARTS",
    "DeviceModel",
    "ModelShape",
    "Roofline",
    "StepTime",
    "read_shape",
]

GRAIN = 64  # tokens: a budget is a multiple of it
MARGIN, SPREADS = 0.9, 2.0  # of a limit at most; standard deviations by which a step may miss its prediction
PARTS = ("gemm", "lm_head", "prefill_attention", "decode_attention")  # those with a roofline, in this order everywhere

# Data sheets of the makers: dense bfloat16, memory, and half of what they give for links in both directions together.
# Hosts are behind PCIe 5.0 x16 where a value is named, 63e9 bytes/s of which four fifths are usable; else behind 4.0.
DEVICES = {
    "a100": DeviceModel(peak_flops=312e12, bandwidth=2.039e12, memory=80 * 10**9, link_bandwidth=300e9),
    "h100": DeviceModel(
        peak_flops=989e12, bandwidth=3.35e12, memory=80 * 10**9, link_bandwidth=450e9, host_bandwidth=50e9
    ),
    "h200": DeviceModel(
        peak_flops=989e12, bandwidth=4.8e12, memory=141 * 10**9, link_bandwidth=450e9, host_bandwidth=50e9
    ),
    "l4": DeviceModel(peak_flops=121e12, bandwidth=0.3e12, memory=24 * 10**9),  # 242e12 is with sparsity
    "l40s": DeviceModel(peak_flops=362e12, bandwidth=0.864e12, memory=48 * 10**9),
    # there is no public data sheet: 376 TFLOPS is what vendors of Atlas A2 servers name for their larger variant, where
    # xLLM's own model takes 390; 1.6 TB/s is xLLM's; seven HCCS links of 56 GB/s both ways together
    "ascend-910b": DeviceModel(peak_flops=376e12, bandwidth=1.6e12, memory=64 * 10**9, link_bandwidth=196e9),
}


def _every_sixth(layers: int, window: int) -> tuple[int | None, ...]:
    """Windows on all layers but each sixth, as Gemma 3 has them."""
    return tuple(window if (i + 1) % 6 else None for i in range(layers))


GEOMETRIES = {
    "qwen3-0.6b": ModelShape(
        layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, tied=True
    ),
    "qwen3-8b": ModelShape(
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936
    ),
    "qwen3-32b": ModelShape(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25600, vocab=151936
    ),
    "qwen-7b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008, vocab=151936
    ),
    "qwen2-7b": ModelShape(
        layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064
    ),
    "qwen2.5-32b": ModelShape(
        layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064
    ),
    "llama-2-70b": ModelShape(
        layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocab=32000
    ),
    "gemma-3-27b": ModelShape(
        layers=62,
        hidden=5376,
        heads=32,
        kv_heads=16,
        head_dim=128,
        intermediate=21504,
        vocab=262208,
        tied=True,
        windows=_every_sixth(62, 1024),
    ),
    "llama-3.1-8b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
    ),
}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The geometry that a config.json of a dense decoder describes. Raises ConfigError naming what is missing."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    return ModelShape(
        layers=count(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count(config, "num_key_value_heads", heads),
        head_dim=count(config, "head_dim", hidden // heads),
        intermediate=count(config, "intermediate_size"),
        vocab=count(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=mixed_windows(config),
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """A part's time if only arithmetic counted, if only memory did, and if only the links between devices did."""

    compute_ms: float
    memory_ms: float
    link_ms: float = 0.0

    @property
    def ms(self) -> float:
        return max(self.compute_ms, self.memory_ms, self.link_ms)


class _Part(NamedTuple):
    """Arithmetic and bytes of one unit of a part, and how fast they are.

    Attributes:
        compute, memory: factors.
        compute_slope, memory_slope: ms for one unit, with the factors.
    """

    flops: int
    peak: float
    moved: int
    bandwidth: float
    compute: float
    memory: float
    compute_slope: float
    memory_slope: float

    def ms(self, operands: float, moved: float) -> float:
        """Of so many units of arithmetic and of memory."""
        compute = self.compute * (self.flops * operands / self.peak * 1e3)
        memory = self.memory * (self.moved * moved / self.bandwidth * 1e3)
        return compute if compute > memory else memory

    def bounds(self, operands: float, moved: float) -> tuple[float, float]:
        """ms if only arithmetic counted, and if only memory did; without factors."""
        return self.flops * operands / self.peak * 1e3, self.moved * moved / self.bandwidth * 1e3


class _Model(NamedTuple):
    """Of a step: ms that every one has, and PARTS."""

    overhead: float
    gemm: _Part
    head: _Part
    prefill: _Part
    decode: _Part


@lru_cache(maxsize=64)
def _work(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Operations and bytes of one unit of each of PARTS."""
    layers, head = shape.layer_params, shape.head_params
    pair_flops = 4 * shape.layers * shape.heads * shape.head_dim  # of one token looking at one
    return (
        (2 * layers, shape.layer_bytes),
        (2 * head, shape.head_bytes),
        (pair_flops, shape.kv_bytes_per_token),
        (pair_flops, shape.kv_bytes_per_token),
    )


@lru_cache(maxsize=64)
def _sights(shape: ModelShape) -> tuple[tuple[float, float], ...]:
    """(window, share of the layers that have it); empty where all layers see everything."""
    if not any(shape.windows):
        return ()
    windows = [inf if window is None else float(window) for window in shape.windows]
    return tuple((window, windows.count(window) / len(windows)) for window in sorted(set(windows)))


_FACTORS = tuple((part, f"{part}:compute", f"{part}:memory") for part in PARTS)  # their names


@dataclass(frozen=True)
class StepTime:
    """Predicts steps of one model on one device. Creation is cheap, since factors change often.

    Attributes:
        factors: what measured time is of the roofline, 1 where nothing is named: "PART:compute" and "PART:memory" for
            one bound of a part, "PART" for what has none of its own; "collectives" and "overhead" have no bounds.
            Names of anything else are ignored.
        spread: by how much measured steps lately missed the prediction, as a share of it; 0 where nothing was measured.
    """

    device: DeviceModel
    shape: ModelShape
    factors: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0

    @property
    def margin(self) -> float:
        """Share of a limit that a step may be predicted to take, so that it hardly ever takes more than the limit."""
        return min(MARGIN, 1 / (1 + SPREADS * self.spread))

    @cached_property
    def _model(self) -> _Model:
        """All at once: in Python 3.11 every property that is kept takes a lock."""
        factors, work = self.factors, _work(self.shape)
        peak, bandwidth = self.device.peak_flops, self.device.bandwidth
        parts = []
        for (part, by_compute, by_memory), (flops, moved) in zip(_FACTORS, work, strict=True):
            both = factors.get(part, 1.0)
            compute, memory = factors.get(by_compute, both), factors.get(by_memory, both)
            slopes = compute * flops / peak * 1e3, memory * moved / bandwidth * 1e3
            parts.append(_Part(flops, peak, moved, bandwidth, compute, memory, *slopes))
        return _Model(factors.get("overhead", 1.0) * self.device.overhead_ms, *parts)

    @cached_property
    def sights(self) -> tuple[tuple[float, float], ...]:
        """(window, share of the layers that have it), inf for none; empty where no layer has one."""
        return _sights(self.shape)

    def seen(self, rows: int, kv_tokens: float) -> float:
        """Of so many tokens before them, those that so many rows see, together; in the mean over the layers. Their
        contexts are taken to be alike."""
        sights = self.sights
        return sum([share * min(kv_tokens, window * rows) for window, share in sights]) if sights else kv_tokens

    def _looked_at(self, prefills: Sequence[tuple[int, int]]) -> tuple[int, float, float]:
        """New tokens, pairs of tokens of which one looks at the other, and tokens whose KV is read, of prompts."""
        tokens, pairs, read = 0, 0.0, 0.0
        if self.sights:
            for new, cached in prefills:
                tokens += new
                pairs += self.seen(new, new * (cached + new / 2))
                read += new + self.seen(1, cached)
            return tokens, pairs, read
        for new, cached in prefills:
            tokens += new
            pairs += new * (cached + new / 2)
            read += new + cached
        return tokens, pairs, read

    @cached_property
    def _link(self) -> tuple[float, float]:
        """ms of a step, and of each token in it."""
        factor = self.factors.get("collectives", 1.0)
        each_step, each_token = _all_reduces(self.device, self.shape)
        return factor * each_step, factor * each_token

    def parts(
        self,
        prefills: Sequence[tuple[int, int]] = (),
        decodes: int = 0,
        kv_tokens: int = 0,
        logit_rows: int | None = None,
    ) -> dict[str, Roofline]:
        """The parts of a step by name, without their factors.

        Args:
            prefills: (new tokens, cached tokens before them) of each prompt or part of one.
            decodes: sequences that compute one token.
            kv_tokens: that they read, together.
            logit_rows: rows that a token is sampled from; by default one for every sequence.
        """
        bounds, link_ms = self.bounds(prefills, decodes, kv_tokens, logit_rows)
        parts = {name: Roofline(*both) for name, both in zip(PARTS, bounds, strict=True)}
        return {**parts, "collectives": Roofline(0.0, 0.0, link_ms)}

    def bounds(
        self, prefills: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, logit_rows: int | None
    ) -> tuple[Sequence[tuple[float, float]], float]:
        """What `parts` says in numbers alone: ms by arithmetic and ms by memory of each of PARTS, and ms of links."""
        new, pairs, read = self._looked_at(prefills)
        tokens, kv = decodes + new, self.seen(decodes, kv_tokens)
        rows = len(prefills) + decodes if logit_rows is None else logit_rows
        each_step, each_token = _all_reduces(self.device, self.shape)
        _, gemm, head, prefill, decode = self._model
        bounds = (
            gemm.bounds(tokens, 1 if tokens else 0),
            head.bounds(rows, 1 if rows else 0),
            prefill.bounds(pairs, read),
            decode.bounds(kv, kv),
        )
        return bounds, each_step + each_token * tokens if tokens else 0.0

    def step_ms(
        self,
        prefills: Sequence[tuple[int, int]] = (),
        decodes: int = 0,
        kv_tokens: int = 0,
        logit_rows: int | None = None,
    ) -> float:
        """Time of a whole step; arguments as in `parts`. Takes a few microseconds."""
        new, pairs, read = self._looked_at(prefills)
        kv = self.seen(decodes, kv_tokens)
        rows = len(prefills) + decodes if logit_rows is None else logit_rows
        model = self._model
        attention = model.prefill.ms(pairs, read) if prefills else 0.0
        return model.overhead + (self._rows_ms(decodes + new, rows) + attention + model.decode.ms(kv, kv))

    def prefill_ms(self, tokens: int, cached: int = 0, *, budget: int, decodes: int = 0, kv_tokens: int = 0) -> float:
        """Time to prefill a prompt in chunks: the sum of `step_ms` of their steps, in a few microseconds however many,
        or for each of them where there are windows.

        Args:
            tokens: of the prompt that are to be computed; nothing takes no time.
            cached: before those.
            budget: tokens of the prompt in every step but the last.
            decodes: sequences that compute one token in each of the steps.
            kv_tokens: that they read in each, together.
        """
        if tokens <= 0:
            return 0.0
        full = (tokens - 1) // budget
        last = tokens - full * budget
        model, kv = self._model, self.seen(decodes, kv_tokens)
        each = model.overhead + model.decode.ms(kv, kv)
        end = each + self._rows_ms(last + decodes, decodes + 1) + self._chunks_ms(1, last, cached + full * budget)
        if not full:
            return end
        return full * (each + self._rows_ms(budget + decodes, decodes)) + self._chunks_ms(full, budget, cached) + end

    def load_ms(self, tokens: int) -> float:
        """Time to bring the KV of so many tokens from the host's memory, or there, with nothing else on the way.

        A layout of one piece per block reaches the way's bandwidth, so there is nothing to learn but that; see
        `sched.local.offload`.
        """
        return tokens * self.shape.kv_bytes_per_token / self.device.host_bandwidth * 1e3

    def load_blocks_ms(self, blocks: int) -> float:
        """The same of so many blocks, each of one group of layers."""
        return blocks * self.shape.block_bytes / self.device.host_bandwidth * 1e3

    def copy_ms(self, tokens: int) -> float:
        """Time to copy the KV of so many tokens inside the device's memory."""
        return 2 * tokens * self.shape.kv_bytes_per_token / self.device.bandwidth * 1e3

    def largest_prefill(self, limit_ms: float, low: int, high: int) -> int:
        """The largest multiple of GRAIN up to `high` whose prompt, prefilled in one step, stays within the limit; at
        least `low`."""
        sizes = range(GRAIN, high + 1, GRAIN)
        fitting = bisect_right(sizes, limit_ms, key=lambda tokens: self.step_ms([(tokens, 0)]))
        return max(low, fitting * GRAIN)

    def largest_chunk(self, limit_ms: float, cached: int, decodes: int, kv_tokens: int, high: int) -> int:
        """The most tokens of a prompt, up to `high`, whose step beside those decodes stays within the limit; 0 if none
        do.

        Args:
            cached: tokens of the prompt before them.
            decodes, kv_tokens: as in `parts`.
        """
        if self.sights:  # no polynomials
            fits = range(1, high + 1)
            return bisect_right(fits, limit_ms, key=lambda n: self.step_ms([(n, cached)], decodes, kv_tokens))
        each_step, each_token = self._link
        overhead, gemm, head, attention, decode = self._model
        fixed = overhead + head.ms(decodes + 1, 1) + decode.ms(kv_tokens, kv_tokens)
        left = limit_ms - fixed - each_step - each_token * decodes
        # the time is the largest of four polynomials, one for each choice of bounds: each of them has to stay within
        most = float(high)
        for slope, constant in ((gemm.compute_slope, gemm.compute_slope * decodes), (0.0, gemm.memory_slope)):
            linear = slope + each_token
            by_memory = linear + attention.memory_slope
            most = min(most, (left - constant - attention.memory_slope * cached) / by_memory)
            most = min(
                most, _root(attention.compute_slope / 2, linear + attention.compute_slope * cached, constant - left)
            )
        fitting = int(max(0.0, most))
        # the last bit of rounding
        while fitting and self.step_ms([(fitting, cached)], decodes, kv_tokens) > limit_ms:
            fitting -= 1
        while fitting < high and self.step_ms([(fitting + 1, cached)], decodes, kv_tokens) <= limit_ms:
            fitting += 1
        return fitting

    def utilisation(
        self,
        prefills: Sequence[tuple[int, int]] = (),
        decodes: int = 0,
        kv_tokens: int = 0,
        logit_rows: int | None = None,
    ) -> tuple[float, float]:
        """How much of a step the arithmetic and the memory are busy, each from 0 to 1; arguments as in `parts`. What
        is larger is the bound that more of the same would meet."""
        parts = self.parts(prefills, decodes, kv_tokens, logit_rows).values()
        ms = self.step_ms(prefills, decodes, kv_tokens, logit_rows)
        if not ms:
            return 0.0, 0.0
        return min(1.0, sum(p.compute_ms for p in parts) / ms), min(1.0, sum(p.memory_ms for p in parts) / ms)

    def _rows_ms(self, tokens: int, rows: int) -> float:
        """Everything that depends on how many tokens there are and not on what they look at."""
        model = self._model
        ms = model.gemm.ms(tokens, 1 if tokens else 0) + model.head.ms(rows, 1 if rows else 0)
        if self.device.tensor_parallel == 1 or not tokens:
            return ms
        each_step, each_token = self._link
        return ms + each_step + each_token * tokens

    def _chunks_ms(self, chunks: int, size: int, cached: int) -> float:
        """Attention of consecutive chunks of a prompt, the first over `cached` tokens.

        Over c tokens a chunk takes compute * size * (c + size / 2), or memory * (c + size) if that is more. The first
        is below the second at most up to some c, and above it from there on.
        """
        if self.sights:
            looks = [self._looked_at([(size, cached + size * i)]) for i in range(chunks)]
            return sum([self._model.prefill.ms(pairs, read) for _, pairs, read in looks])
        compute, memory = self._model.prefill.compute_slope, self._model.prefill.memory_slope
        steeper = compute * size - memory
        if steeper <= 0:
            by_memory = chunks
        else:
            crossing = size * (memory - compute * size / 2) / steeper
            by_memory = min(chunks, max(0, ceil((crossing - cached) / size)))
        by_compute = chunks - by_memory
        # sums of c over the chunks of either kind
        early = by_memory * cached + size * (by_memory * (by_memory - 1) // 2)
        all_of_them = chunks * cached + size * (chunks * (chunks - 1) // 2)
        return memory * (early + by_memory * size) + compute * size * (all_of_them - early + by_compute * size / 2)


def _all_reduces(device: DeviceModel, shape: ModelShape) -> tuple[float, float]:
    """(ms for a step, ms for each token in it) of two all-reduces per layer. In a ring each device sends all but its
    own share of the row twice."""
    count, size = 2 * shape.layers, device.tensor_parallel
    if size == 1:
        return 0.0, 0.0
    sent = 2 * (size - 1) / size * shape.hidden * shape.bytes_per_value
    return count * device.link_latency_us / 1e3, count * sent / device.link_bandwidth * 1e3


def _root(square: float, linear: float, constant: float) -> float:
    """The x above 0 with square * x**2 + linear * x + constant = 0; 0 without one. The first two are not negative."""
    if constant >= 0:
        return 0.0
    # this form stays exact where square is next to nothing
    return -2 * constant / (linear + sqrt(linear * linear - 4 * square * constant))
