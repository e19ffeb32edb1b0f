"""What names a checkpoint, and its weights as they are kept: by what they are made from, not by where it lies."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import torch

from penstock.core.errors import ConfigError
from penstock.nn.checkpoint import MALFORMED, MOST_HEADER, not_found, read_json, weight_files
from penstock.nn.linear import WHOLE, Shard

IDENTITY_BYTES = 4096  # of every tensor


def identity(directory: Path) -> str:
    """Names a checkpoint by what is in it, not by where it lies: a digest of its configuration and of its weights.

    Of the weights it reads every name, type and shape, and the first bytes of every tensor: checkpoints that were
    trained from one another differ in them, and reading all would take as long as loading. Raises ConfigError as
    `stored` does.
    """
    config = read_json(directory, "config.json")
    digest = blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16, person=b"penstock.model")
    for path in weight_files(directory):
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


def cache_key(directory: Path, dtype: torch.dtype, shard: Shard = WHOLE, form: str = "") -> str:
    """Names packed weights by everything that they are made from. Raises ConfigError as `identity` does.

    Args:
        form: as of `held`.
    """
    digest = blake2b(identity(directory).encode(), digest_size=16, person=b"penstock.packed")
    digest.update(f"{dtype} {form} {shard.name} with bounded logits".encode())
    digest.update(file_times(directory).encode())
    return digest.hexdigest()


def file_times(directory: Path) -> str:
    """Of a checkpoint's weights, and their sizes, for what outlives an engine. The ctime of a file cannot be forged, so
    changes that `identity` does not read are detected even with the former mtime. Raises ConfigError."""
    stats = []
    for path in weight_files(directory):
        try:
            stats.append(path.stat())
        except OSError:
            raise not_found(directory, path) from None
    return "".join(f" {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}" for stat in stats)


def image_key(directory: Path, dtype: torch.dtype, form: str, shard: Shard = WHOLE) -> str:
    """Names weights as they lie in memory, on any host. Raises ConfigError as `identity` does.

    Args:
        form: as of `held`.
    """
    digest = blake2b(identity(directory).encode(), digest_size=16, person=b"penstock.image")
    digest.update(f"{dtype} {form} {shard.name}".encode())
    return digest.hexdigest()
