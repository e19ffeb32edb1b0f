from torch import Tensor

from penstock.nn.batch import Batch


def store_kv(k: Tensor, v: Tensor, cache: Tensor, batch: Batch) -> None:
    cache[batch.slot_blocks, 0, :, batch.slot_offsets] = k
    cache[batch.slot_blocks, 1, :, batch.slot_offsets] = v
