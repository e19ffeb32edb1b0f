from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(-1), logits.sum(-1).isfinite()
