"""Sizes and pixels as transformers' processors make them."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.media.decode import make
from penstock.media.limits import MediaLimits
from penstock.media.processor import Processor, Refused, read_processor
from penstock.nn.loader import load_model
from penstock.nn.vision import normalised
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.hostile import encoded

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
SETTINGS = {"min_pixels": 3136, "max_pixels": 200_000, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "qwen2.5-vl", "qwen2.5-vl")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def processor(checkpoint) -> Processor:
    found = read_processor(checkpoint)
    assert found is not None
    return found


def theirs():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**SETTINGS)


@pytest.mark.parametrize(("width", "height", "kind"), [(300, 200, "PNG"), (40, 30, "PNG"), (1200, 701, "JPEG")])
def test_pixels_and_patches(checkpoint, processor, width, height, kind):
    data = encoded(kind, width, height)
    made = make("image", data, processor, MediaLimits())
    with Image.open(io.BytesIO(data)) as image:
        expected = theirs()(image, return_tensors="pt")
    _, rows, columns = expected["image_grid_thw"][0].tolist()
    assert made.grid == (1, rows // 2, columns // 2)
    assert made.length == rows * columns // 4
    model = load_model(checkpoint, torch.device("cpu"))
    pixels = torch.from_numpy(np.frombuffer(made.pixels, np.uint8).copy()).view(*made.shape, 3)
    patches, _ = model.visual._patches(normalised(pixels, model.config.vision))
    assert (patches - expected["pixel_values"]).abs().max() < 1e-5


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_sizes(processor, height, width):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        expected = smart_resize(height, width, 28, 3136, 200_000)
    except ValueError:
        with pytest.raises(Refused):
            processor.size("image", height, width)
    else:
        assert processor.size("image", height, width) == expected


@given(st.integers(1, 5000), st.floats(0.5, 120), st.integers(1, 100))
def test_frames(processor, total, fps, most):
    taken = processor.taken(total, fps, most)
    assert taken == sorted(set(taken))
    assert 1 <= len(taken) <= max(1, min(total, most))
    assert 0 <= taken[0] <= taken[-1] < total
    apart = np.diff(taken)
    assert apart.size == 0 or apart.max() - apart.min() <= 1, "evenly spaced"
    if (wanted := total / fps * processor.fps) >= 4 and wanted + 2 <= min(total, most):
        assert 0 <= wanted - len(taken) < 2, "so many as a second has, in whole pairs"


def test_models_that_see_nothing_and_settings_that_mean_nothing(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert read_processor(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": "x"}')
    with pytest.raises(ConfigError, match="how it takes images"):
        read_processor(tmp_path)
