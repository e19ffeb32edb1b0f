"""A YAML file of settings with line numbers; collects all its mistakes, not only the first."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from penstock.core.errors import ConfigError
from penstock.core.renamed import new_name

NULL = "tag:yaml.org,2002:null"


class Setting(Protocol):
    """One setting: the part of a command line's option that a file needs as well.

    Attributes:
        name: as written in the file.
        key: the name with underscores.
        convert: text -> value; raises ValueError whose message says what is allowed.
        default: as converted.
        takes_object: whether a section may stand there, of which `convert` gets JSON.
    """

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def convert(self) -> Callable[[str], Any]: ...
    @property
    def default(self) -> Any: ...
    @property
    def takes_object(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Spot:
    """Where something stands: its path from the file's root, such as "instances[0].count", and its line from 1."""

    path: str
    line: int
    node: yaml.Node

    def child(self, name: str, line: int, node: yaml.Node) -> Spot:
        return Spot(f"{self.path}.{name}" if self.path else name, line, node)

    @property
    def shown(self) -> str:
        """What stands there, for a message."""
        if isinstance(self.node, yaml.ScalarNode):
            return repr(self.node.value)
        return "a section" if isinstance(self.node, yaml.MappingNode) else "a list"


class SettingsFile:
    """Read it from `root` downwards, then `finish`."""

    def __init__(self, name: str, text: str) -> None:
        """Raises ConfigError when the text is no YAML."""
        self.name = name
        self._problems: list[tuple[int, str]] = []
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise ConfigError(f"{name}:{line}: this is no YAML: {error.problem or error.context}") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(f"{name}:{line}: this is no YAML: {error.reason}") from None
        except RecursionError:
            raise ConfigError(f"{name}:1: lists or sections stand too deep in one another") from None
        self.root = Spot("", 1, node or yaml.ScalarNode(NULL, ""))

    def complain(self, spot: Spot, message: str) -> None:
        self._problems.append((spot.line, f"{spot.path}: {message}" if spot.path else message))

    def finish(self) -> None:
        """Raises ConfigError with one line for each problem, in the file's order."""
        if self._problems:
            ordered = sorted(self._problems, key=lambda problem: problem[0])
            raise ConfigError("\n".join(f"{self.name}:{line}: {message}" for line, message in ordered))

    def section(
        self, spot: Spot | None, known: Collection[str], elsewhere: Mapping[str, str] | None = None
    ) -> dict[str, Spot]:
        """What stands under each of the known names. A name left blank is not given.

        Args:
            elsewhere: names that are known in other sections -> the section.
        """
        if spot is None or _blank(spot.node):
            return {}
        if not isinstance(spot.node, yaml.MappingNode):
            self.complain(spot, f"{spot.shown}, allowed are settings, one 'name: value' a line")
            return {}
        found: dict[str, Spot] = {}
        first: dict[str, int] = {}
        for key, node in spot.node.value:
            name = str(key.value).replace("_", "-") if isinstance(key, yaml.ScalarNode) else "?"
            inner = spot.child(name if name.isprintable() else repr(name), key.start_mark.line + 1, node)
            if name in first:
                self.complain(inner, f"given twice, first in line {first[name]}")
            elif new := new_name(name, known):
                self.complain(inner, f"it is called {new} now")
            elif name not in known:
                place = (elsewhere or {}).get(name)
                allowed = f"allowed is {name} under {place}" if place else _nearest(name, known)
                self.complain(inner, f"no such setting here, {allowed}" if place else f"no such setting, {allowed}")
            elif not _blank(node):
                found[name] = inner
            first.setdefault(name, inner.line)
        return found

    def items(self, spot: Spot | None) -> list[Spot]:
        """What stands in a list, or nothing where nothing is given."""
        if spot is None:
            return []
        if not isinstance(spot.node, yaml.SequenceNode):
            self.complain(spot, f"{spot.shown}, allowed is a list, each entry starting with '- '")
            return []
        return [Spot(f"{spot.path}[{i}]", node.start_mark.line + 1, node) for i, node in enumerate(spot.node.value)]

    def values(self, spots: Mapping[str, Spot], settings: Iterable[Setting]) -> dict[str, Any]:
        """The value of every setting that is given, by its key. One that is wrong is noted and left out."""
        found = {}
        for setting in settings:
            if setting.name in spots:
                try:
                    found[setting.key] = _convert(spots[setting.name], setting)
                except ValueError as error:
                    spot = spots[setting.name]
                    self.complain(spot, f"{spot.shown}, allowed is {error}")
        return found


def _convert(spot: Spot, setting: Setting) -> Any:
    """Raises ValueError that says what is allowed."""
    node = spot.node
    if isinstance(node, yaml.ScalarNode):
        return setting.convert(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        value = setting.convert(",".join(item.value for item in node.value))
        if isinstance(value, tuple):
            return value
    if isinstance(node, yaml.MappingNode) and setting.takes_object:
        return setting.convert(_json(node))
    raise ValueError("one value")


def _json(node: yaml.Node) -> str:
    try:
        return json.dumps(yaml.constructor.SafeConstructor().construct_document(node), default=str)
    except (yaml.YAMLError, TypeError, ValueError):  # a tag, a key or a circle that no JSON has
        raise ValueError("what JSON can say") from None


def _blank(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == NULL


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"allowed are {', '.join(sorted(known))}"
