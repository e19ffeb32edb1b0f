"""The layer by which DeepSeek-V3 predicts further tokens (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2), made of
transformers' parts: transformers itself leaves it out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FurtherTokens(nn.Module):
    """Modules are called as in published checkpoints.

    Args:
        model: a DeepseekV3ForCausalLM, whose embedding and head it shares.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        stack, config = model.model, model.config
        norm, self.number = type(stack.norm), config.num_hidden_layers
        self.enorm, self.hnorm = (norm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": norm(config.hidden_size, config.rms_norm_eps)})
        self.block = type(stack.layers[-1])(config, self.number)
        self.to(model.dtype)
        self._model = [model]  # not a part of it

    def forward(self, hidden: Tensor, following: Tensor) -> Tensor:
        """[batch, rows, hidden] after the model's last norm, and [batch, rows] the token after each -> the same shape,
        normed: the head makes of it what comes after that token."""
        stack = self._model[0].model
        x = torch.cat((self.enorm(stack.embed_tokens(following)), self.hnorm(hidden)), -1)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        x = self.block(
            self.eh_proj(x),
            attention_mask=None,
            position_ids=positions,
            position_embeddings=stack.rotary_emb(hidden, positions),
        )
        out: Tensor = self.shared_head["norm"](x[0] if isinstance(x, tuple) else x)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them, copies of the embedding and the head too."""
        model, layer = self._model[0], f"model.layers.{self.number}."
        found = {layer + name.removeprefix("block."): value for name, value in self.state_dict().items()}
        shared = model.model.embed_tokens.weight, model.lm_head.weight
        names = ("embed_tokens.weight", "shared_head.head.weight")
        return found | {layer + name: weight.detach().clone() for name, weight in zip(names, shared, strict=True)}


def with_further_tokens(model: Any, further: FurtherTokens) -> dict[str, Tensor]:
    """What `save_pretrained` takes as `state_dict`."""
    return {**model.state_dict(), **further.tensors()}
