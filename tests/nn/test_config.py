"""config.json as checkpoints really spell it, against transformers' own reading."""

import json

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS, SequenceStep
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.nn.batch import Batch
from penstock.nn.loader import load_model
from penstock.nn.models import architecture
from penstock.nn.rope import frequencies, longest
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")
LONG = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
# what is changed in config.json; None removes the key
SPELLINGS = [
    ("llama", {"rope_parameters": None, "rope_theta": 5000.0}),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            "original_max_position_embeddings": 128,
        },
    ),
    ("llama", {"dtype": "float32", "hidden_act": "swish", "head_dim": None}),
    ("qwen2-window", {"sliding_window": None, "layer_types": None, "use_sliding_window": True}),
    ("qwen2", {"max_position_embeddings": None}),
    ("mistral-window", {"max_position_embeddings": None}),
    ("gemma", {"hidden_act": "gelu", "num_key_value_heads": 2}),
    ("qwen3-moe", {"num_local_experts": None, "num_experts": 12}),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}),
    ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2, "layer_types": None}),
    ("qwen2-moe", {"mlp_only_layers": None, "decoder_sparse_step": None}),
    ("mixtral", {"sliding_window": 40, "num_key_value_heads": 2}),
    ("phi3-longrope", {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": LONG}),
    ("phi3-partial", {"rope_parameters": None, "partial_rotary_factor": 0.75, "rope_theta": 5000.0}),
]


@pytest.fixture(scope="module", autouse=True)
def transformers():
    return pytest.importorskip("transformers")


def rewrite(directory, changes):
    config = json.loads((directory / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in changes} | {k: v for k, v in changes.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(config))


@torch.inference_mode()
@pytest.mark.parametrize(("name", "changes"), SPELLINGS)
def test_spellings_mean_what_transformers_takes_them_for(transformers, tmp_path, name, changes):
    rewrite(write_checkpoint(tmp_path, name), changes)
    ours = load_model(tmp_path, CPU).config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    base, factor = frequencies(ours.rope, ours.max_positions)
    assert torch.allclose(base, theirs.model.rotary_emb.inv_freq, rtol=1e-6)
    assert factor == pytest.approx(theirs.model.rotary_emb.attention_scaling)
    assert ours.max_positions == theirs.config.max_position_embeddings
    if name.startswith(("qwen2", "qwen3-moe")):
        theirs = [layer.self_attn for layer in theirs.model.layers]
        assert ours.windows == tuple(getattr(attention, "sliding_window", None) for attention in theirs)


OLD = {"rope_parameters": None, "rope_theta": 2e6, "layer_types": None, "_sliding_window_pattern": None}


@torch.inference_mode()
@pytest.mark.parametrize(
    "changes",
    [
        {**OLD, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {**OLD, "sliding_window_pattern": 2},
        {"rope_parameters": None},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7e4}}},
    ],
)
def test_spellings_of_gemma3(transformers, tmp_path, changes):
    rewrite(write_checkpoint(tmp_path, "gemma3"), changes)
    ours = load_model(tmp_path, CPU).config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).model
    assert ours.windows == tuple(layer.self_attn.sliding_window for layer in theirs.layers)
    for layer, window in enumerate(ours.windows):
        kind = "full_attention" if window is None else "sliding_attention"
        base, _ = frequencies(ours.ropes[ours.rope_of(layer)], ours.max_positions)
        assert torch.allclose(base, getattr(theirs.rotary_emb, f"{kind}_inv_freq"), rtol=1e-6)
    assert longest(ours) == 1024, "it counts what is scaled"


@torch.inference_mode()
def test_longrope_has_the_frequencies_of_the_longest_sequence_that_there_may_be(transformers, tmp_path):
    """transformers has those of each sequence as long as it happens to be."""
    write_checkpoint(tmp_path, "phi3-longrope", original_max_position_embeddings=100)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for model_len, length, variant in ((None, 300, "long"), (101, 101, "long"), (100, 100, "short")):
        model = load_model(tmp_path, CPU, model_len=model_len)
        tokens = torch.randint(1, 320, (length,), generator=torch.Generator().manual_seed(0))
        step = SequenceStep("r", 0, tokens.tolist(), range(-(-length // BLOCK_TOKENS)), 1, SamplingParams(), 0)
        cache = KVCache.on_device(make_layout(model.config, model.dtype, "block", ""), 8, CPU).layers
        logits = model.logits(model(Batch([step], CPU), cache))
        assert (logits - theirs(tokens[None]).logits[0]).abs().max() < 1e-4
        assert model.config.variant == variant
        assert longest(model.config) == 1024
    hf = json.loads((tmp_path / "config.json").read_text())
    formerly = {**hf, "rope_parameters": {**hf["rope_parameters"], "rope_type": "su"}}
    assert architecture(hf).read_config(formerly) == architecture(hf).read_config(hf)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, supported is none"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration; supported"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation is 'relu', supported are silu, swish, gelu_py"),
        ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope"}}, "needs 'short_factor and long_factor'"),
        ("phi3-longrope", {"rope_parameters": {"rope_type": "su", "short_factor": [1.0]}}, "list of 8 numbers"),
        ("phi3-partial", {"rope_parameters": {"partial_rotary_factor": 0.7}}, "rotates 11 of 16 dimensions"),
        ("qwen3-moe", {"num_experts_per_tok": 13}, "num_experts_per_tok is 13, there are 12 experts to choose from"),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list of whole numbers"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, allowed is a whole number from 1"),
    ],
)
def test_what_other_architectures_cannot_is_named(tmp_path, name, changes, says):
    rewrite(write_checkpoint(tmp_path, name), changes)
    with pytest.raises(ConfigError, match=says):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "rope_type is 'ntk', supported are default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' needs 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"quantization_config": {"quant_method": "exl2"}},
            "quantization_config.quant_method is 'exl2', supported are",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits is missing, allowed is 2, 3, 4"),
        ({"quantization_config": 4}, "quantization_config: must be an object"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, changes, says):
    rewrite(write_checkpoint(tmp_path, "llama"), changes)
    with pytest.raises(ConfigError, match=says):
        load_model(tmp_path, CPU)


def test_lengths_that_scalings_allow():
    def length(name, **rope):
        hf = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 10,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "max_position_embeddings": 1000,
            "rope_scaling": {"rope_type": name, "factor": 4.0, **rope},
        }
        return longest(architecture(hf).read_config(hf))

    assert length("default") == length("dynamic") == length("llama3") == 1000
    assert length("linear") == length("yarn") == 4000
    assert length("yarn", original_max_position_embeddings=250) == 1000


def test_a_dtype_that_config_does_not_name_is_that_of_the_weights(tmp_path):
    rewrite(write_checkpoint(tmp_path, "llama", dtype=torch.bfloat16), {"dtype": None, "torch_dtype": None})
    assert load_model(tmp_path, CPU).dtype == torch.bfloat16
    rewrite(tmp_path, {"torch_dtype": "torch.float16"})
    assert load_model(tmp_path, CPU).dtype == torch.float16


def test_a_head_of_its_own_goes_before_the_tie(tmp_path):
    from safetensors.torch import load_file, save_file

    write_checkpoint(tmp_path, "llama-tied")
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert load_model(tmp_path, CPU).lm_head is None
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    head = load_model(tmp_path, CPU).lm_head
    assert head is not None
    assert torch.equal(head.dense(), embedding + 1)
