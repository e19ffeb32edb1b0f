"""Flags, and where their values come from: the flag itself, the environment, a file, the default, in that order.

Every flag `--max-num-seqs` is also `PENSTOCK_MAX_NUM_SEQS`, and `max-num-seqs:` in the YAML file given by `--config`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, UserError
from penstock.core.renamed import RENAMED, new_name
from penstock.core.sizes import size  # noqa: F401  with the other converters

LARGEST_SCALE = 4096.0  # of the rate of a simulated workload


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    Attributes:
        name: of the flag, without dashes in front.
        convert: text -> value; raises ValueError whose message says what is allowed.
        default: as converted.
        help: one line.
        short: another flag, such as "-q".
        takes_object: whether a section may stand for it in a file, of which `convert` gets JSON.
    """

    name: str
    convert: Callable[[str], Any]
    default: Any
    help: str
    short: str | None = None
    takes_object: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PENSTOCK_{self.key.upper()}"

    def read(self, text: str, source: str) -> Any:
        try:
            return self.convert(text)
        except ValueError as error:
            raise ConfigError(f"{source}: {text!r}, allowed is {error}", self.name) from None


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(allowed) from None
        if value < low or (high is not None and value > high):
            raise ValueError(allowed)
        return value

    return convert


def number(low: float, high: float = inf, *, endless: bool = False) -> Callable[[str], float]:
    """A number in (low, high]; only with `endless` also inf."""
    allowed = f"a number above {low:g}" + ("" if high == inf else f" and at most {high:g}") + ", or inf" * endless

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not low < value <= high or (value == inf and not endless):
            raise ValueError(allowed)
        return value

    return convert


def between(low: float, high: float = inf) -> Callable[[str], float]:
    """A finite number in [low, high]."""
    allowed = f"a number of at least {low:g}" if high == inf else f"a number from {low:g} to {high:g}"

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := float(text)) <= high and value < inf:
                return value
        raise ValueError(allowed)

    return convert


class one_of:
    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, text: str) -> str:
        if text not in self.names:
            raise ValueError(", ".join(self.names))
        return text


def switch(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


def text(value: str) -> str:
    if not value:
        raise ValueError("a text that is not empty")
    return value


def host(value: str) -> str:
    if not value or set("[]/ ") & set(value):
        raise ValueError("a name or an address to listen on, an IPv6 address without brackets")
    return value


def words(value: str) -> tuple[str, ...]:
    """Comma-separated."""
    parts = tuple(part.strip() for part in value.split(",") if part.strip())
    if not parts:
        raise ValueError("one or more names, separated by commas")
    return parts


def add_flag(
    parser: argparse._ActionsContainer,
    name: str,
    convert: Callable[[str], Any],
    default: Any = None,
    help: str | None = None,
    **more: Any,
) -> None:
    """A flag of the command line alone. Parsing raises ConfigError where its value is not allowed."""
    option = Option(name, convert, default, "")
    parser.add_argument(f"--{name}", action=_Converted, option=option, default=default, help=help, **more)


def add_options(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Option]]) -> None:
    """Flags whose absence can be told from their default.

    Args:
        groups: title -> options.
    """
    parser.add_argument("--config", metavar="FILE", help="a YAML file with any of these settings")
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add_option(group, option)
    names = {option.name for options in groups.values() for option in options}
    for old in RENAMED:
        if new := new_name(old, names):
            parser.add_argument(f"--{old}", nargs="?", action=_Refused, new=new, help=argparse.SUPPRESS)


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    flags = [f"--{option.name}", *([option.short] if option.short else [])]
    described = "" if option.default in (None, "", ()) else f" (default: {_shown(option.default)})"
    common: dict[str, Any] = {"dest": option.key, "default": None, "help": option.help + described}
    if option.convert is switch:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    else:
        group.add_argument(*flags, metavar=option.key.upper(), **common)


def read_options(options: Sequence[Option], args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """The value of every option by its key. Raises ConfigError naming the flag, variable or file key."""
    file = _read_file(args.config, options) if args.config else {}
    values = {}
    for old in RENAMED:
        variable = Option(old, str, None, "").variable
        if variable in environment and (new := new_name(old, [option.name for option in options])):
            raise ConfigError(f"{variable} is called {Option(new, str, None, '').variable} now", new)
    for option in options:
        given = getattr(args, option.key)
        if given is not None:
            values[option.key] = given if isinstance(given, bool) else option.read(given, f"--{option.name}")
        elif option.variable in environment:
            values[option.key] = option.read(
                environment[option.variable], option.variable + _origin(environment, option)
            )
        elif option.key in file:
            values[option.key] = file[option.key]
        else:
            values[option.key] = option.default
    return values


class _Converted(argparse.Action):
    """What `type` is for, but with the option's own errors."""

    def __init__(self, *, option: Option, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._option = option

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        def read(text: str) -> Any:
            return self._option.read(text, f"--{self._option.name}")

        setattr(namespace, self.dest, [*map(read, value)] if isinstance(value, list) else read(value))


class _Refused(argparse.Action):
    """A renamed flag."""

    def __init__(self, *, new: str, **arguments: Any) -> None:
        super().__init__(**arguments, default=argparse.SUPPRESS)
        self._new = new

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} is called --{self._new} now")


def client_key(environment: Mapping[str, str]) -> str | None:
    """The API key that commands which talk to a server bring by default: the first of PENSTOCK_API_KEY."""
    return environment.get("PENSTOCK_API_KEY", "").split(",")[0].strip() or None


def in_flags(error: UserError, options: Sequence[Option]) -> str:
    """The message of an error that names a setting, spelled as on the command line."""
    message, names = str(error), {option.name for option in options}
    name = (error.field or "").replace("_", "-")
    if name in names and message.startswith((f"{name}:", f"{error.field}:")):
        return f"--{name}{message[len(name) :]}"
    return message


def read_text(path: str, named: str) -> str:
    """A file's text. Raises ConfigError beginning with `named`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{named} cannot be read ({reason})") from None


def _read_file(path: str, options: Sequence[Option]) -> dict[str, Any]:
    """The value of every option that the file gives, by its key."""
    from penstock.service.settings_file import SettingsFile

    file = SettingsFile(path, read_text(path, f"--config: {path}"))
    values = file.values(file.section(file.root, [option.name for option in options]), options)
    file.finish()
    return values


def _origin(environment: Mapping[str, str], option: Option) -> str:
    """Kubernetes sets variables PENSTOCK_... for a Service that is called penstock."""
    return " (set by Kubernetes for a Service?)" if environment[option.variable].startswith("tcp://") else ""


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
