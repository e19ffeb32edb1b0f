"""`penstock completion SHELL`: a script by which a shell completes commands, flags and their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: Any, everything: Callable[[], tuple[Any, Mapping[str, argparse.ArgumentParser]]]) -> None:
    """
    Args:
        everything: makes the whole command line, and its commands by name.
    """
    parser = commands.add_parser(
        "completion", help="a script by which a shell completes commands and flags", allow_abbrev=False
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda args: complete(args.shell, *everything()))


def complete(shell: str, parser: Any, commands: Mapping[str, argparse.ArgumentParser]) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion: needs the package shtab, pip install shtab") from None
    for name, command in commands.items():
        command.description = parser.described[name]  # what a shell has room for
        _describe(command)
    print(shtab.complete(parser, shell))
    return 0


def _describe(parser: argparse.ArgumentParser) -> None:
    """Say which values of flags are names and which are paths."""
    import shtab

    from penstock.cli import serve

    options = {f"--{option.name}": option for option in serve.OPTIONS}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _describe(inner)
            continue
        flags = [flag for flag in action.option_strings if flag in options]
        convert = options[flags[0]].convert if flags else None
        paths = {serve.file: shtab.FILE, serve.folder: shtab.DIRECTORY}
        if convert in paths:
            action.complete = paths[convert]  # type: ignore[attr-defined]
        elif action.choices is None and (names := getattr(convert, "names", ())):
            action.choices = names
        elif action.dest in ("file", "config", "scenario", "record") or action.metavar in ("FILE", "OUT", "FOLDER"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
