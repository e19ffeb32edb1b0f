"""Kernels in Triton compile for a device that is not there."""

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.nn.triton import attention, cache, experts, latent, linear, power_of_two, rows

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted")
HOPPER = GPUTarget("cuda", 90, 32)
SPLITS = {"BLOCK": 64, "SPLIT": attention.SPLIT, "MOST": attention.MOST_SPLITS}
NUMBERS = {"eps": "fp32", "scale": "fp32"}  # that are not whole
OWN = {"tiles": "*i64", "ids": "*i64", "positions": "*i64", "slot_blocks": "*i64", "slot_offsets": "*i64"}
OWN |= {"part_sums": "*fp32", "part_stats": "*fp32", "logits": "*fp32", "tokens": "*i64", "finite": "*i1"}
POINTERS = {"x", "residual", "weight", "out", "total", "gate_up", "qkv", "q_norm", "k_norm", "cos", "sin", "q_out"}
OWN |= {"offsets": "*i64", "pairs": "*i64", "bounds": "*i64", "places": "*i64", "weights": "*fp32"}
POINTERS |= {"bias", "values", "q", "k_values", "v_values", "k", "v", "made"}


def compiled(kernel, dtype: str, constants: dict, options: dict | None = None) -> str:
    """Its PTX."""
    return built(kernel, dtype, constants, options).asm["ptx"]


def built(kernel, dtype: str, constants: dict, options: dict | None = None):
    """For pointers and strides that are multiples of 16."""
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = OWN.get(name) or NUMBERS.get(name) or (f"*{dtype}" if name in POINTERS else "i32")
        if name in POINTERS or name.endswith("stride") or name in ("ins", "outs"):
            aligned[place,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=HOPPER, options=options or {})


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [24, 4096])
def test_what_is_computed_of_rows(dtype, width):
    for add in (True, False):
        compiled(rows.norm_kernel, dtype, {"ADD": add, "WIDE": add, "BLOCK": power_of_two(width)})
        compiled(rows.gate_kernel, dtype, {"GELU": add, "BLOCK": rows.GATE_BLOCK})


def test_the_largest():
    compiled(rows.argmax_kernel, "fp32", {"BLOCK": rows.ARGMAX_BLOCK})


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("dim", "half", "normed"), [(128, 64, True), (80, 20, False)])
def test_what_stores_k_and_v(dtype, dim, half, normed):
    shape = {"DIM": dim, "HALF": half, "BLOCK": power_of_two(dim), "HEADS": cache.HEADS}
    compiled(cache.qkv_kernel, dtype, {**shape, "NORMED": normed, "WIDE": False})
    for both in (True, False):
        own = {"DIM": dim, "BOTH": both, "HEADS": cache.HEADS, "BLOCK": power_of_two(dim)}
        compiled(cache.store_kernel, dtype, own)


@pytest.mark.parametrize("outs", [1024, 24576])
def test_products_are_on_matrix_units_and_load_ahead(outs):
    shape = {"BIASED": True, "ROWS": linear.ROWS, "OUTS": linear.outs_of(outs), "INS": linear.INS}
    ptx = compiled(linear.linear_kernel, "bf16", shape, linear.OPTIONS)
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx


@pytest.mark.parametrize(("dim", "group"), [(128, 4), (80, 3), (256, 1)])
def test_attention_is_on_matrix_units_and_loads_ahead(dim, group):
    block = power_of_two(dim)
    shape = {"DIM": dim, "DIM_BLOCK": block, **SPLITS}
    kernel = attention.attend_kernel
    ptx = compiled(kernel, "bf16", {**shape, "GROUP": group, "TILE": attention.TILE}, attention.launch_options(block))
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx
    compiled(attention.merge_kernel, "bf16", {**shape, "HEADS": attention.MERGED}, {"num_warps": 2})


MOST_SHARED = 227 << 10  # bytes of a program on a Hopper device


@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 512, 64), (64, 512, 64), (3, 40, 12)])
def test_latent_attention_finds_room(heads, rank, rope):
    wide, narrow = (max(16, power_of_two(size)) for size in (rank, rope))
    shape = {"GROUP": heads, "RANK": rank, "RANK_BLOCK": wide, "ROPE": rope, "ROPE_BLOCK": narrow, **SPLITS}
    made = built(latent.attend_kernel, "bf16", {**shape, "TILE": latent.TILE, "TOKENS": latent.TOKENS}, latent.OPTIONS)
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert "cp.async" in made.asm["ptx"]
    assert made.metadata.shared <= MOST_SHARED


def test_products_of_heads_and_experts_are_on_matrix_units_and_load_ahead():
    shape = {"ROWS": latent.ROWS, "OUTS": latent.OUTS, "INS": latent.INS}
    assert "wgmma.mma_async" in compiled(latent.head_linear_kernel, "bf16", shape)
    shape = {"ROWS": experts.ROWS, "OUTS": experts.OUTS, "INS": experts.INS, "ALIGNED": True, "EXPERTS": 128}
    for gather in (True, False):
        ptx = compiled(experts.expert_kernel, "bf16", {**shape, "GATHER": gather}, experts.OPTIONS)
        assert "wgmma.mma_async" in ptx
        assert "cp.async" in ptx
    compiled(experts.combine_kernel, "bf16", {"BLOCK": experts.COMBINED})
