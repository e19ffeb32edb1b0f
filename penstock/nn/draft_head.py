"""A head that guesses what follows the next token: a layer of its own behind a model's last one, with a part of the KV
cache.

It reads the hidden state of a position together with the token that follows there, which is known once it was drawn.
Fed with its own hidden states it guesses further. What it says changes no token, as guesses are checked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.nn.batch import Batch
from penstock.nn.config import DecoderConfig
from penstock.nn.kv import LayerKV
from penstock.nn.layers import Block, Norm, Rotations
from penstock.nn.linear import Linear


class DraftHead(nn.Module):
    """One module of multi-token prediction (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2), which shares the model's
    embedding and output head.

    Args:
        block: as the model's own.
        norm: of all norms.
    """

    def __init__(self, config: DecoderConfig, block: Block, norm: Norm) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.token_norm, self.hidden_norm = norm(hidden, eps), norm(hidden, eps)
        self.join = Linear(2 * hidden, (hidden,))
        self.block = block
        self.norm = norm(hidden, eps)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotations: Rotations,
        cache: LayerKV,
        batch: Batch,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Hidden states, normed, as the output head takes them: those of the token after the next.

        Args:
            hidden: [rows, hidden], normed: of the model, or of this.
            embedded: [rows, hidden]: of the token that follows each row.
            cache: of this layer.
            kept: rows whose result is wanted; None is all.
        """
        x = self.join(torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), -1))
        x, residual = self.block(x, torch.zeros_like(x), rotations, cache, batch, kept)
        return self.norm.after(x, residual)[0]
