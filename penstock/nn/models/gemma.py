"""Gemma: Llama's shape with other norms, a gate of GELU, and embeddings that are scaled."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.hf_config import count
from penstock.nn.config import DecoderConfig, read_decoder
from penstock.nn.layers import RMSNorm
from penstock.nn.models.decoder import Decoder

# what transformers takes where config.json has no such key
DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}


class GemmaRMSNorm(RMSNorm):
    """Checkpoints have how far weights are from 1; what they are stays in float32, whatever the model is made of."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32), requires_grad=False)

    def _apply(self, *args: Any, **kwargs: Any) -> RMSNorm:
        before = self.weight
        super()._apply(*args, **kwargs)
        if self.weight.dtype != before.dtype:
            self.weight = nn.Parameter(before.to(self.weight.device), requires_grad=False)
        return self

    def load(self, name: str, tensor: Tensor, part: int | None = None, first: int = 0) -> None:
        self.weight[first : first + len(tensor)].copy_(tensor).add_(1.0)


class Gemma(Decoder):
    norm = GemmaRMSNorm

    @staticmethod
    def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
        hf = DEFAULTS | dict(hf)
        if hf["hidden_act"] == "gelu":  # so the first releases say; they mean the approximation
            hf["hidden_act"] = DEFAULTS["hidden_act"]
        bias = bool(hf.get("attention_bias", False))
        return read_decoder(hf, qkv_bias=bias, o_bias=bias, embedding_scale=count(hf, "hidden_size") ** 0.5)
