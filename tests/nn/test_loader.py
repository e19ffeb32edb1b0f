"""Checkpoints that are broken, or that would have us run their code: each is one line that names the file."""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.core.errors import ConfigError
from penstock.nn import native
from penstock.nn.checkpoint import INDEX
from penstock.nn.linear import Linear
from penstock.nn.loader import LARGE_PAGE, load_model
from penstock.nn.models import MODELS
from penstock.service.checkpoint import DEMO
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "dtype": "float32"},
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    "model.norm.weight": (16,),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.post_attention_layernorm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 16),
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    return tmp_path


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(folder, CPU)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_whole_one_loads(folder: Path) -> None:
    assert load_model(folder, CPU).config.num_layers == 1


@pytest.mark.parametrize("kept", [0, 4, 60, 1200, -1])
def test_truncated_weights(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file}: corrupt or truncated" in refused(folder)


@pytest.mark.parametrize("content", [b"\xff" * 4096, b"\x80\x04K\x01." * 100, b"\x08\0\0\0\0\0\0\0[1,2,3] "])
def test_weights_that_are_something_else(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert f"{folder / 'model.safetensors'}: corrupt" in refused(folder)


def test_a_configuration_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert f"{folder}: no weights, neither model.safetensors nor" in refused(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_and_never_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).mkdir()  # opening it would fail in another way
    assert f"{folder / name}: a pickle" in refused(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\udcff", "[" * 100_000, '{"architectures": 3}'])
def test_a_configuration_that_is_none(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, errors="surrogateescape")
    assert str(folder / "config.json") in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": "small"},
        {"hidden_size": 10**12, "intermediate_size": 10**12, "head_dim": 16},
        {"hidden_size": 0},
        {"num_hidden_layers": "two"},
        {"rope_scaling": 7},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {"rope_theta": [1]},
        {"architectures": ["EvilForCausalLM"], "auto_map": {"AutoModelForCausalLM": "evil.Model"}},
        {"dtype": "pickle"},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10_000},
        {"rope_theta": math.nan},
        {"rope_theta": math.inf},
        {"rope_theta": 10**400},
        {"num_attention_heads": -1},
        {"num_key_value_heads": 0},
        {"max_position_embeddings": 10**12},
        {"architectures": ["MistralForCausalLM"], "sliding_window": -5},
        {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 10**9},
        {"rope_scaling": {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 4}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1},
        {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 0},
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 0},
        {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["chunked_attention"]},
        {"architectures": ["Gemma3ForCausalLM"], "rope_local_base_freq": -1.0},
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.4},
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": 3}},
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su", "short_factor": [0, 1, 1, 1]}},
    ],
)
def test_configurations_with_values_that_cannot_be(folder: Path, change: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    message = refused(folder)
    assert "config.json" in message
    assert any(name in message for name in (*change, "value of a wrong kind", "rope_parameters"))


NASTY = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.integers(0, 64), st.floats(), st.text(max_size=4),
    st.lists(st.integers(0, 9), max_size=3), st.dictionaries(st.sampled_from(["rope_type", "factor"]), st.integers()),
)  # fmt: skip
FIELDS = [*CONFIG, "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window"]
FIELDS += ["layer_types", "use_sliding_window", "max_window_layers", "hidden_act", "quantization_config", "model_type"]
FIELDS += ["partial_rotary_factor", "original_max_position_embeddings", "rope_local_base_freq", "hidden_activation"]
FIELDS += ["query_pre_attn_scalar", "sliding_window_pattern", "attn_logit_softcapping", "tie_word_embeddings"]
FIELDS += ["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"]
FIELDS += ["decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"]
ARCHITECTURES = st.sampled_from(sorted(MODELS))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ARCHITECTURES, st.dictionaries(st.sampled_from(FIELDS), NASTY, min_size=1, max_size=3))
def test_any_value_is_served_or_refused_before_memory_is_taken(
    folder: Path, name: str, changes: dict[str, Any]
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": [name]} | changes))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(ConfigError):
        load_model(folder, CPU)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def headers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Changes of one weight's entry."""
    return st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), values, min_size=1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(SHAPES)),
    headers(st.one_of(NASTY, st.sampled_from(["F64", "I8", "BF16"]), st.lists(st.integers(-4, 2**62), max_size=3))),
    st.sampled_from([0, 1, -8, 2**40, 2**63 - 1]),
)
def test_any_header_is_read_or_refused(folder: Path, name: str, entry: dict[str, Any], longer: int) -> None:
    file = folder / "whole.safetensors"
    if not file.exists():
        shutil.copy(folder / "model.safetensors", file)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[name] |= entry
    text = json.dumps(header).encode()
    length = (len(text) + longer).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + text + content[8 + size :])
    with contextlib.suppress(ConfigError):
        load_model(folder, CPU)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("model.norm.weight", torch.ones(17), "is [17], config.json makes it [16]"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(16, 24), "is [16, 24], config.json makes it [24, 16]"),
        ("model.layers.7.mlp.up_proj.weight", torch.ones(24, 16), "is not part of Llama"),
        ("lm_head.weight", torch.ones(31, 16), "is [31, 16], config.json makes it [32, 16]"),
    ],
)
def test_weights_of_another_shape_or_name(folder: Path, name: str, change: torch.Tensor, says: str) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: change}, file)
    assert f"{file}: {name!r} {says}" in refused(folder)


def test_weights_that_are_missing(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "norm" not in name}, file)
    assert f"{folder}: 3 weights are missing, the first is 'model.layers.0.input_layernorm.weight'" in refused(folder)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel"])
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_models_are_saved_without_a_head(folder: Path, architecture: str, tied: bool) -> None:
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"architectures": [architecture], "tie_word_embeddings": tied})
    )
    file = folder / "model.safetensors"
    whole = load_file(file)
    bare = {name.removeprefix("model."): tensor for name, tensor in whole.items()}
    save_file(bare, file)
    assert load_model(folder, CPU).headless == (not tied)
    save_file(bare | {"lm_head.weight": torch.ones(32, 16)}, file)
    assert not load_model(folder, CPU).headless
    save_file(bare | {"model.norm.weight": torch.ones(16)}, file)
    assert "'model.norm.weight' stands there twice" in refused(folder)
    save_file(whole, file)  # this is what a checkpoint looks like that has lost its head
    assert tied or "1 weights are missing, the first is 'lm_head.weight'" in refused(folder)


def indexed(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/../../model.safetensors", "pytorch_model.bin", "\0.safetensors"]
)
def test_an_index_stays_in_its_folder(folder: Path, name: str) -> None:
    indexed(folder, {"model.norm.weight": name})
    assert str(folder / INDEX) in refused(folder)


@pytest.mark.skipif(native.missing() is not None, reason="no kernels")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages here")
def test_large_pages_hold_small_weights() -> None:
    model = load_model(DEMO, CPU, quantization="int4").model
    weights = [p for m in model.modules() if isinstance(m, Linear) for p in m.parameters()]
    assert sum(p.nbytes < LARGE_PAGE for p in weights) > 8
    vmas = [vma.split() for vma in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())]
    for weight in weights:
        first, last = weight.data_ptr(), weight.data_ptr() + weight.nbytes
        (own,) = (vma for vma in vmas if (span := _span(vma[0])).start <= first < span.stop)
        assert last <= _span(own[0]).stop
        assert "hg" in own[own.index("VmFlags:") :]


def _span(text: str) -> range:
    return range(*(int(end, 16) for end in text.split("-")))


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, "x"])
def test_an_index_that_is_none(folder: Path, weight_map: object) -> None:
    indexed(folder, weight_map)
    assert f"{folder / INDEX}: has no weight_map" in refused(folder)


def test_an_architecture_that_nobody_wrote_names_those_that_there_are(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["T5ForConditionalGeneration"]}))
    assert "T5ForConditionalGeneration; supported are DeepseekV2ForCausalLM, Deep" in refused(folder)


@pytest.mark.parametrize(
    ("gone", "more", "says"),
    [
        (["experts.3.w2"], [], "the first is 'model.layers.1.block_sparse_moe.experts.3.w2.weight'"),
        ([], ["experts.6.w1"], "'model.layers.1.block_sparse_moe.experts.6.w1.weight' is not part of Mixtral"),
        (["gate"], [], "the first is 'model.layers.1.block_sparse_moe.gate.weight'"),
        (["experts.5.w1"], ["experts.5.w1"], "is [7], config.json makes it [112, 64]"),
    ],
)
def test_an_expert_that_is_missing_or_superfluous(tmp_path: Path, gone: list[str], more: list[str], says: str) -> None:
    pytest.importorskip("transformers")
    file = write_checkpoint(tmp_path, "mixtral") / "model.safetensors"
    tensors = load_file(file)
    for name in gone:
        del tensors[f"model.layers.1.block_sparse_moe.{name}.weight"]
    for name in more:
        tensors[f"model.layers.1.block_sparse_moe.{name}.weight"] = torch.ones(7)
    save_file(tensors, file)
    assert says in refused(tmp_path)


def test_a_shard_that_is_missing(folder: Path) -> None:
    indexed(folder, dict.fromkeys(SHAPES, "model-00001-of-00002.safetensors"))
    assert f"{folder / 'model-00001-of-00002.safetensors'}: not found" in refused(folder)


def test_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blob = tmp_path_factory.mktemp("blobs") / "abc"
    (folder / "model.safetensors").rename(blob)
    (folder / "model-1.safetensors").symlink_to(blob)
    indexed(folder, dict.fromkeys(SHAPES, "model-1.safetensors"))
    assert load_model(folder, CPU).config.vocab_size == 32


@pytest.mark.slow
def test_the_command_line_says_one_line_and_exits_with_2(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(DEMO, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    command = [sys.executable, "-m", "penstock.cli.main", "serve", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "model.safetensors" in line]
    assert line.startswith(f"penstock: {file}: corrupt or truncated")
