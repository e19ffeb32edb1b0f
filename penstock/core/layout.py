"""The layout of a KV block's bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from penstock.core.plan import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Two instances exchange blocks only when every field is equal; see `difference`.

    Attributes:
        model: digest of the checkpoint, whatever folder it lies in; see `root_key`.
        group: layers with one retention rule share a group; "full" is attention over everything before.
        order: how a block is laid out: "block" [layer][k|v][head][token][dim], "token" [token][layer][k|v][head][dim],
            "digest" one 8-byte digest a token (modelled devices).
        dtype: "bfloat16", "float16", "float32"; "uint64" for digests.
        layers, kv_heads, head_dim: of the group; 1 each for digests.
        block_tokens: consecutive tokens in a block.
        block_bytes: bytes of one block, all layers; padded to whole 4 KiB pages.
    """

    model: str
    order: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_bytes: int
    group: str = "full"
    block_tokens: int = BLOCK_TOKENS

    def difference(self, other: KVLayout) -> str:
        """Which fields differ, with both values ("dtype: bfloat16 here, float32 there"); "" when none does."""
        mine, theirs = asdict(self), asdict(other)
        return "; ".join(f"{k}: {mine[k]} here, {theirs[k]} there" for k in mine if mine[k] != theirs[k])
