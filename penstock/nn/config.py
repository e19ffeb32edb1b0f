"""config.json of a Hugging Face checkpoint as the few numbers that a dense decoder needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.core.errors import ConfigError
from penstock.core.hf_config import count, number
from penstock.core.layout import KVGroup, attention_groups, latent_group
from penstock.core.tiles import Tiling

THETA = (1.0, 1e15)
POSITIVE, FROM_ZERO = (1e-6, 1e6), (0.0, 1e6)
ROPE_NUMBERS = {
    "factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "attention_factor": POSITIVE,
    "beta_fast": FROM_ZERO,
    "beta_slow": FROM_ZERO,
    "mscale": FROM_ZERO,
    "mscale_all_dim": FROM_ZERO,
}
LISTS = ("short_factor", "long_factor")  # of rope_parameters, a number for each pair
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary frequencies.

    Attributes:
        kind: one of `rope.SCALINGS`.
        theta: base of the frequencies.
        dim: how many of a head's dimensions are rotated, from the first on.
        options: what else the checkpoint says of this kind (factor, original_max_position_embeddings, ...).
    """

    kind: str
    theta: float
    dim: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention.

    Attributes:
        rank: values of a latent vector, of which K and V of every head are made.
        rope: of the rotated key beside it, and of the rotated part of a query.
        key, value: of a head's K without its rotated part, and of its V.
        q_rank: of what queries are made of; None is the layer's input itself.
        interleaved: whether pairs that are rotated together are neighbours.
    """

    rank: int
    rope: int
    key: int
    value: int
    q_rank: int | None = None
    interleaved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router's scores become the experts of a row, and their weights.

    Attributes:
        count: of experts to choose from.
        top_k: that a row has.
        scoring: "softmax" over all experts, or "sigmoid" of each by itself.
        groups, kept_groups: experts are that many groups of neighbours, and are chosen from so many of these: those
            whose best expert scores highest; with `corrected`, those whose two best do together.
        corrected: whether a bias is added to scores, for the choice alone (DeepSeek-V3, 2.1.2).
        renormalised: whether the weights of a row's experts sum up to 1, before `scale`.
        scale: that they are multiplied with.
    """

    count: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    corrected: bool = False
    renormalised: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Layers with experts instead of one gated MLP.

    Attributes:
        width: of each expert.
        layers: which layers have them.
        shared: width of an MLP that all rows have besides; 0 is none.
        shared_gate: whether a gate says for each row how much of that is added.
    """

    routing: Routing
    width: int
    layers: frozenset[int]
    shared: int = 0
    shared_gate: bool = False


MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP's images


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision tower: blocks of attention over an image's patches, which see each other in both directions.

    Attributes:
        patch_size: height and width of a patch, in pixels.
        frames: of a video that a patch has; an image's one is taken so often.
        merge: height and width of the square of patches that becomes one token.
        window: height and width of the squares of tokens that see each other, in layers that are not `whole_layers`;
            0 is all.
        whole_layers: in which all patches of a frame see each other.
        mean, std: of a colour's values from 0 to 1, that are taken off and divided by.
        tiling: how images become tiles, where all that it sees is of one size.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    norm_eps: float
    patch_size: int
    activation: str = "silu"
    mlp_bias: bool = True
    frames: int = 1
    merge: int = 1
    window: int = 0
    whole_layers: frozenset[int] = frozenset()
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    tiling: Tiling | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: blocks of grouped-query attention and a gated MLP, or experts.

    Attributes:
        rope: of every layer; of those without a window, where `window_rope` is there.
        windows: per layer, how many positions a token sees with itself; None is all.
        scaled_positions: whether `max_positions` counts what a linear scaling adds.
        variant: which of the models that a checkpoint can be this is, where it can be several (`rope.settled`).
        window_rope: of layers with a window, where it is another.
        scale: of attention's scores; None is 1 / sqrt(head_dim).
        activation: of gates, one of `ops.ACTIVATIONS`.
        embedding_scale: what embeddings are multiplied with.
        qk_norm: whether queries and keys are normed per head before the rotation.
        qkv_bias, o_bias, mlp_bias: whether those projections add a bias.
        dtype: of the weights as config.json says, or None when it does not.
        mtp_layers: layers behind the last one that predict further tokens (DeepSeek-V3, 2.2).
        draft_head: whether the first of these is loaded, and keeps something of every token; the others never are.
        latent: of all layers' attention, where it is multi-head latent attention; then `head_dim` is that of a query.
        experts: where some layers have them; `intermediate_size` is that of the others.
        sections: how many pairs of a head turn with a token's frame, row and column, where these are positions of their
            own (Qwen2-VL, 2.1); empty where there is one position.
        vision: the tower by which it sees; None is none.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    dtype: torch.dtype | None
    windows: tuple[int | None, ...]
    scaled_positions: bool = False
    variant: str = ""
    window_rope: RopeConfig | None = None
    scale: float | None = None
    activation: str = "silu"
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mtp_layers: int = 0
    draft_head: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    sections: tuple[int, ...] = ()
    vision: VisionConfig | None = None

    @property
    def attention_scale(self) -> float:
        """Of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """All that there are."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` is a layer's."""
        return int(self.window_rope is not None and self.windows[layer] is not None)

    @property
    def kept_layers(self) -> int:
        """How many keep something of every token: its layers, and behind them the draft head's."""
        return self.num_layers + self.draft_head

    def kv_groups(self, dtype: str, ranks: int = 1) -> tuple[KVGroup, ...]:
        """What its layers keep of every token, as values of a dtype, at each of so many ranks; where there are fewer
        heads, several ranks have the same, and latents are the same at all."""
        if self.latent is not None:
            return (latent_group(self.kept_layers, self.latent.rank, self.latent.rope, dtype),)
        return attention_groups(
            self.windows + (None,) * self.draft_head, max(1, self.num_kv_heads // ranks), self.head_dim, dtype
        )


def read_decoder(
    hf: Mapping[str, Any],
    *,
    windows: tuple[int | None, ...] | None = None,
    partial_rotary: bool = False,
    **own: Any,
) -> DecoderConfig:
    """The part of config.json that all dense decoders share.

    Keys that are missing have the architecture's defaults in transformers: `hf` must hold those already.

    Args:
        partial_rotary: whether the architecture can rotate a part of each head.
        own: fields that other architectures leave as they are.

    Raises:
        ConfigError: naming the key.
    """
    heads = count(hf, "num_attention_heads")
    hidden = count(hf, "hidden_size")
    layers = count(hf, "num_hidden_layers")
    head_dim = count(hf, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim} is odd", "head_dim")
    config = DecoderConfig(
        vocab_size=count(hf, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=count(hf, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=count(hf, "intermediate_size"),
        norm_eps=number(hf, "rms_norm_eps", 1e-6, 0.0, 1.0),
        rope=read_rope(hf, head_dim, partial=partial_rotary),
        max_positions=count(hf, "max_position_embeddings"),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        dtype=_dtype(hf),
        windows=windows or (None,) * layers,
        activation=read_activation(hf),
        **own,
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {config.num_kv_heads}",
            "num_key_value_heads",
        )
    return config


def read_routing(hf: Mapping[str, Any], count_of: str, **own: Any) -> Routing:
    """Raises ConfigError.

    Args:
        count_of: the key that has the number of experts.
        own: fields besides the numbers of experts.
    """
    routing = Routing(count=count(hf, count_of), top_k=count(hf, "num_experts_per_tok"), **own)
    if routing.count % routing.groups:
        raise ConfigError(
            f"config.json: n_group {routing.groups} does not divide {count_of} {routing.count}", "n_group"
        )
    if routing.kept_groups > routing.groups:
        raise ConfigError(
            f"config.json: topk_group {routing.kept_groups} is more than n_group {routing.groups}", "topk_group"
        )
    if routing.corrected and routing.groups > 1 and routing.count // routing.groups < 2:
        raise ConfigError(f"config.json: n_group {routing.groups} leaves groups of less than two experts", "n_group")
    if routing.top_k > (most := routing.count // routing.groups * routing.kept_groups):
        raise ConfigError(
            f"config.json: num_experts_per_tok is {routing.top_k}, there are {most} experts to choose from",
            "num_experts_per_tok",
        )
    return routing


def sparse_layers(hf: Mapping[str, Any]) -> frozenset[int]:
    """Layers with experts as Qwen configures them: every `decoder_sparse_step`-th but `mlp_only_layers`."""
    step, dense = count(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigError("config.json: mlp_only_layers must be a list of whole numbers", "mlp_only_layers")
    return frozenset(i for i in range(count(hf, "num_hidden_layers")) if (i + 1) % step == 0 and i not in dense)


def deepseek_experts(hf: Mapping[str, Any], *, corrected: bool) -> ExpertsConfig | None:
    """Experts as DeepSeek configures them, from `first_k_dense_replace` on; None without any.

    Args:
        corrected: as V3 chooses them (V3, 2.1.2), with sigmoids and a bias; else as V2 does.

    Raises:
        ConfigError: naming the key.
    """
    layers, first = count(hf, "num_hidden_layers"), count(hf, "first_k_dense_replace", 0, least=0)
    sparse = frozenset(i for i in range(first, layers) if i % count(hf, "moe_layer_freq", 1) == 0)
    count_of = "n_routed_experts" if hf.get("n_routed_experts") is not None else "num_local_experts"
    if not sparse or (hf.get("n_routed_experts") is None and hf.get("num_local_experts") is None):
        return None
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if corrected else "softmax"
    methods = ("noaux_tc",) if corrected else ("greedy", "group_limited_greedy")
    _one_of(hf, "scoring_func", (scoring,))
    method = _one_of(hf, "topk_method", methods)
    _one_of(hf, "norm_topk_prob", (True, False) if corrected else (False,))
    groups = 1 if method == "greedy" else count(hf, "n_group", 1)
    routing = read_routing(
        hf,
        count_of,
        scoring=scoring,
        groups=groups,
        kept_groups=1 if method == "greedy" else count(hf, "topk_group", groups),
        corrected=corrected,
        renormalised=corrected and bool(hf.get("norm_topk_prob", True)),
        scale=number(hf, "routed_scaling_factor", 2.5 if corrected else 1.0, *POSITIVE),
    )
    width = count(hf, "moe_intermediate_size")
    shared = count(hf, "n_shared_experts", 0, least=0) * width
    return ExpertsConfig(routing=routing, width=width, layers=sparse, shared=shared)


def _one_of(hf: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    """A value, the first where there is none. Raises ConfigError."""
    value = allowed[0] if hf.get(name) is None else hf[name]
    if value not in allowed:
        raise ConfigError(
            f"config.json: {name} is {ascii(value)[:60]}, supported are {', '.join(map(str, allowed))}", name
        )
    return value


def read_colours(hf: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the three colours, as preprocessor_config.json has them. Raises ConfigError."""
    given = hf.get("preprocessor_config") or {}
    found = []
    for name, default in (("image_mean", MEAN), ("image_std", STD)):
        values = given.get(name) or [*default]
        if not isinstance(values, list) or len(values) != 3:
            raise ConfigError(f"preprocessor_config.json: {name} must be a list of three numbers", name)
        between = (-1e6, 1e6) if name == "image_mean" else POSITIVE
        found.append(tuple(number({name: value}, name, 0.0, *between) for value in values))
    return found[0], found[1]


def read_activation(hf: Mapping[str, Any]) -> str:
    """Raises ConfigError."""
    name = "hidden_activation" if hf.get("hidden_activation") else "hidden_act"
    asked = hf.get(name, "silu")
    if not isinstance(asked, str) or asked not in ACTIVATIONS:
        raise ConfigError(f"config.json: {name} is {asked!r}, supported are {', '.join(ACTIVATIONS)}", name)
    return ACTIVATIONS[asked]


def late_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per-layer windows as Qwen configures them: `layer_types`, or `use_sliding_window` from `max_window_layers` on."""
    layers = count(hf, "num_hidden_layers")
    window = count(hf, "sliding_window", 4096) if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types")
    if kinds is None:
        first = count(hf, "max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    return typed_windows(hf, window)


def typed_windows(hf: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """Per-layer windows out of `layer_types`. Raises ConfigError."""
    layers, kinds = count(hf, "num_hidden_layers"), hf["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"config.json: layer_types must name {layers} layers", "layer_types")
    if other := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"config.json: layer_types: {', '.join(other)} is not supported", "layer_types")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(hf: Mapping[str, Any]) -> torch.dtype | None:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "auto").removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {name!r}, supported are {', '.join(DTYPES)}", "dtype")
    return DTYPES[name]


def read_rope(hf: Mapping[str, Any], head_dim: int, *, partial: bool = False) -> RopeConfig:
    """Reads both spellings: `rope_parameters`, and `rope_theta` beside `rope_scaling`, which goes before the other."""
    options = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    theta = options.pop("rope_theta", None) or hf.get("rope_theta")
    share = options.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor")
    share = number({"partial_rotary_factor": share}, "partial_rotary_factor", 1.0, 0.0, 1.0)
    if share != 1.0 and not partial:
        raise ConfigError("config.json: partial_rotary_factor is not supported", "partial_rotary_factor")
    dim = int(head_dim * share)
    if dim % 2 or dim == 0:
        raise ConfigError(
            f"config.json: partial_rotary_factor {share} rotates {dim} of {head_dim} dimensions, which are no pairs",
            "partial_rotary_factor",
        )
    original = hf.get("original_max_position_embeddings") or options.get("original_max_position_embeddings")
    given = {"original_max_position_embeddings": original or count(hf, "max_position_embeddings")}
    options |= {name: count(given, name) for name in given}
    for name, between in ROPE_NUMBERS.items():
        if options.get(name) is not None:
            options[name] = number(options, name, 1.0, *between, within="rope_parameters")
    for name in LISTS:
        if options.get(name) is not None:
            options[name] = _numbers(options, name, dim // 2)
    theta = number({"rope_theta": theta}, "rope_theta", 10000.0, *THETA)
    return RopeConfig(kind=kind, theta=theta, dim=dim, options=options)


def _numbers(options: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    values, field = options[name], f"rope_parameters.{name}"
    if not isinstance(values, list) or len(values) != length:
        raise ConfigError(f"config.json: {field} must be a list of {length} numbers", field)
    return tuple(number({name: value}, name, 0.0, *POSITIVE, within="rope_parameters") for value in values)
