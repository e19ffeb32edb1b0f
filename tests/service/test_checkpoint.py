"""What is read of a checkpoint, and how it is found."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.core.errors import ConfigError
from penstock.service.checkpoint import DEMO, checked_override, find_checkpoint, fingerprint, read_defaults


def write(directory, generation=None, config=None):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return read_defaults(directory)


def test_generation_config_goes_before_config(tmp_path):
    defaults = write(tmp_path, {"eos_token_id": [1, 2], "temperature": 0.6, "max_new_tokens": 9}, {"eos_token_id": 7})
    assert defaults.eos_ids == {1, 2}
    assert defaults.sampling == {"temperature": 0.6, "max_tokens": 9}


def test_what_a_flag_says_goes_before_the_file(tmp_path):
    write(tmp_path, {"temperature": 0.6, "top_p": 0.9})
    given = checked_override('{"temperature": 0.0, "max_new_tokens": 9}')
    assert read_defaults(tmp_path, override=given).sampling == {"temperature": 0.0, "top_p": 0.9, "max_tokens": 9}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("warm", "a JSON object of temperature, top_k"),
        ('{"heat": 1}', "a JSON object of temperature, top_k"),
        ("[1]", "a JSON object of temperature, top_k"),
        ('{"temperature": -1}', "temperature"),
        ('{"top_p": "much"}', "top_p"),
    ],
)
def test_a_flag_that_cannot_be_says_what_can(given, says):
    with pytest.raises(ValueError, match=says):
        checked_override(given)


def test_config_alone_and_nothing_at_all(tmp_path):
    assert write(tmp_path).eos_ids == frozenset()
    assert write(tmp_path, config={"eos_token_id": 7}).eos_ids == {7}


def test_a_greedy_checkpoint_is_greedy(tmp_path):
    assert write(tmp_path, {"do_sample": False, "temperature": 0.6}).sampling == {"temperature": 0.0}


def test_the_tokenizers_own_end_counts_too(tmp_path):
    write(tmp_path, {"eos_token_id": 1})
    assert read_defaults(tmp_path, tokenizer_eos=9).eos_ids == {1, 9}


@pytest.mark.parametrize("broken", ["{", "[1]", {"eos_token_id": "end"}, {"top_p": 0.0}, {"temperature": "0.6"}])
def test_broken_files_are_named(tmp_path, broken):
    with pytest.raises(ConfigError):
        write(tmp_path, broken)


def test_names(tmp_path):
    assert find_checkpoint("demo") == DEMO
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_checkpoint(str(tmp_path))
    write(tmp_path, config={})
    assert find_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="no folder"):
        find_checkpoint("/no/such/place/at/all")
    with pytest.raises(ConfigError, match=r"the hub did not give it|huggingface-hub"):
        find_checkpoint("nobody/nothing")


def test_two_checkpoints_that_differ_in_one_small_tensor_are_two(tmp_path):
    digests = set()
    for name, norm in (("one", 1.0), ("other", -1.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tensors = {"a": np.zeros(1 << 18, np.float32), "norm": np.full(8, norm, np.float32), "z": np.zeros(1 << 18)}
        save_file(tensors, tmp_path / name / "model.safetensors")
        digests.add(fingerprint(tmp_path / name))
    assert len(digests) == 2
