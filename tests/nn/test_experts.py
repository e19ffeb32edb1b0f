"""Experts against transformers' own blocks, and what a row's bits do not depend on."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.parallel import Placement
from penstock.nn import native, ops
from penstock.nn.config import DecoderConfig, ExpertsConfig, RopeConfig, Routing, deepseek_experts
from penstock.nn.experts import CORRECTION, MixtureOfExperts, Spare
from penstock.nn.formats import AT_LOAD
from penstock.nn.linear import WHOLE, Linear, Shard
from penstock.nn.loader import load_expert, load_model
from penstock.nn.methods import method_for
from penstock.nn.places import stored_by_name
from penstock.nn.ranks import SharedMemoryRanks
from tests.helpers.checkpoints import write_checkpoint

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
    made = filled(WIDE, dtype=dtype, asked=asked)
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


def filled(experts: ExpertsConfig, shard: Shard = WHOLE, dtype: torch.dtype = torch.float32, asked: str | None = None):
    made = block(experts, shard, dtype, asked)
    torch.manual_seed(1)
    fill(made, torch.randn(COUNT, HIDDEN), torch.randn(COUNT, 128, HIDDEN) / 8, torch.randn(COUNT, HIDDEN, 64) / 8)
    return made


WIDE = ExpertsConfig(routing=PLAIN.routing, width=64, layers=PLAIN.layers)


class Spread:
    """A block whose experts are spread over ranks, which are threads."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32, asked: str | None = None) -> None:
        memory = mmap.mmap(-1, SharedMemoryRanks.bytes_for(size))
        self.blocks = []
        for rank in range(size):
            shard = Shard(experts=Shard(rank, size, SharedMemoryRanks(memory, rank, size)))
            self.blocks.append(filled(WIDE, shard, dtype, asked))
        self._pool = ThreadPoolExecutor(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        def run(made: MixtureOfExperts) -> torch.Tensor:
            with torch.inference_mode():
                return made(x)

        found = list(self._pool.map(run, self.blocks))
        assert all(torch.equal(each, found[0]) for each in found[1:])
        return found[0]

    def bring(self, rank: int, expert: int) -> None:
        """From its home."""
        home = next(made.experts for made in self.blocks if expert in made.experts.home)
        self.blocks[rank].experts.bring(expert, *home.weights_of(expert))


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(("dtype", "asked"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_with_whole_experts_compute_what_one_does_to_the_bit(size, dtype, asked):
    one, spread = filled(WIDE, dtype=dtype, asked=asked), Spread(size, dtype, asked)
    held = [made.experts.gate_up_proj.weight_bytes for made in spread.blocks]
    assert sum(held) == one.experts.gate_up_proj.weight_bytes
    for rows in (1, 5, 400):
        x = torch.randn(rows, HIDDEN).to(dtype)
        with torch.inference_mode():
            assert torch.equal(spread(x), one(x))
    for made in spread.blocks:
        assert torch.equal(made.experts.counts, one.experts.counts)
    assert one.experts.counts.sum() == 406 * 3


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (1, 3), (2, 2)])
def test_rows_of_several_groups_travel_and_keep_their_bits(tensor, data, dtype):
    """Groups have rows of their own, some of them none; the last ones take several meetings."""
    one, size = filled(WIDE, dtype=dtype), tensor * data
    all_, each = SharedMemoryRanks.bytes_for(size), SharedMemoryRanks.bytes_for(tensor)
    memory = mmap.mmap(-1, all_ + data * each)
    blocks = []
    for group in range(data):
        for own in range(tensor):
            ranks = SharedMemoryRanks(memory, own, tensor, start=all_ + group * each) if tensor > 1 else None
            number = group * tensor + own
            experts = Shard(number, size, SharedMemoryRanks(memory, number, size), apart=True)
            blocks.append(filled(WIDE, Shard(own, tensor, ranks, experts), dtype))
    with ThreadPoolExecutor(size) as pool:
        for counts in ((1, 1, 1), (0, 7, 1), (0, 0, 5), (700, 3, 2_000)):
            xs = [torch.randn(count, HIDDEN).to(dtype) for count in counts[:data]]

            def run(number, xs=xs):
                with torch.inference_mode():
                    return blocks[number](xs[number // tensor])

            found = list(pool.map(run, range(size)))
            with torch.inference_mode():
                for number, made in enumerate(found):
                    assert torch.equal(made, one(xs[number // tensor]))
    assert sum(made.experts.counts.sum() for made in blocks) == sum(
        3 * count for counts in ((1, 1, 1), (0, 7, 1), (0, 0, 5), (700, 3, 2_000)) for count in counts[:data]
    )


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_placements_change_no_bit(data):
    """One after the other, each brought while the one before is computed."""
    size, room = 2, 2
    one, spread = filled(WIDE), Spread(size)
    for made in spread.blocks:
        made.experts.spare = Spare(made.experts, 2 * room)
    for _ in range(6):
        own = []
        for made in spread.blocks:
            away = [expert for expert in range(COUNT) if expert not in made.experts.home]
            own.append(set(data.draw(st.lists(st.sampled_from(away), max_size=room, unique=True))))
        x = torch.randn(data.draw(st.sampled_from([1, 9])), HIDDEN)
        with torch.inference_mode():
            expected = one(x)
        assert torch.equal(spread(x), expected)
        for rank, experts in enumerate(own):
            for expert in experts:
                spread.bring(rank, expert)
        assert torch.equal(spread(x), expected)
        # what others have besides, some do not compute at home
        idle = {e for e in range(COUNT) if data.draw(st.booleans()) and any(e in experts for experts in own)}
        homes = [set(made.experts.home) for made in spread.blocks]
        ranks = [sorted((home - idle) | experts) for home, experts in zip(homes, own, strict=True)]
        placement = Placement(tuple(tuple(data.draw(st.permutations(rank))) for rank in ranks))
        for made in spread.blocks:
            made.experts.place(placement)
        assert torch.equal(spread(x), expected)


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_placements_that_cannot_be_are_named():
    spread = Spread(2)
    experts = spread.blocks[0].experts
    with pytest.raises(ValueError, match="no room for expert 9: there is memory for 0 away from home"):
        spread.bring(0, 9)
    experts.spare = Spare(experts, 1)
    home = (tuple(range(8)), tuple(range(8, 16)))
    with pytest.raises(ValueError, match="expert 9 is neither at home here nor was it brought"):
        experts.place(Placement(((*home[0], 9), home[1])))
    with pytest.raises(ValueError, match="expert 3 is placed nowhere"):
        experts.place(Placement(((0, 1, 2, 4, 5, 6, 7), home[1])))
    with pytest.raises(ValueError, match="a placement for 1 ranks, there are 2"):
        experts.place(Placement((tuple(range(16)),)))
    spread.bring(0, 9)
    with pytest.raises(ValueError, match="no room for expert 10: there is memory for 1 away from home"):
        spread.bring(0, 10)
    experts.place(Placement(((*home[0], 9), home[1])))


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_rows_take_turns_at_replicas_and_weights_that_move_are_at_home():
    one, spread = filled(WIDE), Spread(2)
    every = Placement((tuple(range(16)),) * 2)
    for rank, made in enumerate(spread.blocks):
        made.experts.spare = Spare(made.experts, 8)
        for expert in set(range(16)) - set(made.experts.home):
            spread.bring(rank, expert)
        made.experts.place(every)
    row = torch.randn(1, HIDDEN)
    with torch.inference_mode():
        expected = one(row)
    for _ in range(6):
        assert torch.equal(spread(row), expected)
    for made in spread.blocks:
        assert made.experts.loads.tolist() == [9, 9], "3 of 16 experts, one row, six times"
        made._apply(lambda place: place.clone())
        assert made.experts.placement == Placement.even(16, 2)
    assert torch.equal(spread(row), expected)
    with pytest.raises(ValueError, match="no room for expert 9"):
        spread.bring(0, 9)


@torch.inference_mode()
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize("asked", [None, "int4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_one_expert_is_read_as_all_are(tmp_path, name, asked):
    pytest.importorskip("transformers")
    model = load_model(
        write_checkpoint(tmp_path, name, intermediate_size=128, moe_intermediate_size=64), CPU, quantization=asked
    )
    experts = model.model.layers[1].feed_forward.experts
    names = stored_by_name(tmp_path)
    for expert in (0, 5):
        for found, own in zip(load_expert(tmp_path, model, 1, expert, names), experts.weights_of(expert), strict=True):
            assert all(map(torch.equal, found.parameters(), own.parameters()))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="not found"):
        load_expert(tmp_path, model, 1, 0, names)
