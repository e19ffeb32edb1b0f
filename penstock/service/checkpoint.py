"""Finds a checkpoint, and reads its generation defaults: end-of-sequence tokens and sampling parameters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.hf_config import text_config
from penstock.core.sampling import SamplingParams

DEMO = Path(__file__).parent.parent / "demo"
BUNDLED = {"demo": DEMO, "demo-vl": DEMO.with_name("demo_vl")}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_DOUBLES = ["consolidated*"]  # the same weights in another layout
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]  # never pickles, never code
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file of weights
# generation_config.json's name -> ours
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def find_checkpoint(name: str) -> Path:
    """The folder of a model's files: of one of `BUNDLED`, of itself, or fetched for ORGANISATION/NAME.

    Raises:
        ConfigError: none of these, or the hub cannot be reached.
    """
    if name in BUNDLED:
        return BUNDLED[name]
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ConfigError(f"model: {name} has no config.json, so it is no Hugging Face checkpoint", "model")
        return Path(name)
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"model: {name!r} is no folder; allowed are a checkpoint folder, a hub name, demo, or demo-vl", "model"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"model: {name!r} is no folder here, and fetching it needs the package huggingface-hub", "model"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_DOUBLES))
    except Exception as error:  # the library's errors have no common root
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"model: {name!r} is no folder here and the hub did not give it: {reason}", "model") from None


def fingerprint(directory: Path) -> str:
    """A digest by which checkpoints are told apart: of config.json, and of samples of the weights and of each tensor,
    whatever folder they are in. All of them would have to be read."""
    digest = blake2b(digest_size=16)
    digest.update((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as weights:
            for start in _tensors(weights, size) + [size * i // SAMPLES for i in range(SAMPLES)]:
                weights.seek(start)
                digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _tensors(weights: BinaryIO, size: int) -> list[int]:
    """Where each begins: two checkpoints of one model may differ in a small one alone."""
    length = int.from_bytes(weights.read(8), "little")
    try:
        header = json.loads(weights.read(length)) if length <= size else {}
        starts = [8 + length + int(of["data_offsets"][0]) for name, of in header.items() if name != "__metadata__"]
        return sorted(start for start in starts if 0 <= start < size)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return []  # no checkpoint, which is found out when it is loaded


def file_states(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Sizes and times of the weights' files in this folder, which no edit in place leaves as they were."""
    states = {}
    for path in directory.glob("*.safetensors"):
        stat = path.stat()
        states[path.name] = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return states


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """
    Attributes:
        eos_ids: tokens that end an output unless `ignore_eos`.
        sampling: `SamplingParams` fields for requests that do not give them.
    """

    eos_ids: frozenset[int]
    sampling: dict[str, Any]


def read_defaults(directory: Path, tokenizer_eos: int | None = None, override: str | None = None) -> GenerationDefaults:
    """From generation_config.json, and the end-of-sequence ids also from config.json. Raises ConfigError.

    Args:
        tokenizer_eos: the tokenizer's own end-of-sequence token, which always counts: many chat models name it only
            there.
        override: what `checked_override` has let pass, before what the file has.
    """
    generation, config = _read(directory / "generation_config.json"), text_config(_read(directory / "config.json"))
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    ids = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{directory}: eos_token_id is {eos!r}, a token id or a list of them is needed", "model")
    sampling = {ours: generation[name] for name, ours in SAMPLING.items() if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        sampling["temperature"] = 0.0  # transformers ignores the one that is given then
    if override is not None:
        sampling |= {SAMPLING[name]: value for name, value in json.loads(override).items()}
    try:
        SamplingParams(**sampling)
    except (InvalidRequest, TypeError) as error:
        raise ConfigError(f"{directory / 'generation_config.json'}: {error}", "model") from None
    return GenerationDefaults(frozenset(ids) | ({tokenizer_eos} if tokenizer_eos is not None else set()), sampling)


def checked_override(value: str) -> str:
    """A JSON object of what generation_config.json has of sampling. Raises ValueError with what is allowed."""
    try:
        given = json.loads(value)
        SamplingParams(**{SAMPLING[name]: one for name, one in given.items()})
    except (InvalidRequest, TypeError) as error:
        raise ValueError(f"sampling parameters that can be: {error}") from None
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"a JSON object of {', '.join(SAMPLING)}") from None
    return value


def model_type(directory: Path) -> str:
    """In config.json; "" where it is missing. Raises ConfigError."""
    return str(_read(directory / "config.json").get("model_type", ""))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})", "model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object", "model")
    return value
