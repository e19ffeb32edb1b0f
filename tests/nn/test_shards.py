"""Shards of a model: what each computes of a layer is a summand of what the whole model does."""

import pytest
import torch

from penstock.core.plan import SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.nn.batch import Batch
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")


def layer_of(model, x):
    """What both parts of the second block add to a step's rows."""
    block = model.model.layers[1]
    ranks = model.config.num_heads // block.mixer.heads
    cache = KVCache.on_device(make_layout(model.config, model.dtype, "block", "", ranks=ranks), 1, CPU).layers
    step = SequenceStep("", 0, list(range(len(x))), (0,), 1, SamplingParams(), 0)
    batch = Batch([step], CPU)
    return block.mixer(x, model.rotations(batch), cache[1], batch), block.feed_forward(x)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "size"), [("qwen3", 2), ("llama-bias", 2), ("qwen2", 4)])
def test_shards_sum_up_to_the_whole(tmp_path, name, size):
    pytest.importorskip("transformers")
    write_checkpoint(tmp_path, name)
    whole, x = load_model(tmp_path, CPU), torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    shards = [load_model(tmp_path, CPU, shard=Shard(rank, size)) for rank in range(size)]
    expected = layer_of(whole, x)
    for found, sums in zip(zip(*(layer_of(shard, x) for shard in shards), strict=True), expected, strict=True):
        assert (sum(found) - sums).abs().max() < 1e-5
    memory = [sum(p.nbytes for p in model.model.layers.parameters()) for model in (whole, shards[0])]
    assert memory[1] < memory[0] * (0.75 if size == 2 else 0.5)
