"""The stages of a model, one after the other, compute what it computes whole, to the bit, in every mode."""

from itertools import product

import pytest
import torch

from penstock.core.plan import SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.nn.batch import Batch, Scratch
from penstock.nn.graph import Forward
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def steps_of(prompt):
    """A prompt in two chunks, of which the first wants nothing, and a decode step."""
    yield SequenceStep("a", 0, prompt[:20], (0,), 0, GREEDY, 0)
    yield SequenceStep("a", 20, prompt[20:], (0,), 1, GREEDY, 0)
    yield SequenceStep("a", len(prompt), [7], (0,), 1, GREEDY, 0)


CHAINED = product(["llama-bias", "gemma3"], ["eager", "partial", "full"])
OP_BY_OP = product(["qwen3-moe-mixed", "deepseek-v3"], ["auto"])


@pytest.mark.parametrize(("name", "mode"), [*CHAINED, *OP_BY_OP])
@torch.inference_mode()
def test_stages_compute_what_a_whole_model_does(tmp_path, name, mode):
    pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path, name, dtype=torch.float32)
    whole = load_model(folder, CPU)
    layers = whole.config.num_layers
    stages = [load_model(folder, CPU, shard=Shard(stage=i, stages=layers)) for i in range(layers)]
    layout = make_layout(whole.config, whole.dtype, "block", "")
    caches = [KVCache(torch.zeros(4 * layout.block_bytes, dtype=torch.uint8), layout, 4) for _ in range(1 + layers)]
    assert sum(len(stage.model.layers) for stage in stages) == layers > 1
    forwards = [Forward(model, mode) for model in (whole, *stages)]
    for step in steps_of([(7 * i) % 300 for i in range(50)]):
        step.blocks = tuple(range(len(layout.groups)))
        found = []
        for run in ([0], range(1, 1 + layers)):
            came = None
            for i in run:
                model, cache = forwards[i].model, caches[i].layers
                batch = Batch([step], CPU, None, Scratch(), groups=len(layout.groups))
                if model.shard.is_last:
                    batch.keep([range(len(step.tokens) - step.sample, len(step.tokens))])
                own = type(cache)(cache[layer] for layer in model.shard.layers(layers))
                caches[i].own = own  # graphs refer to it weakly
                came = forwards[i](batch, own, came=came)
            found.append(model.logits(came))
        assert torch.equal(*found)
