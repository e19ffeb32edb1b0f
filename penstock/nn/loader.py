"""A checkpoint folder to a model on a device: safetensors, one file or several, read in file order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.layers import Linear
from penstock.nn.models import architecture
from penstock.nn.models.decoder import Decoder
from penstock.nn.rope import frequencies

# a checkpoint's projection -> the fused one it is part of, and its place there
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
IDENTITY_BYTES = 4096  # of every tensor
IGNORED = ("rotary_emb.inv_freq",)  # derived values that older checkpoints carry


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of the checkpoint. Raises ConfigError naming the file."""
    path = directory / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; is {directory} a Hugging Face model folder?", "model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})", "model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object", "model")
    return value


def load_model(directory: Path, device: torch.device, dtype: torch.dtype | None = None) -> Decoder:
    """Build the architecture that config.json names and fill it.

    Args:
        dtype: of the weights; None takes the checkpoint's.

    Raises:
        ConfigError: unsupported architecture or option; missing, unexpected, misshapen or unreadable weights.
    """
    hf = read_json(directory, "config.json")
    if hf.get("quantization_config"):
        raise ConfigError("config.json: quantization_config: quantised checkpoints are not supported", "model")
    cls = architecture(hf)
    config = cls.read_config(hf)
    frequencies(config)  # refuses a rotation that is not known, before anything is read
    with torch.device("meta"):
        model = cls(config).to(dtype or config.dtype or _stored_dtype(directory))
    model.to_empty(device=device)
    fill(model, weights(directory))
    return model.eval()


def _stored_dtype(directory: Path) -> torch.dtype:
    """Of the first weight in the files, for checkpoints whose config.json does not say."""
    return next(weights(directory))[1].dtype


def weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight, file by file. Raises ConfigError naming the file that is missing or broken."""
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a handle of safetensors is no mapping
                    yield name, file.get_tensor(name)
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found", "model") from None
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: corrupt or truncated ({error})", "model") from None


def _weight_files(directory: Path) -> list[Path]:
    if (directory / "model.safetensors.index.json").exists():
        index = read_json(directory, "model.safetensors.index.json").get("weight_map")
        if not isinstance(index, Mapping) or not all(isinstance(name, str) for name in index.values()):
            raise ConfigError(f"{directory / 'model.safetensors.index.json'}: has no weight_map", "model")
        return [directory / name for name in sorted(set(index.values()))]
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    raise ConfigError(
        f"{directory}: no model.safetensors nor model.safetensors.index.json (pickled weights are refused)", "model"
    )


def identity(directory: Path) -> str:
    """Names a checkpoint by what is in it, not by where it lies: a digest of its configuration and of its weights.

    Of the weights it reads every name, type and shape, and the first bytes of every tensor: checkpoints that were
    trained from one another differ in them, and reading all would take as long as loading. Raises ConfigError as
    `weights` does.
    """
    config = read_json(directory, "config.json")
    digest = blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16, person=b"penstock.model")
    for path in _weight_files(directory):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
                digest.update(json.dumps(header, sort_keys=True).encode())
                for name, tensor in sorted(header.items()):
                    if name != "__metadata__":
                        start, end = tensor["data_offsets"]
                        file.seek(8 + size + start)
                        digest.update(file.read(min(IDENTITY_BYTES, end - start)))
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found", "model") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: corrupt or truncated ({error})", "model") from None
    return digest.hexdigest()


def fill(model: Decoder, source: Iterator[tuple[str, Tensor]]) -> None:
    """Copy every weight to its place. Raises ConfigError unless each place is filled exactly once."""
    parameters = dict(model.named_parameters())
    head = None
    missing = {(name, part) for name in parameters for part in range(_parts(model, name))}
    for name, tensor in source:
        if name.endswith(IGNORED):
            continue
        if name == "lm_head.weight" and model.lm_head is None:
            head = tensor
            continue
        target, part = _place(name)
        if target not in parameters:
            raise ConfigError(f"weights: {name!r} is not part of {type(model).__name__}", "model")
        if (target, part) not in missing:
            raise ConfigError(f"weights: {name!r} stands there twice", "model")
        slot = _slice(model, target, part, parameters[target])
        if slot.shape != tensor.shape:
            raise ConfigError(
                f"weights: {name!r} is {list(tensor.shape)}, config.json makes it {list(slot.shape)}", "model"
            )
        slot.copy_(tensor)
        missing.discard((target, part))
    if missing:
        names = sorted(name for name, _ in missing)
        raise ConfigError(f"weights: {len(names)} missing, the first is {names[0]!r}", "model")
    if head is not None:
        _untie(model, head)


def _untie(model: Decoder, head: Tensor) -> None:
    """Some checkpoints say that embeddings are tied and bring another head all the same: it is the one they mean."""
    embedding = model.model.embed_tokens.weight
    if head.shape != embedding.shape:
        raise ConfigError(f"weights: 'lm_head.weight' is {list(head.shape)}, not {list(embedding.shape)}", "model")
    head = head.to(embedding)
    if not torch.equal(head, embedding):
        model.lm_head = Linear(head.shape[1], (head.shape[0],), bias=False)
        model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)


def _place(name: str) -> tuple[str, int]:
    module, _, kind = name.rpartition(".")
    parent, _, projection = module.rpartition(".")
    fused, part = FUSED.get(projection, (projection, 0))
    return f"{parent}.{fused}.{kind}" if parent else name, part


def _parts(model: Decoder, name: str) -> int:
    module = model.get_submodule(name.rpartition(".")[0])
    return len(module.outs) if isinstance(module, Linear) else 1


def _slice(model: Decoder, name: str, part: int, parameter: Tensor) -> Tensor:
    module = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(module, Linear):
        return parameter
    start = sum(module.outs[:part])
    return parameter[start : start + module.outs[part]]
