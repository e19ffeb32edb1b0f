import pytest
import torch

from penstock.nn.loader import load_model
from tests.helpers.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("transformers")
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, torch.device("cpu"))
