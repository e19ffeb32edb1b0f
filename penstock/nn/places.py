"""Where a checkpoint's tensors belong in a model, by their names: those of every version that has saved such a one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import FLOATS, INDEX, Stored, indexed, stored
from penstock.nn.config import DecoderConfig
from penstock.nn.experts import ExpertLinear
from penstock.nn.formats.base import Expected
from penstock.nn.layers import Part
from penstock.nn.linear import Linear
from penstock.nn.models.decoder import Decoder

# derived values that older checkpoints carry, and scales of a KV cache, which has its own here
IGNORED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
UNSEEN = ("visual.post_layernorm.", "visual.head.")  # of a SigLIP, behind the layer of which LLaVA takes what it sees
DRAFT = "draft_head."  # how names of its parts begin here
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's own in layers that predict further
BARE = ("embed_tokens.", "layers.", "norm.")  # how names begin in checkpoints that were saved without a head
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
TOWER = re.compile(r"visual\.(?:blocks|encoder\.layers)\.(\d{1,6})\.")
# how names begin in checkpoints of models that see, as different versions of transformers save them
RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
    *(
        (f"{begins}{tower}", "visual.")
        for begins in ("model.", "")
        for tower in ("vision_tower.vision_model.", "vision_tower.")
    ),
    *((f"{begins}multi_modal_projector.", "visual.projector.") for begins in ("model.", "")),
    *((f"{begins}image_newline", "visual.newline.weight") for begins in ("model.", "")),
)
HEAD = "lm_head.weight"


def full_name(name: str) -> str:
    """A weight's name, in whichever way the checkpoint was saved."""
    for begins, instead in RENAMED:
        if name.startswith(begins):
            return instead + name[len(begins) :]
    return f"model.{name}" if name.startswith(BARE) else name


def is_headless(directory: Path) -> bool:
    """Whether it was saved without a head, as embedding models are whose config.json has one."""
    names = [tensor.name for tensor in stored(directory)]
    return not any(name.startswith("lm_head.") for name in names) and any(name.startswith(BARE) for name in names)


def check_layers(directory: Path, num_layers: int) -> None:
    """Checked before a model is made, which takes long for many layers. Raises ConfigError."""
    found = {int(match[1]) for tensor in stored(directory) if (match := LAYER.match(full_name(tensor.name)))}
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
    expected: Expected

    @property
    def waits(self) -> bool:
        """Whether no other tensor needs it to be there."""
        return not isinstance(self.part, Linear) or self.name in ("bias", self.part.format.main)

    def load(self, tensor: Tensor, first: int = 0) -> None:
        """Take rows of it, from `first` on. Raises ValueError as the part's `load` does."""
        self.part.load(self.name, tensor, self.number, first)


def sources(model: Decoder, path: str) -> tuple[str, ...]:
    """What a checkpoint calls the projections of a part."""
    part, tower = model.get_submodule(path), TOWER.match(path)
    if (block := LAYER.match(path)) is not None:
        layer, names = block[0], model.weights[path[block.end() :]]
    elif tower is not None:
        layer, names = tower[0], model.tower_weights[path[tower.end() :]]
    elif path.startswith(DRAFT):
        layer, inner = f"model.layers.{model.config.num_layers}.", path.removeprefix(DRAFT)
        of_block = inner.startswith("block.")
        names = model.weights[inner.removeprefix("block.")] if of_block else model.draft_weights[inner]
    else:
        return (path,)
    if isinstance(part, ExpertLinear):
        names = tuple(name.replace("*", str(i)) for i in range(part.count) for name in names)
    return tuple(layer + name for name in names)


def places(model: Decoder) -> dict[str, Place]:
    """All tensors that a checkpoint has, by their names."""
    found: dict[str, Place] = {}
    for path, part in model.named_modules():
        if not isinstance(part, Part):
            continue
        own = sources(model, path)
        for i, source in enumerate(own):
            number = i if len(own) > 1 else None
            try:
                tensors = part.tensors(number)
            except ValueError as error:
                raise ConfigError(f"{source}: {error}", "quantization_config") from None
            for name, expected in tensors.items():
                found[f"{source}.{name}"] = Place(part, name, number, expected)
    return found


def check_weights(model: Decoder, directory: Path) -> list[Stored]:
    """Check that every place has exactly one tensor, by the files' headers, before memory is taken. Raises ConfigError.

    Args:
        model: on "meta".

    Returns:
        What is to be loaded, in the order of the files, but what others wait for first.
    """
    wanted, found, seen = places(model), [], set[str]()
    missing = {name for name, place in wanted.items() if place.expected.needed}
    for tensor in stored(directory):
        path, shape, name = tensor.path, list(tensor.shape), full_name(tensor.name)
        if (
            name.endswith(IGNORED)
            or name.startswith(UNSEEN)
            or _is_elsewhere(name, model)
            or _is_left_out(name, model.config)
        ):
            continue
        if name == HEAD and model.lm_head is None:
            expected = model.head.tensors()["weight"]
        elif name not in wanted:
            raise ConfigError(f"{path}: {name!r} is not part of {type(model).__name__}", "model")
        elif name in seen:
            raise ConfigError(f"{path}: {name!r} stands there twice", "model")
        else:
            expected = wanted[name].expected
        if expected.shape is None:
            continue
        one = math.prod(shape) == 1 == math.prod(expected.shape)
        if shape != list(expected.shape) and not one:
            raise ConfigError(f"{path}: {name!r} is {shape}, config.json makes it {list(expected.shape)}", "model")
        _check_dtype(tensor, expected.dtypes)
        seen.add(name)
        found.append(tensor)
    missing -= seen
    if missing:
        name = min(missing)
        files = {full_name(given): file for given, file in indexed(directory).items()}
        where = f", which {INDEX} has in {files[name]}" if name in files else ""
        raise ConfigError(f"{directory}: {len(missing)} weights are missing, the first is {name!r}{where}", "model")
    return sorted(found, key=lambda tensor: (place := wanted.get(full_name(tensor.name))) is None or place.waits)


def _is_elsewhere(name: str, model: Decoder) -> bool:
    """Whether another stage has that weight, and checks it."""
    shard, stack = model.shard, model.model
    if (block := LAYER.match(name)) is not None:
        count = model.config.kept_layers
        return (number := int(block[1])) < count and number not in shard.layers(count)
    if name.startswith("visual."):
        return model.config.vision is not None and model.visual is None
    if name.startswith("model.embed_tokens."):
        return stack.embed_tokens is None
    return not shard.is_last and name.startswith(("model.norm.", "lm_head."))


def _is_left_out(name: str, config: DecoderConfig) -> bool:
    """Whether a weight is of a layer that predicts further tokens and is not loaded, or is there once more."""
    layer = LAYER.match(name)
    if layer is None or not config.num_layers <= int(layer[1]) < config.num_layers + config.mtp_layers:
        return False
    return int(layer[1]) >= config.kept_layers or name[layer.end() :] in SHARED


def _check_dtype(tensor: Stored, dtypes: Sequence[str] = FLOATS) -> None:
    if tensor.dtype not in dtypes:
        raise of_other_dtype(tensor, dtypes)


def of_other_dtype(tensor: Stored, dtypes: Sequence[str]) -> ConfigError:
    allowed = ", ".join(dtypes)
    return ConfigError(f"{tensor.path}: {tensor.name!r} is of dtype {tensor.dtype}, expected is {allowed}", "model")


def stored_by_name(directory: Path) -> dict[str, Stored]:
    """Every tensor. Raises ConfigError as `stored`."""
    return {full_name(tensor.name): tensor for tensor in stored(directory)}
