"""A checkpoint folder to a model on a device: safetensors, one file or several, read in file order.

Nothing in a checkpoint is executed: pickles are refused, its classes are ignored, and any error is a `ConfigError` that
names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.hf_config import check_finite
from penstock.nn import rope
from penstock.nn.config import DecoderConfig
from penstock.nn.layers import Part
from penstock.nn.linear import WHOLE, Linear, Shard
from penstock.nn.methods import method_for
from penstock.nn.models import architecture
from penstock.nn.models.decoder import Decoder
from penstock.nn.packed import layout
from penstock.nn.weight_cache import WeightCache

IDENTITY_BYTES = 4096  # of every tensor
IGNORED = ("rotary_emb.inv_freq",)  # derived values that older checkpoints carry
MAPPED_BYTES = 64 << 20  # of a file that is read, and the tensor that exceeds them
MOST_HEADER = 100_000_000  # bytes, as safetensors allows
BARE = ("embed_tokens.", "layers.", "norm.")  # how names begin in checkpoints that were saved without a head
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MALFORMED = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)  # what a value of a wrong kind comes to


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of the checkpoint. Raises ConfigError naming the file."""
    path = directory / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; is {directory} a Hugging Face model folder?", "model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})", "model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object", "model")
    return value


def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype | None = None,
    cache: WeightCache | None = None,
    shard: Shard = WHOLE,
    model_len: int | None = None,
) -> Decoder:
    """Build the architecture that config.json names and fill it.

    Args:
        dtype: of the weights; None takes the checkpoint's.
        cache: where packed weights are looked for, and are remembered to be saved if they were not there.
        shard: what of every layer is loaded.
        model_len: of the longest sequence, where that was asked for; None is what the checkpoint allows.

    Raises:
        ConfigError: unsupported architecture or option; missing, unexpected, misshapen or unreadable weights; a model
            that does not fit into memory.
    """
    cls, config, headless = read_architecture(directory, shard.size, model_len)
    dtype = dtype or config.dtype or _stored_dtype(directory)
    key = None
    method = method_for(device, dtype)
    try:
        with torch.device("meta"):
            model = cls(config, shard).to(dtype)
            model.hold(method)
        model.headless = headless
    except (RuntimeError, MemoryError) as error:  # torch's own way to say so
        raise _no_room(directory, device, error) from None
    _check_weights(model, directory)
    if method.kept and cache is not None and cache.wants(model):
        key = cache_key(directory, dtype, shard)
        if cache.read(key, model):
            model.bound_logits()
            return model.eval()
    try:
        # `to_empty` makes them like those on "meta", which torch computes in Python, and imports sympy for
        model._apply(lambda place: torch.empty(place.shape, dtype=place.dtype, device=device))
        for linear in model.modules():
            if isinstance(linear, Linear):
                linear.prepare()
    except (RuntimeError, MemoryError) as error:
        raise _no_room(directory, device, error) from None
    fill(model, directory)
    if (
        cache is not None and key is not None and key == cache_key(directory, dtype, shard)
    ):  # not if it changed meanwhile
        cache.remember(key, model)
    model.bound_logits()
    return model.eval()


def read_architecture(
    directory: Path, shards: int = 1, model_len: int | None = None
) -> tuple[type[Decoder], DecoderConfig, bool]:
    """What the checkpoint's config.json says, once it is known that such a model can be served; no weight is read.

    Args:
        shards: over how many ranks the model is spread.
        model_len: as `load` has it.

    Returns:
        The model's class, its configuration, and whether no weights of an output head are there, as in an embedder.

    Raises:
        ConfigError: unsupported architecture or option; no weights; a model that cannot be split into so many shards,
            or has no such long sequences.
    """
    _weight_files(directory)  # a common error, checked first
    hf = read_json(directory, "config.json")
    check_finite(hf, str(directory / "config.json"))
    if hf.get("quantization_config"):
        raise ConfigError("config.json: quantization_config: quantised checkpoints are not supported", "model")
    try:
        cls = architecture(hf)
        config = rope.settled(cls.read_config(hf), model_len)
        rope.check(config)
        headless = not config.tie_embeddings and _headless(directory)
        if headless:
            config = replace(config, tie_embeddings=True)  # so that none is missed
    except ConfigError:
        raise
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{directory / 'config.json'}: a value of a wrong kind ({reason})", "model") from None
    _check_layers(directory, config.num_layers)
    _check_shards(config, shards)
    most = rope.longest(config)
    if model_len is not None and not 2 <= model_len <= most:
        raise ConfigError(f"max-model-len: {model_len}, this checkpoint allows 2 to {most}", "max-model-len")
    return cls, config, headless


def _check_shards(config: DecoderConfig, size: int) -> None:
    def refuse(allowed: str) -> ConfigError:
        return ConfigError(f"tensor-parallel-size: {size}, allowed is {allowed}", "tensor-parallel-size")

    split = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    for name, count in split.items():
        if count % size:
            raise refuse(f"what divides the model's {name}, {count}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise refuse(f"a divisor or a multiple of the model's num_key_value_heads, {config.num_kv_heads}")
    if not Shard(size - 1, size).of_tokens(config.vocab_size):
        raise refuse(f"fewer than the model's vocab_size, {config.vocab_size}, has parts for")


def _no_room(directory: Path, device: torch.device, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0]
    return ConfigError(f"{directory / 'config.json'}: no room for such a model on {device} ({reason})", "model")


def _stored_dtype(directory: Path) -> torch.dtype:
    """Of the first weight in the files, for checkpoints whose config.json does not say."""
    first = next(weights(directory), None)
    if first is None:
        raise ConfigError(f"{_weight_files(directory)[0]}: holds no weights", "model")
    return first[2].dtype


def weights(directory: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, name, tensor) of every weight, in the order in which they lie in the files.

    Raises ConfigError naming the file that is missing or broken.
    """
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                names = file.offset_keys()
            while names:
                # tensors are views of a mapping, and what was read of it takes memory for as long as it is there
                with safe_open(path, framework="pt") as file:
                    mapped = 0
                    while names and mapped < MAPPED_BYTES:
                        tensor = file.get_tensor(name := names.pop(0))
                        mapped += tensor.nbytes
                        yield path, _full(name), tensor
                        del tensor
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found", "model") from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConfigError(f"{path}: corrupt or truncated ({error})", "model") from None


def _full(name: str) -> str:
    """A weight's name, in whichever way the checkpoint was saved."""
    return f"model.{name}" if name.startswith(BARE) else name


def _headless(directory: Path) -> bool:
    """Whether it was saved without a head, as embedding models are whose config.json has one."""
    names = [name for _, name, _ in _headers(directory)]
    return HEAD not in names and any(name.startswith(BARE) for name in names)


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).exists():
        index = read_json(directory, INDEX).get("weight_map")
        if not isinstance(index, Mapping) or not index or not all(isinstance(name, str) for name in index.values()):
            raise ConfigError(f"{directory / INDEX}: has no weight_map of names to files", "model")
        return [_inside(directory, name) for name in sorted(set(index.values()))]
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    pickle = next((path for pattern in PICKLES for path in sorted(directory.glob(pattern))), None)
    if pickle is not None:
        raise ConfigError(
            f"{pickle}: a pickle, which may run code when it is read, is refused; convert it to model.safetensors",
            "model",
        )
    raise ConfigError(f"{directory}: no weights, neither model.safetensors nor {INDEX}", "model")


def _inside(directory: Path, name: str) -> Path:
    """The file of that name in the folder. What the hub's cache links to from there may lie elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ConfigError(f"{directory / INDEX}: names {name!r}, which is outside of the folder", "model")
    if path.suffix != ".safetensors":
        raise ConfigError(f"{directory / INDEX}: names {name!r}, allowed are .safetensors files", "model")
    return directory / path


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
                header = json.loads(file.read(min(size, MOST_HEADER)))
                digest.update(json.dumps(header, sort_keys=True).encode())
                for name, tensor in sorted(header.items()):
                    if name != "__metadata__":
                        start, end = tensor["data_offsets"]
                        file.seek(8 + size + start)
                        digest.update(file.read(min(IDENTITY_BYTES, end - start)))
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found", "model") from None
        except (OSError, *MALFORMED) as error:
            raise ConfigError(f"{path}: corrupt or truncated ({error})", "model") from None
    return digest.hexdigest()


def cache_key(directory: Path, dtype: torch.dtype, shard: Shard = WHOLE) -> str:
    """Names packed weights by everything that they are made from. Raises ConfigError as `identity` does.

    The ctime of a file cannot be forged, so changes that `identity` does not read are detected even with the former
    mtime.
    """
    digest = blake2b(identity(directory).encode(), digest_size=16, person=b"penstock.packed")
    digest.update(f"{dtype} {layout()} {shard.rank} {shard.size}".encode())
    for path in _weight_files(directory):
        stat = path.stat()
        digest.update(f" {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode())
    return digest.hexdigest()


def _headers(directory: Path) -> Iterator[tuple[Path, str, list[int]]]:
    """(file, name, shape) of every weight, from the headers of the files alone. Raises as `weights` does."""
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    yield path, name, file.get_slice(name).get_shape()
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found", "model") from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConfigError(f"{path}: corrupt or truncated ({error})", "model") from None


def _check_layers(directory: Path, num_layers: int) -> None:
    """Checked before a model is made, which takes long for many layers. Raises ConfigError."""
    found = {int(match[1]) for _, name, _ in _headers(directory) if (match := LAYER.match(_full(name)))}
    if found and max(found) + 1 < num_layers:
        raise ConfigError(
            f"{directory / 'config.json'}: num_hidden_layers is {num_layers}, the weights have {max(found) + 1} layers",
            "num_hidden_layers",
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a checkpoint belongs.

    Attributes:
        name: of what the part's `load` is given.
        number: of the projection in a part that has several; None is all of the part.
    """

    part: Part
    name: str
    number: int | None
    shape: tuple[int, ...]

    def load(self, tensor: Tensor) -> None:
        """Raises ValueError where it has not the shape that it was said to have."""
        if tensor.shape != self.shape:
            raise ValueError(f"{tensor.shape} is not {self.shape}")
        self.part.load(self.name, tensor, self.number)


def places(model: Decoder) -> dict[str, Place]:
    """All tensors that a checkpoint must have, by their names."""
    found: dict[str, Place] = {}
    for path, part in model.named_modules():
        if not isinstance(part, Part):
            continue
        block = LAYER.match(path)
        sources = (path,) if block is None else model.weights[path[block.end() :]]
        for i, source in enumerate(sources):
            number = i if len(sources) > 1 else None
            for name, shape in part.tensors(number).items():
                found[f"{block[0] if block else ''}{source}.{name}"] = Place(part, name, number, shape)
    return found


def _check_weights(model: Decoder, directory: Path) -> None:
    """Check that every place has exactly one tensor, by the files' headers, before memory is taken. Raises ConfigError.

    Args:
        model: on "meta".
    """
    wanted = places(model)
    missing = dict.fromkeys(wanted)
    for path, given, shape in _headers(directory):
        name = _full(given)
        if name.endswith(IGNORED):
            continue
        if name == HEAD and model.lm_head is None:
            embedding = list(model.model.embed_tokens.tensors()["weight"])
            if shape != embedding:
                raise ConfigError(f"{path}: {HEAD!r} is {shape}, not {embedding}", "model")
            continue
        if name not in wanted:
            raise ConfigError(f"{path}: {name!r} is not part of {type(model).__name__}", "model")
        if name not in missing:
            raise ConfigError(f"{path}: {name!r} stands there twice", "model")
        if shape != list(wanted[name].shape):
            raise ConfigError(f"{path}: {name!r} is {shape}, config.json makes it {list(wanted[name].shape)}", "model")
        del missing[name]
    if missing:
        raise ConfigError(f"{directory}: {len(missing)} weights are missing, the first is {min(missing)!r}", "model")


def fill(model: Decoder, directory: Path) -> None:
    """Load every tensor to its place; that all are there was checked. Raises ConfigError when a file cannot be read."""
    wanted = places(model)
    head = None
    for path, name, tensor in weights(directory):
        if name.endswith(IGNORED):
            continue
        if name == HEAD and model.lm_head is None:
            head = tensor
            continue
        try:
            wanted[name].load(tensor)
        except (RuntimeError, *MALFORMED) as error:
            raise ConfigError(f"{path}: {name!r} was changed while it was read", "model") from error
    if head is not None:
        _untie(model, head)


def _untie(model: Decoder, tensor: Tensor) -> None:
    """Some checkpoints say that embeddings are tied and bring another head all the same: it is the one they mean."""
    embedding = model.model.embed_tokens
    head = model.untie()
    head._apply(lambda place: torch.empty(place.shape, dtype=place.dtype, device=model.device))
    head.prepare()
    head.load("weight", tensor)
    if all(map(torch.equal, head.parameters(), embedding.parameters())):
        model.lm_head = None
