"""Output of commands."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write(path: str | Path, content: str) -> None:
    """Write a file atomically. Raises ConfigError."""
    path = Path(path)
    special = path.exists() and not path.is_file()  # as /dev/stdout, which must not be replaced
    part = path if special else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(content, encoding="utf-8")
        if not special:
            part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        if not special:
            part.unlink(missing_ok=True)
