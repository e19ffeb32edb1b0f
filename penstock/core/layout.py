"""What a model keeps of every token, and how that lies in a KV block's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

from penstock.core.plan import BLOCK_TOKENS

# --kv-cache-dtype, in the field's names, and what is stored; "auto" is what the model computes in
KV_DTYPES = {"auto": "auto", "int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1, "uint64": 8}
SCALED = ("int8", "float8_e4m3fn")  # a value is what is stored times the scale of its token and head
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose K and V are kept alike.

    Attributes:
        kind: "full" is attention over everything before, "window" over the last `window` positions.
        layers: indices of its layers in the model.
        kv_heads: of each layer; of one rank, where heads are spread over several.
        head_dim: values of a head.
        dtype: of stored values, a name in VALUE_BYTES.
        scale_bytes: of the scale beside a head's values, of K and of V each; 0 where they have none.
        window: positions that a token sees, itself included; None is all before it.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    kind: Literal["full", "window"] = "full"
    scale_bytes: int = 0
    window: int | None = None

    @property
    def heads_per_token(self) -> int:
        """Of K and of V, in all layers."""
        return 2 * len(self.layers) * self.kv_heads

    @property
    def bytes_per_token(self) -> int:
        return self.heads_per_token * (self.head_dim * VALUE_BYTES[self.dtype] + self.scale_bytes)


@lru_cache(maxsize=64)
def attention_groups(windows: tuple[int | None, ...], kv_heads: int, head_dim: int, dtype: str) -> tuple[KVGroup, ...]:
    """What layers of grouped-query attention keep: one group for each window among them, in their order.

    Args:
        windows: of each layer.
        dtype: of stored values.
    """
    return tuple(
        KVGroup(
            layers=tuple(i for i, own in enumerate(windows) if own == window),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            kind="full" if window is None else "window",
            scale_bytes=SCALE_BYTES if dtype in SCALED else 0,
            window=window,
        )
        for window in dict.fromkeys(windows)
    )


def bytes_per_token(groups: Sequence[KVGroup]) -> int:
    """Of all groups together."""
    return sum(group.bytes_per_token for group in groups)


def window_of(groups: Sequence[KVGroup]) -> int | None:
    """Positions that any layer sees, the row's own included; None where one sees all before it."""
    windows = [group.window for group in groups]
    return None if None in windows else max(w for w in windows if w is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Two instances exchange blocks only when every field is equal; see `difference`.

    Attributes:
        model: digest of the checkpoint, whatever folder it lies in; see `root_key`.
        order: how a group lies in a block: "block" [layer][k|v][head][token][dim], "token"
            [token][layer][k|v][head][dim], "digest" one 8-byte digest a token (modelled devices). A group's scales
            follow its values in the same order; groups follow one another.
        dtype: that K and V are computed in: "bfloat16", "float16", "float32"; "uint64" for digests.
        groups: of layers; of those that a modelled device's digests stand for.
        block_bytes: bytes of one block, all groups; padded to whole 4 KiB pages.
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
