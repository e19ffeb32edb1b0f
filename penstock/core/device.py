"""Device and model sizes, from which `sched.steptime` predicts a step's time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.core.layout import (
    KV_DTYPES,
    KVGroup,
    attention_groups,
    bytes_per_block,
    bytes_per_token,
    latent_group,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """An accelerator's performance, from its data sheet or as measured; or that of several that compute a model
    together, as one.

    Several devices are tensor_parallel x pipeline_parallel x data_parallel. Their values are those of one data-parallel
    group, which has sequences and KV of its own, and as much work as any other. Of a group's pipeline stages one
    computes a batch at a time, so speeds are of one stage, and memory is of all.

    Attributes:
        peak_flops: dense bfloat16 operations per second.
        bandwidth: of its memory, in bytes per second.
        memory: in bytes.
        overhead_ms: of every step, whatever is in it: scheduling, launching, and sampling.
        tensor_parallel: devices that a layer's attention and dense weights are spread over.
        pipeline_parallel: stages that the layers are spread over.
        data_parallel: groups.
        expert_parallel: whether experts are spread, whole ones, over the devices of all groups, and tokens travel to
            them; or each group has all, in slices.
        link_bandwidth: from each of them to the others, in bytes per second, one way. Matters only between several.
        link_latency_us: of one all-reduce, however small.
        all_to_all_us: of one all-to-all, however small.
        host_devices: that share a host and its links; between hosts is the network.
        network_bandwidth: from each device to others, as of links.
        network_latency_us: by which a collective over several hosts takes longer than within one.
        host_bandwidth: between the devices' memory and their hosts', in bytes per second, in each direction; of all
            devices together; what is usable of it.
    """

    peak_flops: float
    bandwidth: float
    memory: int
    overhead_ms: float = 0.5
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    link_bandwidth: float = 32e9  # PCIe 4.0 x16
    link_latency_us: float = 10.0
    all_to_all_us: float = 35.0  # with the next but one, what DeepEP's published times are beside bytes / bandwidth
    host_devices: int = 8
    network_bandwidth: float = 50e9  # 400 Gb/s for each device
    network_latency_us: float = 12.0
    host_bandwidth: float = 25e9  # PCIe 4.0 x16, of whose 31.5e9 protocol and copies leave so much

    def parallel(self, tensor: int, *, pipeline: int = 1, data: int = 1, experts: bool = False) -> DeviceModel:
        """So many of this device in this layout."""
        assert self.devices == 1
        assert min(tensor, pipeline, data) >= 1
        return replace(
            self,
            peak_flops=self.peak_flops * tensor,
            bandwidth=self.bandwidth * tensor,
            memory=self.memory * tensor * pipeline,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=data,
            expert_parallel=experts,
            host_bandwidth=self.host_bandwidth * tensor * pipeline,
        )

    @property
    def stage_devices(self) -> int:
        """That have a layer, in all groups."""
        return self.tensor_parallel * self.data_parallel

    @property
    def devices(self) -> int:
        return self.stage_devices * self.pipeline_parallel

    @property
    def expert_groups(self) -> int:
        """That have the experts of a layer together."""
        return self.data_parallel if self.expert_parallel else 1

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
            all_to_all_us=self.all_to_all_us * factor,
            network_bandwidth=self.network_bandwidth / factor,
            network_latency_us=self.network_latency_us * factor,
        )


# --quantization: what a plain checkpoint is quantised to when it is loaded -> bits of a weight, with its part of scales
# and zeros
WEIGHT_BITS = {"int8": 8.0, "int4": 4.5, "fp8": 8.0, "hqq4": 4.5, "hqq3": 3.5, "hqq2": 2.5}
QUANTISED = ("gptq", "awq", "compressed-tensors", "fbgemm_fp8", "hqq")  # and fp8: checkpoints that are so
QUANTIZATIONS = ("auto", *WEIGHT_BITS, *QUANTISED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of gated MLPs, in place of the MLP of all layers but the first.

    Attributes:
        count: in a layer, besides shared ones.
        per_token: of those, that a token is computed by.
        intermediate: of one of them.
        shared_intermediate: of those that every token is computed by, together.
        dense_layers: first layers, which have the dense MLP.
    """

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: int = 0

    def chosen(self, tokens: float) -> float:
        """Share of a layer's experts that so many tokens are expected to choose at least once, each expert as often as
        any other."""
        return 1.0 - math.pow(1.0 - self.per_token / self.count, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): K and V of all heads come from one latent vector of a
    token, and that is kept of it, with a part of K that has the rotary embedding.

    Attributes:
        kv_rank: values of the latent.
        rope_dim: of the rotary part, the same for all heads.
        nope_dim, value_dim: of a head's other part of K, and of its V.
        q_rank: of the latent that queries come from; None where they come from the hidden state.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """The geometry of a vision tower with gated MLPs, named as in Qwen2.5-VL's config.json, with the merger behind it
    that makes one token of `merge` x `merge` patches.

    Attributes:
        patch_values: of a patch's pixels, all channels and frames.
        merge: patches of a token on each side.
        window: patches that one sees in a layer with windows; `full_layers` of the layers have none.
        width: of the tokens, the decoder's hidden size.
    """

    layers: int
    hidden: int
    intermediate: int
    patch_values: int
    merge: int
    window: int
    full_layers: int
    width: int
    bytes_per_value: int = 2

    @property
    def patches(self) -> int:
        """Of a token."""
        return self.merge * self.merge

    @property
    def layer_params(self) -> int:
        """Of all layers and the embedding of patches: every patch is computed by these."""
        each = 4 * self.hidden * self.hidden + 3 * self.hidden * self.intermediate
        return self.layers * each + self.patch_values * self.hidden

    @property
    def merger_params(self) -> int:
        """Every token is computed by these."""
        merged = self.patches * self.hidden
        return merged * merged + merged * self.width

    @property
    def weight_bytes(self) -> int:
        return (self.layer_params + self.merger_params) * self.bytes_per_value

    @property
    def token_bytes(self) -> int:
        """Of the embedding of a token."""
        return self.width * self.bytes_per_value

    def flops(self, tokens: int) -> float:
        """To look at an image of so many tokens."""
        patches = tokens * self.patches
        seen = self.full_layers * patches + (self.layers - self.full_layers) * min(patches, self.window)
        return 2.0 * (self.layer_params * patches + self.merger_params * tokens) + 4.0 * self.hidden * patches * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The geometry of a decoder with gated MLPs, named as in its config.json.

    Attributes:
        bytes_per_value: of weights, and of KV unless `kv_dtype` says otherwise.
        layer_bits, head_bits: of a weight of the layers and of the head, with its part of scales, where they are
            quantised.
        kv_dtype: of stored KV; None is as wide as weights are.
        windows: of each layer, how many positions a token sees with itself, None for all; empty where all see all.
        experts: None where every layer has a dense MLP.
        latents: None where the KV of every head is kept.
        vision: None where the model sees nothing.
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
    experts: Experts | None = None
    latents: Latents | None = None
    vision: TowerShape | None = None

    def storing(self, kv_cache_dtype: str) -> ModelShape:
        """The same with KV of a dtype, a name in KV_DTYPES."""
        stored = KV_DTYPES[kv_cache_dtype]
        return self if stored == "auto" else replace(self, kv_dtype=stored)

    def quantised(self, quantization: str) -> ModelShape:
        """The same with layers quantised at load, by a name in WEIGHT_BITS; "auto" leaves them."""
        return self if quantization == "auto" else replace(self, layer_bits=WEIGHT_BITS[quantization])

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """What is kept of every token."""
        dtype = self.kv_dtype or ("float32" if self.bytes_per_value == 4 else "bfloat16")
        if self.latents is not None:
            return (latent_group(self.layers, self.latents.kv_rank, self.latents.rope_dim, dtype),)
        return attention_groups(self.windows or (None,) * self.layers, self.kv_heads, self.head_dim, dtype)

    @property
    def stored_heads(self) -> int:
        """Heads that KV is kept of: devices beyond so many that share a layer have copies of it."""
        return 1 if self.latents is not None else self.kv_heads

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def expert_params(self) -> int:
        """Of all experts of all layers, without shared ones."""
        if self.experts is None:
            return 0
        return self.expert_layers * self.experts.count * 3 * self.hidden * self.experts.intermediate

    @property
    def dense_params(self) -> int:
        """Of all layers together, without experts: every token is computed by these. Norms and biases are too few to
        count."""
        mlps = (self.layers - self.expert_layers) * self.intermediate
        routers = 0
        if self.experts is not None:
            mlps += self.expert_layers * self.experts.shared_intermediate
            routers = self.expert_layers * self.experts.count
        return self.layers * self._attention_params + self.hidden * (3 * mlps + routers)

    @property
    def _attention_params(self) -> int:
        """Of a layer."""
        latents = self.latents
        if latents is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        queries = self.heads * (latents.nope_dim + latents.rope_dim)
        values = self.heads * (latents.nope_dim + latents.value_dim)
        of_queries = self.hidden * queries if latents.q_rank is None else latents.q_rank * (self.hidden + queries)
        of_latent = self.hidden * (latents.kv_rank + latents.rope_dim) + latents.kv_rank * values
        return of_queries + of_latent + self.heads * latents.value_dim * self.hidden

    @property
    def layer_params(self) -> int:
        """Of all layers together."""
        return self.dense_params + self.expert_params

    @property
    def active_params(self) -> int:
        """Of all layers together, those that one token is computed by."""
        experts = self.experts
        return self.dense_params + (0 if experts is None else self.expert_params * experts.per_token // experts.count)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def layer_bytes(self) -> int:
        """The layers' weights."""
        return self._bytes(self.layer_params)

    @property
    def dense_bytes(self) -> int:
        """Those that every step reads."""
        return self._bytes(self.dense_params)

    @property
    def expert_bytes(self) -> int:
        """Those of which a step reads what its tokens have chosen."""
        return self._bytes(self.expert_params)

    def read_bytes(self, tokens: int) -> float:
        """Of the layers' weights, in a step of so many tokens."""
        chosen = self.experts.chosen(tokens) if self.experts is not None else 0.0
        return self.dense_bytes + chosen * self.expert_bytes

    def _bytes(self, params: int) -> int:
        return round(params * (self.bytes_per_value if self.layer_bits is None else self.layer_bits / 8))

    @property
    def head_bytes(self) -> int:
        return round(self.head_params * (self.bytes_per_value if self.head_bits is None else self.head_bits / 8))

    @property
    def weight_bytes(self) -> int:
        """In memory: the layers, the head, the embedding unless it is the head, and the vision tower."""
        embedding = 0 if self.tied else self.head_params * self.bytes_per_value
        tower = 0 if self.vision is None else self.vision.weight_bytes
        return self.layer_bytes + self.head_bytes + embedding + tower

    def held_bytes(self, device: DeviceModel) -> int:
        """Of weights, in the memory of one data-parallel group."""
        return self.weight_bytes - self.expert_bytes + -(-self.expert_bytes // device.expert_groups)

    def kv_copies(self, device: DeviceModel) -> int:
        """Of all KV, on the devices that share a layer: where they are more than there are heads to spread."""
        return -(-device.tensor_parallel // self.stored_heads)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return bytes_per_token(self.kv_groups)

    @property
    def block_bytes(self) -> int:
        """Of a block of any group of layers."""
        return bytes_per_block(self.kv_groups)
