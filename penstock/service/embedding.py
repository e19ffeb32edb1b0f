"""Embeddings: how a checkpoint wants them made, and what is left to do with what engines bring."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.request import Pooling

MODULES = "modules.json"  # of sentence-transformers: what a text passes on its way to an embedding
MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@dataclass(frozen=True, slots=True)
class EmbeddingDefaults:
    """
    Attributes:
        pooling: which hidden states become an embedding: the last token's, or the mean of all.
        normalize: whether it has length 1, unless a request says otherwise.
    """

    pooling: Pooling = "last"
    normalize: bool = True


LAST_TOKEN = EmbeddingDefaults()


def read_embedding(directory: Path, asked: Pooling | None = None) -> EmbeddingDefaults:
    """As sentence-transformers' files in the folder say; the last token's, normalised, where there are none.

    Args:
        asked: to be used, whatever they say.

    Raises:
        ConfigError: they say something else than is supported.
    """
    if asked is not None:
        return EmbeddingDefaults(asked)
    modules = _read(directory / MODULES, list)
    if modules is None:
        return LAST_TOKEN
    pooling: Pooling | None = None
    normalize = False
    for module in modules:
        kind = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(directory, str(module.get("path", "")))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise _unsupported(directory / MODULES, kind, "Transformer, Pooling and Normalize")
    return EmbeddingDefaults(pooling or "last", normalize)


def finished(hidden: Sequence[float], dimensions: int | None, normalize: bool) -> list[float]:
    """What a client gets: the first `dimensions` of them, of length 1 where that is asked for."""
    vector = [*hidden[:dimensions]]
    if not normalize:
        return vector
    length = math.sqrt(math.fsum([x * x for x in vector])) or 1.0
    return [x / length for x in vector]


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raises `InvalidRequest` unless an embedding of `size` numbers can be cut to `dimensions`; without any, something
    else is wrong."""
    if dimensions is not None and size and not 1 <= dimensions <= size:
        raise InvalidRequest(
            f"dimensions: {dimensions}, allowed is a whole number from 1 to {size}, which this model's embeddings have",
            "dimensions",
        )


def _pooling(directory: Path, path: str) -> Pooling:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ConfigError(f"{directory / MODULES}: names {path!r}, which is outside of the folder", "model")
    file = directory / path / "config.json"
    config: dict[str, Any] = _read(file, dict) or {}
    modes = [name.removeprefix("pooling_mode_") for name in config if name.startswith("pooling_mode_") and config[name]]
    named = config.get("pooling_mode", modes)
    chosen = [named] if isinstance(named, str) else list(named)
    found = {MODES.get(mode) for mode in chosen}
    if len(found) != 1 or None in found:
        raise _unsupported(file, " and ".join(map(str, chosen)) or "no pooling", ", ".join(MODES))
    return MODES[chosen[0]]


def _unsupported(path: Path, what: str, allowed: str) -> ConfigError:
    flag = f"--pooling {' or '.join(POOLINGS)} overrides it"
    return ConfigError(f"{path}: {what} is not supported, allowed is {allowed}; {flag}", "model")


def _read(path: Path, kind: type) -> Any:
    """None when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})", "model") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{path}: must hold a JSON {'array' if kind is list else 'object'}", "model")
    return value
