"""Experts against transformers' own blocks, and what a row's bits do not depend on."""

import pytest
import torch

from penstock.nn import native, ops
from penstock.nn.config import DecoderConfig, ExpertsConfig, RopeConfig, Routing, deepseek_experts
from penstock.nn.experts import CORRECTION, MixtureOfExperts
from penstock.nn.formats import AT_LOAD
from penstock.nn.linear import WHOLE, Linear, Shard
from penstock.nn.methods import method_for

CPU = torch.device("cpu")
HIDDEN, WIDTH, COUNT = 64, 36, 16
V2 = {"topk_method": "greedy", "n_group": None, "topk_group": None}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}


def config_of(experts: ExpertsConfig) -> DecoderConfig:
    rope = RopeConfig(kind="default", theta=1e4, dim=16, options={})
    return DecoderConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=WIDTH,
        norm_eps=1e-6,
        rope=rope,
        max_positions=64,
        tie_embeddings=True,
        dtype=None,
        windows=(None,),
        experts=experts,
    )


def block(experts: ExpertsConfig, shard: Shard = WHOLE, dtype: torch.dtype = torch.float32, asked: str | None = None):
    """As the loader makes one, with memory that has any values."""
    made = MixtureOfExperts(config_of(experts), experts, shard).to(dtype)
    form = None if asked is None else AT_LOAD[asked]
    for part in made.modules():
        if isinstance(part, Linear):
            codes = None if form is None or part.exact else form.codes
            part.hold(method_for(CPU, dtype, codes), *([] if codes is None else [form]))
    made._apply(lambda place: torch.full(place.shape, 3, dtype=place.dtype))
    for part in made.modules():
        if isinstance(part, Linear):
            part.prepare()
    return made


def fill(made: MixtureOfExperts, router, gate_up, down, shared=None):
    """With [experts, 2 * width, hidden] and [experts, hidden, width]."""
    made.router.load("weight", router)
    for i in range(len(gate_up)):
        for j, rows in enumerate(gate_up[i].chunk(2)):
            made.experts.gate_up_proj.load("weight", rows, 2 * i + j)
        made.experts.down_proj.load("weight", down[i], i)
    if shared is not None:
        for i, rows in enumerate(shared[:2]):
            made.shared_experts.gate_up_proj.load("weight", rows, i)
        made.shared_experts.down_proj.load("weight", shared[2])


def weights_of(seed: int = 0):
    torch.manual_seed(seed)
    gate_up = torch.randn(COUNT, 2 * WIDTH, HIDDEN) / 8
    return torch.randn(COUNT, HIDDEN), gate_up, torch.randn(COUNT, HIDDEN, WIDTH) / 6


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("version", "changes"),
    [
        ("v3", {"n_group": 4, "topk_group": 2}),
        ("v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
        ("v2", V2),
        ("v2", LIMITED),
    ],
)
def test_what_deepseek_routes(version, changes, backend):
    if backend == "native" and native.missing() is not None:
        pytest.skip(str(native.missing()))
    transformers = pytest.importorskip("transformers")
    module = getattr(transformers.models, f"deepseek_{version}")
    kind, of_version = (
        (module.configuration_deepseek_v3, "V3") if version == "v3" else (module.configuration_deepseek_v2, "V2")
    )
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": COUNT, "num_experts_per_tok": 4}
    sizes |= {"n_shared_experts": 2, "routed_scaling_factor": 2.5}
    theirs_config = getattr(kind, f"Deepseek{of_version}Config")(**sizes, **changes)
    theirs_module = getattr(module, f"modeling_deepseek_{version}")
    theirs = getattr(theirs_module, "DeepseekV3MoE" if version == "v3" else "DeepseekV2Moe")(theirs_config).eval()
    v3 = version == "v3"
    hf = theirs_config.to_dict() | {"num_hidden_layers": 5, "first_k_dense_replace": 2}
    config = deepseek_experts(hf, corrected=v3)
    assert config.layers == {2, 3, 4}
    ours = block(config)
    router, gate_up, down = weights_of()
    shared = [
        torch.randn(2 * WIDTH, HIDDEN) / 8,
        torch.randn(2 * WIDTH, HIDDEN) / 8,
        torch.randn(HIDDEN, 2 * WIDTH) / 9,
    ]
    fill(ours, router, gate_up, down, shared)
    theirs.gate.weight.copy_(router)
    theirs.experts.gate_up_proj.copy_(gate_up)
    theirs.experts.down_proj.copy_(down)
    for name, weight in zip(("gate_proj", "up_proj", "down_proj"), shared, strict=True):
        getattr(theirs.shared_experts, name).weight.copy_(weight)
    if v3:
        correction = torch.randn(COUNT) / 4
        theirs.gate.e_score_correction_bias.copy_(correction)
        ours.router.load(CORRECTION, correction)
        assert ours.to(torch.bfloat16).router.correction.dtype == torch.float32
        ours = block(config)
        fill(ours, router, gate_up, down, shared)
        ours.router.load(CORRECTION, correction)
    x = torch.randn(50, HIDDEN)
    with (
        ops.OPS["route"].using(backend),
        ops.OPS["expert_rows"].using(backend),
        ops.OPS["combine_experts"].using(backend),
    ):
        found = ours(x)
    expected = theirs(x[None])[0]
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max() + 1e-6


PLAIN = ExpertsConfig(routing=Routing(count=COUNT, top_k=3, renormalised=True), width=WIDTH, layers=frozenset([0]))


@torch.inference_mode()
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("asked", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_in_any_company(dtype, asked):
    config = ExpertsConfig(routing=PLAIN.routing, width=64, layers=PLAIN.layers)
    made = block(config, dtype=dtype, asked=asked)
    torch.manual_seed(1)
    fill(made, torch.randn(COUNT, HIDDEN), torch.randn(COUNT, 128, HIDDEN) / 8, torch.randn(COUNT, HIDDEN, 64) / 8)
    x = torch.randn(300, HIDDEN).to(dtype)
    whole = made(x)
    for rows in (1, 2, 7, 64):
        for first in (0, 1, 100, 300 - rows):
            assert torch.equal(made(x[first : first + rows]), whole[first : first + rows])
    native.set_threads(1 if native.threads() > 1 else 3)
    try:
        assert torch.equal(made(x), whole)
    finally:
        native.set_threads(torch.get_num_threads())
