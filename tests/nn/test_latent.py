"""Multi-head latent attention: what is kept of a token, and weights as DeepSeek's checkpoints have them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import ConfigError
from penstock.core.layout import latent_group
from penstock.nn.latent import LatentUp
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from penstock.nn.methods import METHODS, PLAIN
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.quantised import fp8, quantise_checkpoint

CPU = torch.device("cpu")
# as published; nothing but the rank of latents is a multiple of 128
WIDTHS = {
    "hidden_size": 192,
    "q_lora_rank": 160,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 24,
    "v_head_dim": 36,
    "intermediate_size": 208,
    "moe_intermediate_size": 136,
}


def test_one_vector_a_token_is_kept():
    group = latent_group(61, 512, 64, "bfloat16")
    assert (group.kinds, group.bytes_per_token) == (1, 61 * 576 * 2)
    assert latent_group(61, 512, 64, "int8").bytes_per_token == 61 * (576 + 4)


@pytest.mark.parametrize("name", list(METHODS))
def test_shards_are_the_whole_together(name):
    method = METHODS[name]
    if (reason := method.missing(CPU, torch.float32)) is not None:
        pytest.skip(reason)
    weight = torch.randn(6 * (18 + 22), 36)

    def held(shard):
        linear = LatentUp(36, 6, (18, 22), shard)
        linear.hold(method)
        linear.prepare()
        for first in (0, 7, 150):  # as files are read
            linear.load("weight", weight[first : {0: 7, 7: 150, 150: 240}[first]].clone(), None, first)
        assert not linear._waiting
        return linear

    whole = held(Shard())
    assert torch.equal(whole.dense(), weight)
    assert torch.equal(torch.cat([held(Shard(rank, 3)).dense() for rank in range(3)]), weight)
    x = torch.randn(5, 36)
    ours = torch.einsum("ri,hoi->rho", x, whole.parts.values.dense())
    assert torch.allclose(ours, (x @ weight.T).view(5, 6, 40)[..., 18:], atol=1e-5)


@pytest.mark.parametrize("method", ["best", "plain"])
def test_fp8_in_blocks_of_128_is_what_it_means(method, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    plain = write_checkpoint(tmp_path / "plain", "deepseek-v3", **WIDTHS)
    dense = quantise_checkpoint(plain, tmp_path / "fp8", fp8("block", "fp8"))
    if method == "plain":
        monkeypatch.setattr("penstock.nn.loader.method_for", lambda device, dtype, codes=None: _reference(codes))
    model = load_model(tmp_path / "fp8", CPU)
    for i, block in enumerate(model.model.layers):
        mixer, prefix = block.mixer, f"model.layers.{i}.self_attn."
        for part, name in (("q_a_proj",) * 2, ("q_b_proj",) * 2, ("kv_a_proj", "kv_a_proj_with_mqa"), ("o_proj",) * 2):
            assert torch.equal(getattr(mixer, part).dense(), dense[f"{prefix}{name}.weight"])
        assert torch.equal(mixer.kv_b_proj.dense(), dense[f"{prefix}kv_b_proj.weight"])


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """As V3's checkpoints have them behind the last one."""
    pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path, "deepseek-v3")
    file = folder / "model.safetensors"
    whole = load_file(file)
    before = load_model(folder, CPU).state_dict()
    more = {f"model.layers.3.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file(whole | more, file)
    after = load_model(folder, CPU).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    save_file(whole | {"model.layers.4.enorm.weight": torch.ones(64)}, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.enorm\.weight"):
        load_model(folder, CPU)


def _reference(codes):
    from penstock.nn.methods.quantised import Quantised

    return PLAIN if codes is None else Quantised(codes)


def test_options_that_cannot_be_are_refused(tmp_path):
    pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path, "deepseek-v3")
    whole = json.loads((folder / "config.json").read_text())
    for field, value in (("kv_lora_rank", 0), ("qk_rope_head_dim", 13), ("v_head_dim", "many"), ("q_lora_rank", -1)):
        (folder / "config.json").write_text(json.dumps(whole | {field: value}))
        with pytest.raises(ConfigError, match=field):
            load_model(folder, CPU)
