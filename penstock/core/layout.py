"""What a model keeps of every token, and how that lies in a KV block's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Literal

from penstock.core.plan import BLOCK_TOKENS

# --kv-cache-dtype, in the field's names, and what is stored; "auto" is what the model computes in
KV_DTYPES = {"auto": "auto", "int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1, "uint64": 8}
SCALED = ("int8", "float8_e4m3fn")  # a value is what is stored times the scale of its token and head
SCALE_BYTES = 4  # float32
ALIKE = 1.25  # numbers of layers up to that ratio are padded to the larger one


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose K and V share blocks: a sequence has one block of each group for every BLOCK_TOKENS positions.

    Attributes:
        kind: "full" is attention over everything before, "window" over the last `window` positions; "latent" is over
            everything too, and all heads share one vector a token, which is K, and whose first values are V.
        layers: indices of its layers in the model.
        kv_heads: of each layer; of one rank, where heads are spread over several.
        head_dim: values of a head, or of a latent vector.
        dtype: of stored values, a name in VALUE_BYTES.
        scale_bytes: of the scale beside a head's values, of K and of V each; 0 where they have none.
        window: positions that a token sees, itself included; None is all before it.
        value_dim: values of a latent vector that are V; 0 where V is stored beside K.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    kind: Literal["full", "window", "latent"] = "full"
    scale_bytes: int = 0
    window: int | None = None
    value_dim: int = 0

    @property
    def kinds(self) -> int:
        """Of what is stored: K and V, or latent vectors alone."""
        return 1 if self.kind == "latent" else 2

    @property
    def heads_per_token(self) -> int:
        """Of all kinds, in all layers."""
        return self.kinds * len(self.layers) * self.kv_heads

    @property
    def bytes_per_token(self) -> int:
        return self.heads_per_token * (self.head_dim * VALUE_BYTES[self.dtype] + self.scale_bytes)


@lru_cache(maxsize=64)
def attention_groups(windows: tuple[int | None, ...], kv_heads: int, head_dim: int, dtype: str) -> tuple[KVGroup, ...]:
    """What layers of grouped-query attention keep, in groups of equally many layers: blocks of all groups have the same
    size, so that any block serves any group.

    The layers of one window are cut into groups as large as the smallest such set of layers, the last one filled up
    with nothing; where no set is larger by more than a quarter, there is one group of each (nearly as vLLM's hybrid KV
    cache manager does it). 22 layers with a window and 4 without are seven groups: one without, and six with, of which
    two have three layers and a quarter of their blocks empty.

    Args:
        windows: of each layer.
        dtype: of stored values.

    Returns:
        Those that see furthest first.
    """
    alike = {window: [i for i, own in enumerate(windows) if own == window] for window in windows}
    sizes = [len(layers) for layers in alike.values()]
    size = max(sizes) if max(sizes) <= ALIKE * min(sizes) else min(sizes)
    return tuple(
        KVGroup(
            layers=tuple(layers),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            kind="full" if window is None else "window",
            scale_bytes=SCALE_BYTES if dtype in SCALED else 0,
            window=window,
        )
        for window in sorted(alike, key=lambda w: inf if w is None else w, reverse=True)
        for layers in _parts(alike[window], -(-len(alike[window]) // size))
    )


def latent_group(layers: int, rank: int, rope: int, dtype: str) -> KVGroup:
    """What so many layers of multi-head latent attention keep (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    Args:
        rank: values of a token that K and V of all heads are made of.
        rope: those of its rotated key.
        dtype: of stored values.
    """
    return KVGroup(
        layers=tuple(range(layers)),
        kv_heads=1,
        head_dim=rank + rope,
        dtype=dtype,
        kind="latent",
        scale_bytes=SCALE_BYTES if dtype in SCALED else 0,
        value_dim=rank,
    )


def _parts(layers: list[int], count: int) -> list[list[int]]:
    """So many, of which none has two layers more than another."""
    ends = [len(layers) * (i + 1) // count for i in range(count)]
    return [layers[start:end] for start, end in pairwise((0, *ends))]


def bytes_per_token(groups: Sequence[KVGroup]) -> int:
    """Of all groups together."""
    return sum(group.bytes_per_token for group in groups)


def bytes_per_block(groups: Sequence[KVGroup]) -> int:
    """Of a block of any of them: as many as the largest needs."""
    return max(group.bytes_per_token for group in groups) * BLOCK_TOKENS


def windows_of(groups: Sequence[KVGroup]) -> tuple[int | None, ...]:
    """Of each: positions that a token sees, itself included; None is all before it."""
    return tuple(group.window for group in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Two instances exchange blocks only when every field is equal; see `difference`.

    Attributes:
        model: digest of the checkpoint, whatever folder it lies in; see `root_key`.
        order: how a group lies in a block: "block" [layer][k|v][head][token][dim], "token"
            [token][layer][k|v][head][dim], of latent vectors without k|v; "digest" one 8-byte digest a token (modelled
            devices). A group's scales follow its values in the same order.
        dtype: that K and V are computed in: "bfloat16", "float16", "float32"; "uint64" for digests.
        groups: of layers; of those that a modelled device's digests stand for.
        block_bytes: bytes of one block, which is of one group; padded to whole 4 KiB pages.
        block_tokens: consecutive tokens in a block.
    """

    model: str
    order: str
    dtype: str
    groups: tuple[KVGroup, ...]
    block_bytes: int
    block_tokens: int = BLOCK_TOKENS

    @property
    def kv_dtype(self) -> str:
        """Of stored values."""
        return "+".join(dict.fromkeys(group.dtype for group in self.groups))

    def difference(self, other: KVLayout) -> str:
        """Which fields differ, with both values ("kv_dtype: int8 here, bfloat16 there"); "" when none does."""
        mine, theirs = self._fields(), other._fields()
        names = dict.fromkeys((*mine, *theirs))
        return "; ".join(
            f"{name}: {mine.get(name)} here, {theirs.get(name)} there"
            for name in names
            if mine.get(name) != theirs.get(name)
        )

    def _fields(self) -> dict[str, object]:
        """Those of the groups among them, numbered where there are several."""
        fields = asdict(self)
        del fields["groups"]
        for number, group in enumerate(self.groups):
            which = f" of group {number}" if len(self.groups) > 1 else ""
            renamed = {"dtype": "kv_dtype", "kind": "attention"}
            fields |= {f"{renamed.get(name, name)}{which}": value for name, value in asdict(group).items()}
        return fields
