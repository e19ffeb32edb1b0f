"""How long a step takes on a device: a sum of rooflines (xLLM, section 3.1).

The parts of a step run one after the other, so each has its own roofline and the step is their sum:

    t = overhead + sum over parts of factor_part * max(flops_part / peak, bytes_part / bandwidth)

Prompts i bring n_i new tokens over c_i cached ones; B sequences decode one token each, with K tokens of KV together.

    part               flops                                       bytes
    gemm               2 * layer_params * (sum n_i + B)            weights of the layers
    lm_head            2 * head_params * (rows with logits)        weights of the head
    prefill_attention  4 * L * H * d * sum n_i * (c_i + n_i / 2)   KV of c_i + n_i
    decode_attention   4 * L * H * d * K                           KV of K

with L layers, H query heads and d their width. Activations and the writing of new KV are small beside these and left
out. Factors are 1 until something has been measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import ConfigError

GRAIN = 64  # tokens: a budget is a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What an accelerator can do, from its data sheet.

    Attributes:
        peak_flops: dense bfloat16 operations per second.
        bandwidth: of its memory, in bytes per second.
        memory: in bytes.
        overhead_ms: of every step, whatever is in it: deciding what runs, launching it, and drawing tokens.
    """

    peak_flops: float
    bandwidth: float
    memory: int
    overhead_ms: float = 0.5


DEVICES = {
    "a100": DeviceModel(peak_flops=312e12, bandwidth=2.039e12, memory=80 * 10**9),
    "h100": DeviceModel(peak_flops=989e12, bandwidth=3.35e12, memory=80 * 10**9),
    "h200": DeviceModel(peak_flops=989e12, bandwidth=4.8e12, memory=141 * 10**9),
    "l40s": DeviceModel(peak_flops=362e12, bandwidth=0.864e12, memory=48 * 10**9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The geometry of a dense decoder with a gated MLP, named as in its config.json.

    Attributes:
        bytes_per_value: of weights and KV alike.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    bytes_per_value: int = 2

    @property
    def layer_params(self) -> int:
        """Of all layers together; norms and biases are too few to count."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """In memory: the layers, the head, and the embedding unless it is the head."""
        return (self.layer_params + self.head_params * (1 if self.tied else 2)) * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value


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
    "llama-3.1-8b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
    ),
}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The geometry that a config.json of a dense decoder describes. Raises ConfigError naming what is missing."""

    def count(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json: {name} is {value!r}, a positive whole number is needed", name)
        return value

    hidden, heads = count("hidden_size"), count("num_attention_heads")
    return ModelShape(
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", hidden // heads),
        intermediate=count("intermediate_size"),
        vocab=count("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """A part's time if only arithmetic counted, and if only memory did."""

    compute_ms: float
    memory_ms: float

    @property
    def ms(self) -> float:
        return max(self.compute_ms, self.memory_ms)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicts steps of one model on one device.

    Attributes:
        factors: part -> what its measured time is of its roofline; 1 where it is not named.
    """

    device: DeviceModel
    shape: ModelShape
    factors: Mapping[str, float] = field(default_factory=dict)

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
            logit_rows: rows that a token is drawn from; by default one for every sequence.
        """
        shape, new = self.shape, sum(n for n, _ in prefills)
        rows = len(prefills) + decodes if logit_rows is None else logit_rows
        pairs = sum(n * (c + n / 2) for n, c in prefills)
        attention = 4 * shape.layers * shape.heads * shape.head_dim  # flops for one token looking at one
        kv, width = shape.kv_bytes_per_token, shape.bytes_per_value
        return {
            "gemm": self._roofline(
                2 * shape.layer_params * (new + decodes), shape.layer_params * width if new + decodes else 0
            ),
            "lm_head": self._roofline(2 * shape.head_params * rows, shape.head_params * width if rows else 0),
            "prefill_attention": self._roofline(attention * pairs, kv * sum(n + c for n, c in prefills)),
            "decode_attention": self._roofline(attention * kv_tokens, kv * kv_tokens),
        }

    def step_ms(
        self,
        prefills: Sequence[tuple[int, int]] = (),
        decodes: int = 0,
        kv_tokens: int = 0,
        logit_rows: int | None = None,
    ) -> float:
        """Time of a whole step; arguments as in `parts`."""
        parts = self.parts(prefills, decodes, kv_tokens, logit_rows)
        return self.device.overhead_ms + sum(self.factors.get(name, 1.0) * part.ms for name, part in parts.items())

    def largest_prefill(self, limit_ms: float, low: int, high: int) -> int:
        """The largest multiple of GRAIN up to `high` whose prompt, read in one step, stays within the limit; at least
        `low`."""
        sizes = range(GRAIN, high + 1, GRAIN)
        fitting = bisect_right(sizes, limit_ms, key=lambda tokens: self.step_ms([(tokens, 0)]))
        return max(low, fitting * GRAIN)

    def _roofline(self, flops: float, moved: float) -> Roofline:
        return Roofline(flops / self.device.peak_flops * 1e3, moved / self.device.bandwidth * 1e3)
