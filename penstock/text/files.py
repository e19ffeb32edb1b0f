"""Reads a checkpoint's tokenizer files as transformers does. A `ConfigError` names the broken file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; older checkpoints have part of it in special_tokens_map.json, which takes precedence."""
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | _read_json(directory / "special_tokens_map.json")


def token_name(token: object) -> str | None:
    """A token's text, from a string or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def load_backend(directory: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of tokenizer.json, with the added tokens that only the other files list."""
    import tokenizers

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; the tokenizer must be in this format")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{file}: not a valid tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    special = list(dict.fromkeys(_special_names(config)))
    if "added_tokens_decoder" in config:
        backend.add_tokens(_listed_tokens(config["added_tokens_decoder"], directory / "tokenizer_config.json"))
    else:
        backend.add_tokens(_older_tokens(directory / "added_tokens.json", backend, special))
    known = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    new = [name for name in special if name not in known]
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in new])
    return backend


def read_templates(directory: Path, config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Chat templates: name -> (source, file). Template files take precedence over tokenizer_config.json."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: (_read_text(file), str(file)) for name, file in files.items() if file.is_file()}
    if found:
        return found
    origin = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if template is None:
        origin = directory / "chat_template.json"
        template = _read_json(origin).get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": (template, str(origin))}
    try:
        return {entry["name"]: (entry["template"], str(origin)) for entry in template}
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{origin}: chat_template must be a string or a list of named templates") from error


def read_given_template(template: str) -> dict[str, tuple[str, str]]:
    """The same, of a template that was given as Jinja text or as the path of a file with it."""
    if any(char in template for char in "{}\n"):
        return {"default": (template, "chat_template")}
    return {"default": (_read_text(Path(template)), template)}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object, empty when there is no such file."""
    if not file.is_file():
        return {}
    content = _read_text(file)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must be a JSON object")
    return value


def _special_names(config: dict[str, Any]) -> Iterator[str]:
    """Every token that the configuration calls special: `*_token` keys, then lists (or objects) of more."""
    others = [key for key in config if key.endswith("_token") and key not in NAMED_TOKENS]
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = [config.get(key) for key in (*NAMED_TOKENS, *others)]
    for value in [*values, *(more.values() if isinstance(more, dict) else more)]:
        if name := token_name(value):
            yield name


def _listed_tokens(listed: dict[str, dict[str, Any]], file: Path) -> list[tokenizers.AddedToken]:
    from tokenizers import AddedToken

    try:
        fields = [listed[token] for token in sorted(listed, key=int)]
        return [AddedToken(**{key: value for key, value in entry.items() if key != "__type"}) for entry in fields]
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: added_tokens_decoder is malformed: {error}") from error


def _older_tokens(file: Path, backend: tokenizers.Tokenizer, special: list[str]) -> list[tokenizers.AddedToken]:
    from tokenizers import AddedToken

    ids = _read_json(file)
    if not all(isinstance(token, int) for token in ids.values()):
        raise ConfigError(f"{file}: must map tokens to ids")
    known = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    new = [name for name in sorted(ids, key=ids.__getitem__) if name not in known]
    return [AddedToken(name, normalized=name not in special, special=name in special) for name in new]
