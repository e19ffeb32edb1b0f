"""A checkpoint folder to a model on a device: safetensors, one file or several.

Nothing in a checkpoint is executed: pickles are refused, its classes are ignored, and any error is a `ConfigError` that
names the file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.hf_config import check_finite, image_settings
from penstock.core.mappings import LARGE_PAGE, prefer_large
from penstock.core.parallel import ALONE, PIPELINE, TENSOR, Divisible, Layout
from penstock.nn import rope
from penstock.nn.bounded_logits import Take
from penstock.nn.checkpoint import (
    DTYPES,
    FLOATS,
    MALFORMED,
    Stored,
    not_found,
    read_json,
    stored,
    weight_files,
)
from penstock.nn.config import DecoderConfig
from penstock.nn.experts import ExpertLinear
from penstock.nn.formats import Quantisation, read_quantisation
from penstock.nn.formats.base import Format, check_cut
from penstock.nn.formats.dense import DENSE
from penstock.nn.identity import cache_key, file_times, image_key
from penstock.nn.image import Arena, DeviceImage, Image, Peers, padded
from penstock.nn.linear import WHOLE, Linear, Shard
from penstock.nn.methods import method_for
from penstock.nn.methods.base import LinearMethod, Weight
from penstock.nn.models import architecture
from penstock.nn.models.decoder import Decoder
from penstock.nn.places import (
    HEAD,
    Place,
    check_layers,
    check_weights,
    full_name,
    is_headless,
    of_other_dtype,
    places,
    sources,
    stored_by_name,
)
from penstock.nn.reading import changed, mapped, pieces
from penstock.nn.weight_cache import WeightCache

log = logging.getLogger("penstock.loader")
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
HEADS = ("lm_head", "model.embed_tokens")  # parts that can be the head

# A peer by torch.distributed; one of this host, whose memory is mapped; packed weights on disk that the page cache has;
# a peer of another host, by Mooncake or over TCP; packed weights on disk; the checkpoint
Source = Literal["nccl", "gloo", "map", "host", "mooncake", "tcp", "disk", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """
    Attributes:
        image: the memory that its weights are in, where others can have them.
        source: where they came from.
        seconds: that this took.
        files: `file_times` of the checkpoint, from before they were looked for.
        quantised: what a plain checkpoint was quantised to; "" where it was not. K and V depend on it.
    """

    model: Decoder
    image: Image | DeviceImage | None
    source: Source
    seconds: float
    files: str
    quantised: str


def load_model(*args: Any, **kwargs: Any) -> Decoder:
    """The model alone; see `load`."""
    return load(*args, **kwargs).model


def load(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype | None = None,
    cache: WeightCache | None = None,
    shard: Shard = WHOLE,
    model_len: int | None = None,
    load_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    peers: Peers | None = None,
    quantization: str | None = None,
    *,
    draft_head: bool = False,
) -> Loaded:
    """Build the architecture that config.json names and fill it.

    Args:
        dtype: of the weights, and of activations; None takes the checkpoint's, but for a quantised one in float16 on a
            CPU bfloat16.
        cache: where packed weights are looked for, and are remembered to be saved if they were not there.
        shard: what of every layer is loaded.
        model_len: of the longest sequence, where that was asked for; None is what the checkpoint allows.
        load_format: how files are read, one of `reading.LOAD_FORMATS`.
        progress: called with the bytes that are loaded and all that are to be.
        peers: that may give weights, and be given them; None without any. Of a shard it is the same rank of theirs that
            does.
        quantization: one of `formats.AT_LOAD`, by which a plain checkpoint is quantised; None or "auto" leaves it as it
            is.
        draft_head: whether the layer that predicts further tokens is loaded too.

    Raises:
        RankFailed: one of the ranks that load this model together has failed.
        ConfigError: unsupported architecture or option; missing, unexpected, misshapen or unreadable weights; a model
            that does not fit into memory.
    """
    began = time.monotonic()
    cls, config, headless, quantisation = read_architecture(directory, _layout_of(shard), model_len, quantization)
    if draft_head:
        config = replace(config, draft_head=_has_draft_head(directory, cls, config, shard.stages))
    if dtype is None:
        dtype = config.dtype or _stored_dtype(directory)
        if quantisation.name and not quantisation.at_load and device.type == "cpu" and dtype == torch.float16:
            dtype = torch.bfloat16  # which there are kernels for; float16 is what the quantisers' GPU kernels take
            log.info("activations are in bfloat16, not in the checkpoint's float16; --dtype says otherwise")
    key, asked = None, quantisation.name if quantisation.at_load else ""
    try:
        with torch.device("meta"):
            model = cls(config, shard).to(dtype)
            _hold(model, quantisation, device, dtype)
        model.headless = headless
    except (RuntimeError, MemoryError) as error:  # torch's own way to say so
        raise _no_room(directory, device, error) from None
    before, files = _states(directory), file_times(directory)
    tensors = check_weights(model, directory)
    form = held(model)
    if device.type == "cpu" and _keeps(model) and cache is not None and cache.wants(model):
        key = cache_key(directory, dtype, shard, form)
    name, arena = "", None
    if peers is not None:
        name, arena = image_key(directory, dtype, form, shard), Arena() if peers.maps else None
    image, source = _find_whole(model, peers if name else None, name, cache, key)
    if not _any_loads(shard, image is not None):
        model.bound_logits()
        _check_same(directory, before)
        return _told(Loaded(model.eval(), image if name else None, source, time.monotonic() - began, files, asked))
    if image is None:
        _take_memory(model, device, directory, arena)
    else:
        arena = None
    fill(None if image is not None else model, tensors, load_format, device, shard, progress, arena)
    _check_same(directory, before)
    if image is None and cache is not None and key is not None and key == cache_key(directory, dtype, shard, form):
        cache.remember(key, model)  # not if it changed meanwhile
    model.bound_logits(take=None if arena is None else arena.take)
    if arena is not None:
        image = arena.image(name, model)
    elif image is None and peers is not None:
        image = DeviceImage.of(name, model)
    return _told(Loaded(model.eval(), image if name else None, source, time.monotonic() - began, files, asked))


def _told(loaded: Loaded) -> Loaded:
    giver = "" if loaded.image is None or not loaded.image.giver else f" {loaded.image.giver}"
    log.info("weights are there after %.2f s, from %s%s", loaded.seconds, loaded.source, giver)
    return loaded


def _find_whole(
    model: Decoder, peers: Peers | None, name: str, cache: WeightCache | None, key: str | None
) -> tuple[Image | DeviceImage | None, Source]:
    """Fill a model on "meta" with weights that are ready, from where they come fastest; it is left as it is where there
    are none.

    Args:
        name: as of `image_key`.
        key: as of `cache_key`; None where no packed weights are looked for.
    """

    def kept() -> Image | None:
        image = None if cache is None or key is None else cache.read(key, model)
        if image is not None:
            image.key = name
        return image

    if peers is not None:
        for images in (peers.by_pair(name), peers.here(name)):
            if (image := _fill_from(images, model)) is not None:
                return image, image.way
    in_memory = cache is not None and key is not None and cache.is_in_memory(key)
    if in_memory and (image := kept()) is not None:
        return image, "host"
    if peers is not None and (image := _fill_from(peers.elsewhere(name), model)) is not None:
        return image, image.way
    if not in_memory and (image := kept()) is not None:
        return image, "disk"
    return None, "checkpoint"


def _fill_from(images: Iterator[Image | DeviceImage], model: Decoder) -> Image | DeviceImage | None:
    for image in images:
        try:
            image.fill(model)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("weights of %s are not used: %s", image.giver, error)
        else:
            return image
    return None


def _one_after_the_other(model: Decoder) -> Take:
    """In one memory of this process, so that large pages hold also what is smaller than they are."""
    named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    size = sum(padded(place.nbytes) for _, place in named)
    memory = torch.empty((-(-size // LARGE_PAGE) + 1) * LARGE_PAGE, dtype=torch.uint8, device="cpu")
    prefer_large(memory.data_ptr(), memory.nbytes)
    end = -memory.data_ptr() % LARGE_PAGE

    def take(like: Tensor) -> Tensor:
        nonlocal end
        first, end = end, end + padded(like.nbytes)
        return memory[first : first + like.nbytes].view(like.dtype).view(like.shape)

    return take


def _taker(device: torch.device, arena: Arena | None) -> Take:
    return (lambda place: torch.empty(place.shape, dtype=place.dtype, device=device)) if arena is None else arena.take


def _take_memory(model: Decoder, device: torch.device, directory: Path, arena: Arena | None) -> None:
    try:
        # `to_empty` makes them like those on "meta", which torch computes in Python, and imports sympy for
        own = arena is None and device.type == "cpu"
        model._apply(_one_after_the_other(model) if own else _taker(device, arena))
        for linear in model.modules():
            if isinstance(linear, Linear):
                linear.prepare()
    except (RuntimeError, MemoryError, OSError) as error:
        raise _no_room(directory, device, error) from None


def _states(directory: Path) -> dict[Path, tuple[int, int, int]]:
    """(inode, size, time of change) of every file. Raises ConfigError."""
    states = {}
    for path in weight_files(directory):
        try:
            stat = path.stat()
        except OSError:
            raise not_found(directory, path) from None
        states[path] = stat.st_ino, stat.st_size, stat.st_mtime_ns
    return states


def _check_same(directory: Path, before: dict[Path, tuple[int, int, int]]) -> None:
    """Raises ConfigError where a file is not what `_states` found before."""
    if (after := _states(directory)) != before:
        raise changed(next((path for path, state in after.items() if state != before.get(path)), directory))


def _any_loads(shard: Shard, found: bool) -> bool:
    """Whether some rank has not found its packed weights; those that have then read for it."""
    if shard.ranks is None:
        return not found
    return not shard.ranks.on_host.gather(torch.tensor(found)).all()


def _hold(model: Decoder, quantisation: Quantisation, device: torch.device, dtype: torch.dtype) -> None:
    """Have every linear of a model hold its weight by the best method for what the checkpoint has of it.

    Raises:
        ConfigError: projections that are computed as one are quantised differently, or the model cannot be split so.
    """

    def how(path: str) -> tuple[LinearMethod[Any, Any], Format[Any]]:
        linear, names = model.get_submodule(path), ("lm_head",) if path in HEADS else sources(model, path)
        assert isinstance(linear, Linear)
        plain = (linear.exact or path.startswith("visual.")) and quantisation.at_load
        formats = [DENSE if plain else quantisation.of(name) for name in names]
        for name, form in zip(names, formats, strict=True):
            if form != formats[0]:
                raise ConfigError(
                    f"{name} and {names[0]} are computed as one, but quantised differently in the checkpoint", "model"
                )
        if (codes := formats[0].codes) is not None and not codes.ordered:
            try:
                check_cut(codes.group, linear.own_ins, linear.ins)
            except ValueError as error:
                raise ConfigError(
                    f"tensor-parallel-size: {model.shard.size}, {names[0]}: {error}", "tensor-parallel-size"
                ) from None
        return method_for(device, dtype, codes), formats[0]

    model.hold_each(how)


def _keeps(model: Decoder) -> bool:
    return any(part.method.kept for part in model.modules() if isinstance(part, Linear))


def held(model: Decoder) -> str:
    """Names how a model's weights come out of a checkpoint, and lie in memory here."""
    linears = [part for part in model.modules() if isinstance(part, Linear)]
    forms = sorted({f"{linear.format.key()} {linear.method.layout()}" for linear in linears})
    return "; ".join(forms + ["with a draft head"] * (model.draft_head is not None))


def _layout_of(shard: Shard) -> Layout:
    data = 1 if shard.experts is None else max(1, shard.experts.size // shard.size)
    return Layout(tensor=shard.size, pipeline=shard.stages, data=data, experts=shard.experts is not None)


def read_architecture(
    directory: Path, layout: Layout = ALONE, model_len: int | None = None, quantization: str | None = None
) -> tuple[type[Decoder], DecoderConfig, bool, Quantisation]:
    """What the checkpoint's config.json says, once it is known that such a model can be served; no weight is read.

    Args:
        layout: of the ranks that the model is spread over.
        model_len, quantization: as `load` has them.

    Returns:
        The model's class, its configuration, whether no weights of an output head are there, as in an embedder, and how
        it is quantised.

    Raises:
        ConfigError: unsupported architecture or option; no weights; a model that cannot be spread so, or has no
            such long sequences.
    """
    weight_files(directory)  # a common error, checked first
    hf = read_json(directory, "config.json")
    if "vision_config" in hf:
        given = [read_json(directory, name) if (directory / name).is_file() else {} for name in PROCESSORS]
        hf["preprocessor_config"] = image_settings(*given)
    check_finite(hf, str(directory / "config.json"))
    found = stored_by_name(directory)
    try:
        quantisation = read_quantisation(hf, found, quantization)
        cls = architecture(hf)
        config = rope.settled(cls.read_config(hf), model_len)
        rope.check(config)
        headless = not config.tie_embeddings and is_headless(directory)
        if not quantisation.at_load and quantisation.of("lm_head") != DENSE:
            config = replace(config, tie_embeddings=False)  # what is quantised is no embedding
        if headless:
            config = replace(config, tie_embeddings=True)  # so that none is missed
    except ConfigError:
        raise
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{directory / 'config.json'}: a value of a wrong kind ({reason})", "model") from None
    check_layers(directory, config.num_layers)
    experts = config.experts
    layout.check(
        Divisible(
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            intermediate=0
            if experts is not None and len(experts.layers) == config.num_layers
            else config.intermediate_size,
            experts=0 if experts is None else experts.routing.count,
            expert_width=0 if experts is None else experts.width,
            shared_width=0 if experts is None else experts.shared,
            vision_heads=0 if config.vision is None else config.vision.num_heads,
            vision_width=0 if config.vision is None else config.vision.intermediate_size,
        )
    )
    if not Shard(layout.tensor - 1, layout.tensor).of_tokens(config.vocab_size):
        allowed = f"fewer than the model's vocab_size, {config.vocab_size}, has parts for"
        raise ConfigError(f"{TENSOR}: {layout.tensor}, allowed is {allowed}", TENSOR)
    most = rope.longest(config)
    if model_len is not None and not 2 <= model_len <= most:
        raise ConfigError(f"max-model-len: {model_len}, this checkpoint allows 2 to {most}", "max-model-len")
    return cls, config, headless, quantisation


def _no_room(directory: Path, device: torch.device, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0]
    return ConfigError(f"{directory / 'config.json'}: no room for such a model on {device} ({reason})", "model")


def _has_draft_head(directory: Path, cls: type[Decoder], config: DecoderConfig, stages: int) -> bool:
    """True. Raises ConfigError where there is none, or no room for it in one of so many stages."""
    if config.num_layers + 1 < 2 * stages:
        raise ConfigError(
            f"speculative-config: of {config.num_layers} layers and a draft head, {PIPELINE} {stages} leaves the last "
            f"stage the head alone, allowed is at most {(config.num_layers + 1) // 2}",
            "speculative-config",
        )
    layer = f"model.layers.{config.num_layers}."
    if not (cls.draft_weights and config.mtp_layers):
        reason = f"{cls.__name__} has none (num_nextn_predict_layers is {config.mtp_layers})"
    elif not any(full_name(tensor.name).startswith(layer) for tensor in stored(directory)):
        reason = f"its weights, {layer}*, are not in the checkpoint"
    else:
        return True
    raise ConfigError(
        f"speculative-config: {directory} has no layer that predicts further tokens: {reason}", "speculative-config"
    )


def _stored_dtype(directory: Path) -> torch.dtype:
    """Of the first weight in the files, for checkpoints whose config.json does not say."""
    first = None
    for tensor in stored(directory):
        if tensor.dtype in FLOATS:
            return DTYPES[tensor.dtype]
        first = first or tensor
    if first is None:
        raise ConfigError(f"{weight_files(directory)[0]}: holds no weights", "model")
    raise of_other_dtype(first, FLOATS)


def fill(
    model: Decoder | None,
    tensors: Sequence[Stored],
    load_format: str,
    device: torch.device,
    shard: Shard = WHOLE,
    progress: Callable[[int, int], None] | None = None,
    arena: Arena | None = None,
) -> None:
    """Load every tensor to its place; that all are there was checked.

    Args:
        model: None where this rank has its weights, and reads for others.
        arena: where its memory is from, if from one.

    Raises:
        ConfigError: a file cannot be read.
        RankFailed: another rank has failed.
    """
    wanted = {} if model is None else places(model)
    ranks = None if shard.ranks is None else shard.ranks.on_host
    head, began = None, time.monotonic()
    total, done = sum(tensor.stop - tensor.start for tensor in tensors), 0
    load_format, loading = pieces(tensors, load_format, device, ranks)
    with closing(loading):
        for piece in loading:
            name = full_name(piece.stored.name)
            if name == HEAD and model is not None and name not in wanted:
                head = _untied(model, arena)
                wanted = places(model)
            if model is not None:
                try:
                    wanted[name].load(piece.tensor, piece.first)
                except ValueError as error:
                    raise ConfigError(f"{piece.stored.path}: {piece.stored.name!r}: {error}", "model") from None
            done += piece.tensor.nbytes
            if progress is not None:
                progress(done, total)
    if model is not None and head is not None:
        embedding = model.model.embed_tokens
        assert embedding is not None
        if all(map(torch.equal, head.parameters(), embedding.parameters())):
            model.lm_head = None
            if arena is not None:
                for tensor in head.parameters():
                    arena.give_back(tensor)
    if shard.rank == 0:
        size, took = total / 2**30, max(time.monotonic() - began, 1e-6)
        log.info("%.2f GiB of weights in %.1f s (%.2f GiB/s), %s", size, took, size / took, load_format)


def load_expert(
    directory: Path, model: Decoder, layer: int, expert: int, found: Mapping[str, Stored]
) -> tuple[Weight, Weight]:
    """One expert's weights, as `Experts.bring` takes them: beside a model that computes, from any thread.

    Args:
        found: as `stored_by_name`.

    Raises ConfigError where the checkpoint cannot be read, or is not the model's any more.
    """
    path = f"model.layers.{layer}.feed_forward.experts"
    weights = []
    for name in ("gate_up_proj", "down_proj"):
        linear = model.get_submodule(f"{path}.{name}")
        assert isinstance(linear, ExpertLinear)
        one = linear.alone(expert)
        theirs = sources(model, f"{path}.{name}")
        each = len(theirs) // linear.count
        wanted = {}
        for i in range(expert * each, (expert + 1) * each):
            for key, expected in one.tensors(i if len(theirs) > 1 else None).items():
                if expected.needed or f"{theirs[i]}.{key}" in found:
                    wanted[f"{theirs[i]}.{key}"] = Place(one, key, i, expected)
        if gone := wanted.keys() - found.keys():
            raise ConfigError(f"{directory}: 1 weights are missing, the first is {min(gone)!r}", "model")
        tensors = [found[source] for source, place in wanted.items() if place.expected.shape is not None]
        for piece in mapped(sorted(tensors, key=lambda tensor: wanted[full_name(tensor.name)].waits)):
            wanted[full_name(piece.stored.name)].load(piece.tensor, piece.first)
        weights.append(one.own(0))
    gate_up, down = weights
    return gate_up, down


def _untied(model: Decoder, arena: Arena | None) -> Linear:
    """Some checkpoints say that embeddings are tied and bring another head all the same: it is the one they mean."""
    head = model.untie()
    head._apply(_taker(model.device, arena))
    head.prepare()
    return head
