"""The same weights give the same logits as Hugging Face transformers, for every architecture and rope scaling."""

import pytest
import torch

from penstock.core.plan import BLOCK_TOKENS, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.nn.batch import Batch
from penstock.nn.loader import load_model
from penstock.nn.ops import OPS
from tests.helpers.checkpoints import ARCHITECTURES, auto_class, write_checkpoint

transformers = pytest.importorskip("transformers")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LENGTHS = (1, 17, 300)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def prompt(length: int) -> list[int]:
    return torch.randint(1, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def step(tokens, start, total, cache, first_block=0) -> SequenceStep:
    blocks = range(first_block * cache.groups, (first_block + -(-total // BLOCK_TOKENS)) * cache.groups)
    return SequenceStep("r", start, tokens, tuple(blocks), 1, SamplingParams(), 0)


def logits_of(model, sequences, cache):
    return model.logits(model(Batch(sequences, model.device, groups=cache.groups), cache))


def new_cache(model, blocks=16):
    layout = make_layout(model.config, model.dtype, "block", "")
    cache = KVCache.on_device(layout, blocks * len(layout.groups), model.device)
    cache.slots.zero_()
    return cache.layers


def peer(checkpoint, device):
    return auto_class(checkpoint.name).from_pretrained(checkpoint, dtype=torch.float32).to(device).eval()


@torch.inference_mode()
@pytest.mark.parametrize("backend", [b.name for b in OPS["attention"].backends])
def test_logits(checkpoint, device, backend):
    model, other = load_model(checkpoint, device), peer(checkpoint, device)
    with OPS["attention"].using(backend):
        for length in LENGTHS:
            tokens = prompt(length)
            theirs = other(torch.tensor([tokens], device=device)).logits[0]
            cache = new_cache(model)
            ours = logits_of(model, [step(tokens, 0, length, cache)], cache)
            assert (ours - theirs).abs().max() < 1e-4
            # the same in chunks and one by one, beside an unrelated sequence
            cache = new_cache(model)
            done = 0
            for chunk in (3, 64, 1, 1, 100, length):
                part = tokens[done : done + chunk]
                if part:
                    noise = step([5, 6], 0, 2, cache, first_block=12)
                    rows = logits_of(model, [noise, step(part, done, done + len(part), cache)], cache)[2:]
                    assert (rows - theirs[done : done + len(part)]).abs().max() < 1e-4
                done += len(part)


@torch.inference_mode()
def test_greedy_tokens(checkpoint, device):
    model, other = load_model(checkpoint, device), peer(checkpoint, device)
    for length in LENGTHS:
        tokens = prompt(length)
        theirs = other.generate(
            torch.tensor([tokens], device=device), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        cache, known, done = new_cache(model), list(tokens), 0
        while len(known) < len(theirs):
            rows = logits_of(model, [step(known[done:], done, len(known), cache)], cache)
            done = len(known)
            known.append(int(rows[-1].argmax()))
        assert known == theirs


def test_shards_and_dtypes_load_alike(tmp_path):
    whole = load_model(write_checkpoint(tmp_path / "whole", "qwen3"), torch.device("cpu"))
    parts = load_model(write_checkpoint(tmp_path / "parts", "qwen3", shard_size="100KB"), torch.device("cpu"))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        directory = write_checkpoint(tmp_path / name, "qwen3", dtype=dtype)
        assert load_model(directory, torch.device("cpu")).dtype == dtype
        assert load_model(directory, torch.device("cpu"), torch.float32).dtype == torch.float32
