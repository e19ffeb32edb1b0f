"""LLaVA-OneVision as transformers has it, from files to logits: tiles, placeholders, and what is made of them."""

import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS, Encode, SequenceStep, StepPlan
from penstock.core.request import MediaSpan
from penstock.core.sampling import SamplingParams
from penstock.core.tiles import Tiling, read_tiling
from penstock.engine.build import shape_of
from penstock.engine.cache import KVCache, make_layout
from penstock.engine.media import MediaEmbeddings
from penstock.media.decode import make
from penstock.media.limits import MediaLimits
from penstock.media.processor import TilingProcessor, read_processor
from penstock.nn import native
from penstock.nn.batch import Batch
from penstock.nn.loader import load_model
from penstock.nn.models.llava_onevision import LlavaOnevision
from tests.helpers.checkpoints import TILES, auto_class, write_checkpoint
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.hostile import encoded, video
from tests.helpers.ranks import load_shards, make_parallel_engine

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")
IMAGE, VIDEO = 301, 302
SETTINGS = {
    "size": {"height": 44, "width": 44},
    "image_grid_pinpoints": TILES["image_grid_pinpoints"],
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
}
SIZES = [(100, 60), (44, 44), (30, 90), (400, 47), (61, 300), (7, 5), (500, 400)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "llava-onevision", "llava-onevision")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def processor(checkpoint) -> TilingProcessor:
    found = read_processor(checkpoint)
    assert isinstance(found, TilingProcessor)
    return found


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, CPU)


@pytest.fixture(scope="module")
def theirs(checkpoint):
    return auto_class(checkpoint.name).from_pretrained(checkpoint, dtype=torch.float32).eval()


def their_images():
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    return LlavaOnevisionImageProcessorPil(**SETTINGS)


def made_of(processor, sizes):
    return [make("image", encoded("PNG", *size), processor, MediaLimits(), alone=len(sizes) == 1) for size in sizes]


def asked(name, made, **options):
    """A request of what was made, with text before, between and behind."""
    prompt, spans = [5, 6, 7], []
    for one in made:
        spans.append(MediaSpan(len(prompt), one.length, one.digest, one.kind, one.grid, 1.0, one.shape, one.source))
        prompt += [IMAGE if one.kind == "image" else VIDEO] * one.length + [9, 10]
    request = make_request(name, prompt, **options)
    return type(request)(
        **{field: getattr(request, field) for field in request.__dataclass_fields__}
        | {"media": tuple(spans), "pixels": tuple(one.pixels for one in made)}
    )


def ours(model, request, chunks):
    cache = KVCache.on_device(make_layout(model.config, model.dtype, "block", ""), 16, CPU)
    media, spans = MediaEmbeddings(), zip(request.media, request.pixels, strict=True)
    media.follow(model, StepPlan((), encodes=tuple(Encode("r", *each) for each in spans)))
    rows, done = [], 0
    for chunk in [*chunks, len(request.prompt)]:
        if not (own := request.prompt[done : done + chunk]):
            break
        end = done + len(own)
        step = SequenceStep("r", done, own, tuple(range(-(-end // BLOCK_TOKENS))), 1, SamplingParams(), 0)
        step.media = request.media
        batch = Batch([step], CPU)
        batch.seen = media.seen(model, batch)
        rows.append(model.logits(model(batch, cache.layers)))
        done = end
    return torch.cat(rows)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[size] for size in SIZES] + [SIZES[:2], SIZES[2:5]])
def test_tiles_and_logits(processor, model, theirs, sizes):
    images = [Image.open(io.BytesIO(encoded("PNG", *size))).convert("RGB") for size in sizes]
    expected = their_images()([images], return_tensors="pt")
    made = made_of(processor, sizes)
    for one, values in zip(made, expected["pixel_values"], strict=True):
        pixels = torch.frombuffer(bytearray(one.pixels), dtype=torch.uint8).view(*one.shape, 3).permute(0, 3, 1, 2)
        mean, std = (torch.tensor(SETTINGS[name])[:, None, None] for name in ("image_mean", "image_std"))
        assert ((pixels / 255 - mean) / std - values[: len(pixels)]).abs().max() < 1e-5
    request = asked("r", made)
    logits = theirs(torch.tensor([request.prompt]), **expected).logits[0]
    for chunks in ((), (11, 1, 30, 7)):
        assert (ours(model, request, chunks) - logits).abs().max() < 1e-4


@torch.inference_mode()
def test_videos(processor, model, theirs):
    pytest.importorskip("av")
    made = make("video", video(10), processor, MediaLimits(frames=4))
    assert (made.shape, made.length) == ((4, 44, 44), 4 * 9 + 1)
    pixels = torch.frombuffer(bytearray(made.pixels), dtype=torch.uint8).view(*made.shape, 3).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(SETTINGS[name])[:, None, None] for name in ("image_mean", "image_std"))
    request = asked("r", [made])
    values = ((pixels / 255 - mean) / std)[None]
    logits = theirs(torch.tensor([request.prompt]), pixel_values_videos=values).logits[0]
    assert (ours(model, request, (20,)) - logits).abs().max() < 1e-4


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_placeholders(height, width):
    """Of real checkpoints' sizes, against transformers' processor."""
    from transformers import LlavaOnevisionProcessor
    from transformers.image_processing_utils import select_best_resolution

    tiling = read_tiling({})
    own = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    own.num_image_tokens, own.vision_aspect_ratio = 729, "anyres_max_9"
    own.image_processor = type("P", (), {"image_grid_pinpoints": [list(size) for size in tiling.sizes]})
    assert tiling.size((height, width)) == select_best_resolution((height, width), tiling.sizes)
    assert tiling.tokens((height, width)) == own._get_number_of_features(height, width, 384, 384)


def test_same_tokens_however_it_runs(processor, model):
    def mine():
        return asked("mine", made_of(processor, [SIZES[0]]), temperature=0.9, seed=3)

    alone = Collector(make_engine(model)).run(mine())["mine"]
    assert len(set(alone)) > 3
    others = [asked(f"o{i}", made_of(processor, [SIZES[i]]), temperature=1.0, seed=i) for i in range(1, 4)]
    assert Collector(make_engine(model)).run(*others[:2], mine(), *others[2:])["mine"] == alone
    assert Collector(make_engine(model, budget=7, sequences=1)).run(mine())["mine"] == alone


@pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
def test_two_ranks_say_what_one_says(processor, checkpoint, model):
    requests = [
        asked("one", made_of(processor, SIZES[:1]), max_tokens=8),
        asked("several", made_of(processor, SIZES[1:4]), max_tokens=8),
    ]
    one = Collector(make_engine(model)).run(*requests)
    assert Collector(make_parallel_engine(load_shards(checkpoint, 2))).run(*requests) == one


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_grid_pinpoints": [[44, 50]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio"),
        ({"vision_config": {"image_size": 10, "patch_size": 14}}, "image_size"),
    ],
)
def test_tilings_that_cannot_be(changes, said):
    with pytest.raises(ConfigError, match=said):
        read_tiling({**TILES, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_feature_layer": [-1, -2]}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias"),
        ({"text_config": {"model_type": "llama"}}, "text_config"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config"),
        ({"vision_config": {"num_attention_heads": 7}}, "num_attention_heads"),
        ({"vision_config": {"hidden_act": "silu"}}, "hidden_act"),
        ({"vision_config": {"num_channels": 4}}, "num_channels"),
    ],
)
def test_options_that_are_not_supported_are_named(checkpoint, changes, field):
    config = json.loads((checkpoint / "config.json").read_text())
    for name, value in changes.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError) as refused:
        LlavaOnevision.read_config(config)
    assert refused.value.field == field


def test_settings_of_two_minds(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert read_processor(tmp_path).tiling == Tiling(44, 5, tuple(map(tuple, TILES["image_grid_pinpoints"])), 4)
    for settings in ({"image_grid_pinpoints": [[44, 44]]}, {"size": {"height": 384, "width": 384}}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigError, match="other sizes"):
            read_processor(tmp_path)


@pytest.mark.parametrize("name", ["llava-onevision", "qwen2.5-vl"])
def test_what_a_tower_takes_is_predicted_from_its_size(name, tmp_path):
    model = load_model(write_checkpoint(tmp_path, name), CPU)
    tower = shape_of(model).vision
    weights = sum(p.nbytes for p in model.visual.parameters())
    assert tower.weight_bytes == pytest.approx(weights, rel=0.25), "biases, norms and positions are left out"
    assert (tower.width, tower.layers) == (model.config.hidden_size, model.config.vision.num_layers)
    assert 0 < 2 * tower.flops(16) <= tower.flops(32)
