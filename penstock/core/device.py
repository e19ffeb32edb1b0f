"""Device and model sizes, from which `sched.steptime` predicts a step's time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.core.layout import KV_DTYPES, KVGroup, attention_groups, bytes_per_block, bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """An accelerator's performance, from its data sheet or as measured; or that of several under tensor parallelism, as
    one.

    Attributes:
        peak_flops: dense bfloat16 operations per second; of all devices together, as are the next two.
        bandwidth: of its memory, in bytes per second.
        memory: in bytes.
        overhead_ms: of every step, whatever is in it: scheduling, launching, and sampling.
        tensor_parallel: devices that every layer is spread over.
        link_bandwidth: from each of them to the others, in bytes per second, one way. Matters only between several.
        link_latency_us: of one all-reduce, however small.
        host_bandwidth: between the devices' memory and their hosts', in bytes per second, in each direction; of all
            devices together; what is usable of it.
    """

    peak_flops: float
    bandwidth: float
    memory: int
    overhead_ms: float = 0.5
    tensor_parallel: int = 1
    link_bandwidth: float = 32e9  # PCIe 4.0 x16
    link_latency_us: float = 10.0
    host_bandwidth: float = 25e9  # PCIe 4.0 x16, of whose 31.5e9 protocol and copies leave so much

    def parallel(self, size: int) -> DeviceModel:
        """`size` of this device under tensor parallelism."""
        assert self.tensor_parallel == 1
        assert size >= 1
        return replace(
            self,
            peak_flops=self.peak_flops * size,
            bandwidth=self.bandwidth * size,
            memory=self.memory * size,
            tensor_parallel=size,
            host_bandwidth=self.host_bandwidth * size,
        )

    def slowed(self, factor: float) -> DeviceModel:
        """The same device with all that it does `factor` times as long."""
        return replace(
            self,
            peak_flops=self.peak_flops / factor,
            bandwidth=self.bandwidth / factor,
            host_bandwidth=self.host_bandwidth / factor,
            overhead_ms=self.overhead_ms * factor,
            link_bandwidth=self.link_bandwidth / factor,
            link_latency_us=self.link_latency_us * factor,
        )


# --quantization: what a plain checkpoint is quantised to when it is loaded -> bits of a weight, with its part of scales
# and zeros
WEIGHT_BITS = {"int8": 8.0, "int4": 4.5, "fp8": 8.0, "hqq4": 4.5, "hqq3": 3.5, "hqq2": 2.5}
QUANTISED = ("gptq", "awq", "compressed-tensors", "fbgemm_fp8", "hqq")  # and fp8: checkpoints that are so
QUANTIZATIONS = ("auto", *WEIGHT_BITS, *QUANTISED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The geometry of a dense decoder with a gated MLP, named as in its config.json.

    Attributes:
        bytes_per_value: of weights, and of KV unless `kv_dtype` says otherwise.
        layer_bits, head_bits: of a weight of the layers and of the head, with its part of scales, where they are
            quantised.
        kv_dtype: of stored KV; None is as wide as weights are.
        windows: of each layer, how many positions a token sees with itself, None for all; empty where all see all.
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
    layer_bits: float | None = None
    head_bits: float | None = None
    kv_dtype: str | None = None
    windows: tuple[int | None, ...] = ()

    def storing(self, kv_cache_dtype: str) -> ModelShape:
        """The same with KV of a dtype, a name in KV_DTYPES."""
        stored = KV_DTYPES[kv_cache_dtype]
        return self if stored == "auto" else replace(self, kv_dtype=stored)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """What is kept of every token."""
        dtype = self.kv_dtype or ("float32" if self.bytes_per_value == 4 else "bfloat16")
        return attention_groups(self.windows or (None,) * self.layers, self.kv_heads, self.head_dim, dtype)

    @property
    def layer_params(self) -> int:
        """Of all layers together; norms and biases are too few to count."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def layer_bytes(self) -> int:
        """What a step reads of the layers' weights."""
        return round(self.layer_params * (self.bytes_per_value if self.layer_bits is None else self.layer_bits / 8))

    @property
    def head_bytes(self) -> int:
        return round(self.head_params * (self.bytes_per_value if self.head_bits is None else self.head_bits / 8))

    @property
    def weight_bytes(self) -> int:
        """In memory: the layers, the head, and the embedding unless it is the head."""
        embedding = 0 if self.tied else self.head_params * self.bytes_per_value
        return self.layer_bytes + self.head_bytes + embedding

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return bytes_per_token(self.kv_groups)

    @property
    def block_bytes(self) -> int:
        """Of a block of any group of layers."""
        return bytes_per_block(self.kv_groups)
