"""How long a step takes on a device: a sum of rooflines (xLLM, section 3.1).

The parts of a step run one after the other, so each has its own roofline and the step is their sum:

    t = overhead + sum over parts of max(compute factor * flops / peak, memory factor * bytes / bandwidth)

Prompts i bring n_i new tokens over c_i cached ones; B sequences decode one token each, with K tokens of KV together.

    part               flops                                       bytes
    gemm               2 * dense_params * (sum n_i + B)            weights of the layers, without experts
    experts            2 * params of k experts * (sum n_i + B)     weights of those that any token has chosen
    lm_head            2 * head_params * (rows with logits)        weights of the head
    prefill_attention  4 * L * H * d * sum n_i * (c_i + n_i / 2)   KV of c_i + n_i
    decode_attention   4 * L * H * d * K                           KV of K
    collectives        over the devices' links: `sched.collectives`

with L layers, H query heads and d their width. Activations and the writing of new KV are small beside these and left
out. Factors are 1 until something has been measured (`sched.factors`).

Of N experts in a layer t tokens that choose k each are expected to choose N * (1 - (1 - k/N) ** t). Groups that
have the experts together choose together, and the busiest device computes `imbalance` times the mean of tokens.

Latent attention (`Latents`) reads one vector of r + e values a token, with the rank r and rotary part e. Decoding
multiplies it as it is, 2 * L * H * (2 * r + e) * K; prefill makes K and V of it, in every chunk for all before it.

A vision tower that looks at images of t_i tokens has a part of its own, `encode_ms`: flops of all of them, with full
attention within each image, and the tower's weights once. Beside a step of the language model, in a stream of its own
(xLLM, section 3.3), neither ends before what it takes alone, nor before the arithmetic and the memory of both.

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
from typing import NamedTuple

from penstock.core.device import DeviceModel, ModelShape
from penstock.sched.collectives import all_to_alls_ms, collectives
from penstock.sched.presets import DEVICES, GEOMETRIES, read_shape

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
# those with a roofline, in this order everywhere
PARTS = ("gemm", "experts", "lm_head", "prefill_attention", "decode_attention")


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
    moved: float
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
    experts: _Part
    head: _Part
    prefill: _Part
    decode: _Part


@lru_cache(maxsize=64)
def _work(device: DeviceModel, shape: ModelShape) -> tuple[tuple[int, float], ...]:
    """Operations and bytes of one unit of each of PARTS; of experts' bytes the unit is all of them."""
    each = shape.kv_bytes_per_token * shape.kv_copies(device)
    prefill = decode = 4 * shape.layers * shape.heads * shape.head_dim  # of one token looking at one
    if shape.latents is not None:
        r, e = shape.latents.kv_rank, shape.latents.rope_dim
        prefill = 2 * shape.layers * shape.heads * (shape.latents.nope_dim + e + shape.latents.value_dim)
        decode = 2 * shape.layers * shape.heads * (2 * r + e)
    return (
        (2 * shape.dense_params, shape.dense_bytes),
        (2 * (shape.active_params - shape.dense_params), shape.expert_bytes / device.expert_groups),
        (2 * shape.head_params, shape.head_bytes),
        (prefill, each),
        (decode, each),
    )


@lru_cache(maxsize=64)
def _expansion(shape: ModelShape) -> float:
    """What making K and V of a cached token's latent takes, in pairs of tokens of which one looks at the other."""
    latents = shape.latents
    if latents is None:
        return 0.0
    made = latents.nope_dim + latents.value_dim
    return latents.kv_rank * made / (made + latents.rope_dim)


@lru_cache(maxsize=64)
def _sights(shape: ModelShape) -> tuple[tuple[float, float], ...]:
    """(window, share of the layers that have it); empty where all layers see everything."""
    if not any(shape.windows) or shape.latents is not None:
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
        imbalance: tokens that the busiest device's experts compute, over the mean of devices.
        busy: share of the groups that have as much to compute as this one; others have nothing.
    """

    device: DeviceModel
    shape: ModelShape
    factors: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    imbalance: float = 1.0
    busy: float = 1.0

    @property
    def margin(self) -> float:
        """Share of a limit that a step may be predicted to take, so that it hardly ever takes more than the limit."""
        return min(MARGIN, 1 / (1 + SPREADS * self.spread))

    @cached_property
    def _model(self) -> _Model:
        """All at once: in Python 3.11 every property that is kept takes a lock."""
        factors, work = self.factors, _work(self.device, self.shape)
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
        made = self._made
        for new, cached in prefills:
            tokens += new
            pairs += new * (cached + new / 2) + made * cached
            read += new + cached
        return tokens, pairs, read

    @cached_property
    def _alone(self) -> bool:
        """Whether there is nobody to exchange with."""
        device = self.device
        return device.tensor_parallel == device.pipeline_parallel == device.data_parallel == 1

    @cached_property
    def _made(self) -> float:
        """As `_expansion` has it."""
        return _expansion(self.shape)

    def _chosen(self, tokens: int) -> float:
        """Share of the busiest device's experts that tokens of this group, and as many of other busy ones, choose."""
        experts = self.shape.experts
        return min(1.0, self.imbalance * experts.chosen(self._met(tokens))) if experts is not None else 0.0

    def _met(self, tokens: int) -> float:
        """Tokens, of all groups, that come to the experts."""
        return tokens * max(1.0, self.device.expert_groups * self.busy)

    def _computed(self, tokens: int) -> float:
        """Tokens for which a group's share of the devices computes experts, at the pace of the busiest."""
        if self.shape.experts is None:
            return 0.0
        return self.imbalance * self._met(tokens) / self.device.expert_groups

    @cached_property
    def _link(self) -> tuple[float, float]:
        """ms of a step, and of each token in it."""
        factor = self.factors.get("collectives", 1.0)
        each_step, each_token = collectives(self.device, self.shape)
        return factor * each_step, factor * each_token

    def _links_ms(self, tokens: int) -> float:
        """Without its factor."""
        each_step, each_token = collectives(self.device, self.shape)
        return each_step + each_token * tokens + all_to_alls_ms(self.device, self.shape, tokens)

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
        _, gemm, experts, head, prefill, decode = self._model
        bounds = (
            gemm.bounds(tokens, 1 if tokens else 0),
            experts.bounds(self._computed(tokens), self._chosen(tokens)),
            head.bounds(rows, 1 if rows else 0),
            prefill.bounds(pairs, read),
            decode.bounds(kv, kv),
        )
        return bounds, self._links_ms(tokens) if tokens else 0.0

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

    def encode(self, images: Sequence[int]) -> Roofline:
        """Looking at images of so many tokens each, in one batch, with its factor.

        The model has a vision tower."""
        tower, factor = self.shape.vision, self.factors.get("encode", 1.0)
        assert tower is not None
        if not images:
            return Roofline(0.0, 0.0)
        flops = sum([tower.flops(tokens) for tokens in images])
        return Roofline(
            factor * flops / self.device.peak_flops * 1e3, factor * tower.weight_bytes / self.device.bandwidth * 1e3
        )

    def encode_ms(self, images: Sequence[int]) -> float:
        """Time of that by itself, without what every step has."""
        return self.encode(images).ms

    def beside_ms(
        self,
        images: Sequence[int],
        prefills: Sequence[tuple[int, int]] = (),
        decodes: int = 0,
        kv_tokens: int = 0,
        logit_rows: int | None = None,
    ) -> float:
        """Time of a step, with arguments as in `parts`, beside which a stream of its own looks at images."""
        seen = self.encode(images)
        language = self.step_ms(prefills, decodes, kv_tokens, logit_rows) - self._model.overhead
        parts = self.parts(prefills, decodes, kv_tokens, logit_rows).values()
        both = max(
            sum([part.compute_ms for part in parts]) + seen.compute_ms,
            sum([part.memory_ms for part in parts]) + seen.memory_ms,
        )
        return self._model.overhead + max(language, seen.ms, both)

    def largest_encode(self, limit_ms: float, tokens: int, high: int) -> int:
        """The most images of so many tokens each, up to `high`, that are looked at within the limit; at least one."""
        return max(1, bisect_right(range(1, high + 1), limit_ms, key=lambda n: self.encode_ms([tokens] * n)))

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
        if self.sights or self.shape.experts is not None:  # no polynomials
            fits = range(1, high + 1)
            return bisect_right(fits, limit_ms, key=lambda n: self.step_ms([(n, cached)], decodes, kv_tokens))
        each_step, each_token = self._link
        overhead, gemm, _, head, attention, decode = self._model
        fixed = overhead + head.ms(decodes + 1, 1) + decode.ms(kv_tokens, kv_tokens)
        made = attention.compute_slope * self._made * cached
        left = limit_ms - fixed - each_step - each_token * decodes
        # the time is the largest of four polynomials, one for each choice of bounds: each of them has to stay within
        most = float(high)
        for slope, constant in ((gemm.compute_slope, gemm.compute_slope * decodes), (0.0, gemm.memory_slope)):
            linear = slope + each_token
            by_memory = linear + attention.memory_slope
            most = min(most, (left - constant - attention.memory_slope * cached) / by_memory)
            most = min(
                most,
                _root(attention.compute_slope / 2, linear + attention.compute_slope * cached, constant + made - left),
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
        if self.shape.experts is not None:
            ms += model.experts.ms(self._computed(tokens), self._chosen(tokens))
        if self._alone or not tokens:
            return ms
        return ms + self.factors.get("collectives", 1.0) * self._links_ms(tokens)

    def _chunks_ms(self, chunks: int, size: int, cached: int) -> float:
        """Attention of consecutive chunks of a prompt, the first over `cached` tokens.

        Over c tokens a chunk takes compute * (size * (c + size / 2) + made * c), or memory * (c + size) if that is
        more. The first is below the second at most up to some c, and above it from there on.
        """
        if self.sights:
            looks = [self._looked_at([(size, cached + size * i)]) for i in range(chunks)]
            return sum([self._model.prefill.ms(pairs, read) for _, pairs, read in looks])
        compute, memory = self._model.prefill.compute_slope, self._model.prefill.memory_slope
        each = size + self._made
        steeper = compute * each - memory
        if steeper <= 0:
            by_memory = chunks
        else:
            crossing = size * (memory - compute * size / 2) / steeper
            by_memory = min(chunks, max(0, ceil((crossing - cached) / size)))
        by_compute = chunks - by_memory
        # sums of c over the chunks of either kind
        early = by_memory * cached + size * (by_memory * (by_memory - 1) // 2)
        all_of_them = chunks * cached + size * (chunks * (chunks - 1) // 2)
        return memory * (early + by_memory * size) + compute * (
            each * (all_of_them - early) + by_compute * size * size / 2
        )


def _root(square: float, linear: float, constant: float) -> float:
    """The x above 0 with square * x**2 + linear * x + constant = 0; 0 without one. The first two are not negative."""
    if constant >= 0:
        return 0.0
    # this form stays exact where square is next to nothing
    return -2 * constant / (linear + sqrt(linear * linear - 4 * square * constant))
