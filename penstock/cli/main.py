"""`penstock`: the command line. Only this package joins all parts and reads the environment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from penstock import __version__
from penstock.cli import serve
from penstock.cli.help import add_examples, overview
from penstock.cli.options import in_flags
from penstock.core.errors import PenstockError, UserError

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


class CommandLine(Parser):
    """All of it."""

    described: Mapping[str, str] = MappingProxyType({})  # what each command is for

    def format_help(self) -> str:
        return overview(self.format_usage(), self.described)


class Described:
    """What commands add themselves to, and what they say of themselves there."""

    def __init__(self, commands: Any) -> None:
        self._commands = commands
        self.described: dict[str, str] = {}

    def add_parser(self, name: str, *, help: str, **options: Any) -> Any:
        self.described[name] = help
        return self._commands.add_parser(name, help=help, **options)


def make_parser(command: str = "") -> tuple[CommandLine, Mapping[str, argparse.ArgumentParser]]:
    """The command line, and its commands by name. For `serve` the others are not imported: its engine starts sooner."""
    parser = CommandLine(prog="penstock", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    described = Described(commands)
    serve.add_parser(described)
    if command != "serve":
        from penstock.cli import (
            batch,
            bench,
            chat,
            completion,
            doctor,
            drill,
            explain,
            join,
            plan,
            replay,
            sim,
            top,
            up,
        )

        for other in (up, join, top, explain, chat, batch, bench, drill, replay, sim, plan, doctor):
            other.add_parser(described)
        completion.add_parser(described, make_parser)
    add_examples(commands.choices)
    parser.described = described.described
    return parser, commands.choices


def _flag(word: str) -> str:
    """--max_model_len=8 as --max-model-len=8, which vLLM takes, too."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 failed, 2 a wrong flag, file or checkpoint."""
    words = [_flag(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser, commands = make_parser(*words[:1])
    try:
        args, unknown = parser.parse_known_args(words)
        if unknown:  # said by the command itself, which knows where its help is
            command = next(word for word in words if word in commands)
            commands[command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(args.run(args))
    except UserError as error:
        print(f"penstock: {in_flags(error, serve.OPTIONS)}", file=sys.stderr)
        return USAGE_ERROR
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
