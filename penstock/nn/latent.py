"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C), absorbed.

Of a token the cache has one vector: a latent, of which K and V of every head are linear functions, and a rotated key
that all heads share. A head's product of query and key is one with the latent too, when the query is multiplied with
the head's key projection first; and what it makes of V is one of the weighted sum of latents, which is multiplied with
its value projection afterwards. So K and V of heads are never there, and all heads read the same vectors.

Prompts could be computed in another way, with K and V of each head expanded out of latents once for many rows, which
takes fewer operations where there are many. It is not done: the two ways round differently, and a token's vectors must
not depend on whether it was computed as part of a prompt, as it is after a preemption, behind a move or in a
conversation's next turn, or was drawn.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.nn import ops
from penstock.nn.batch import Batch
from penstock.nn.config import DecoderConfig
from penstock.nn.formats.base import Format
from penstock.nn.formats.dense import DENSE
from penstock.nn.head_weight import LatentWeight
from penstock.nn.kv import LayerKV
from penstock.nn.layers import Norm, RMSNorm, Rotations, attend
from penstock.nn.linear import WHOLE, ColumnLinear, RowLinear, Shard
from penstock.nn.methods.base import LinearMethod
from penstock.nn.methods.per_head import PerHead

EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


class LatentUp(ColumnLinear):
    """What K and V of heads are made of latents by, in a checkpoint [key; value] of one head after the other.

    Args:
        widths: of a head's K, without what is rotated, and of its V.
    """

    exact = True
    by_rows = False

    def __init__(self, rank: int, heads: int, widths: tuple[int, int], shard: Shard = WHOLE) -> None:
        super().__init__(rank, (heads * sum(widths),), shards=shard)
        self.widths = widths

    @property
    def parts(self) -> LatentWeight:
        assert isinstance(self.weight, LatentWeight)
        return self.weight

    def hold(self, method: LinearMethod[Any, Any], form: Format[Any] = DENSE) -> None:
        super().hold(PerHead(self.widths, method.name.startswith("packed"), form.codes), form)


class LatentAttention(nn.Module):
    """
    Attributes:
        heads: those of this shard.

    Args:
        shard: of the heads; latents are the same everywhere.
        norm: of latents.
    """

    def __init__(self, config: DecoderConfig, shard: Shard = WHOLE, norm: Norm = RMSNorm) -> None:
        super().__init__()
        latent, heads, hidden = config.latent, config.num_heads, config.hidden_size
        assert latent is not None
        self.heads, self.scale, self.latent = len(shard.of(heads)), config.attention_scale, latent
        q, kv = heads * config.head_dim, latent.rank + latent.rope
        if latent.q_rank is None:
            self.q_proj = ColumnLinear(hidden, (q,), shards=shard)
        else:
            self.q_a_proj = ColumnLinear(hidden, (latent.q_rank,), config.qkv_bias)
            self.q_a_norm = norm(latent.q_rank, EPS)
            self.q_b_proj = ColumnLinear(latent.q_rank, (q,), shards=shard)
        self.kv_a_proj = ColumnLinear(hidden, (kv,), config.qkv_bias)
        self.kv_a_norm = norm(latent.rank, EPS)
        self.kv_b_proj = LatentUp(latent.rank, heads, (latent.key, latent.value), shard)
        self.o_proj = RowLinear(heads * latent.value, (hidden,), config.o_bias, shard)

    def forward(self, x: Tensor, rotations: Rotations, cache: LayerKV, batch: Batch) -> Tensor:
        latent, (cos, sin), rows = self.latent, rotations[0], len(x)
        kv, up = self.kv_a_proj(x), self.kv_b_proj.parts
        ops.rotary(kv[:, None, latent.rank :].clone(), cos, sin, latent.interleaved, kv[:, None, latent.rank :])
        kv[:, : latent.rank] = self.kv_a_norm(kv[:, : latent.rank])
        ops.store_kv(kv[:, None], None, cache, batch)

        q = self._queries(x).unflatten(1, (self.heads, -1))
        wide = batch.scratch.take("queries", (rows, self.heads, latent.rank + latent.rope), x.dtype, x.device)
        ops.head_linear(q[..., : latent.key], up.keys, wide[..., : latent.rank])
        ops.rotary(q[..., latent.key :], cos, sin, latent.interleaved, wide[..., latent.rank :])
        sums = self.attend(wide, cache, batch)
        values = x.new_empty(rows, self.heads, latent.value)
        ops.head_linear(sums, up.values, values)
        return self.o_proj(values.flatten(1))

    def attend(self, q: Tensor, cache: LayerKV, batch: Batch) -> Tensor:
        return attend(q, cache, batch, self.scale)

    def _queries(self, x: Tensor) -> Tensor:
        """[rows, heads * (key + rope)]"""
        if self.latent.q_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
