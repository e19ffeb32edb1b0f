"""What form an output is to have: JSON of a schema, a regular expression, one of several texts, a grammar, or text with
structures in it that begin with certain words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import InvalidRequest, UnsupportedField

FIELD = "structured_outputs"
MAX_BYTES = 1 << 16  # of a schema, regular expression or grammar, and of all choices
MAX_DEPTH = 100  # objects and lists in a schema that are within each other
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
UNSERVED = ("disable_additional_properties",)  # vLLM's other fields
MAX_STRUCTURES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of the first six, which have vLLM's names and meaning. Raises `InvalidRequest` naming what is wrong.

    Whether it can be compiled is seen by `text.grammar`, which knows how.

    Attributes:
        json: a JSON Schema, as an object or as text; kept as text.
        json_object: any JSON object.
        regex: the whole output matches it.
        choice: the output is one of these texts.
        grammar: in Lark's syntax, or in GBNF.
        structural_tag: any text, but where one of its `triggers` comes, one of the `structures` that begin with it has
            to follow: `begin`, JSON of `schema`, `end`. As an object or as text; kept as text. Of ours are: `around`,
            of a trigger what follows it at once, what is between two structures or null where there is one, and what
            comes after them; `content`, a schema that the whole output has instead if it does not begin with a
            structure; `openings`, with which an output of any form may begin then; `special`, the tokens of texts that
            are special tokens; and `patterns`, regular expressions that texts stand for.
        disable_any_whitespace: JSON has no space between its parts.
        whitespace_pattern: of JSON: a regular expression of the space that there may be between its parts.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if value is not None and type(value) is not bool:
                raise _wrong(name, value, "true or false")
            object.__setattr__(self, name, bool(value))
        if self.json is False:
            raise _wrong("json", self.json, "a JSON Schema that something satisfies")
        given = [kind for kind in KINDS if self._says(kind)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidRequest(f"{FIELD}: {found}, exactly one of {', '.join(KINDS)} is needed", FIELD)
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong(name, value, "a string")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _tag_text(self.structural_tag))
        if not (self.json or self.json_object) and (self.disable_any_whitespace or self.whitespace_pattern is not None):
            name = "whitespace_pattern" if self.whitespace_pattern is not None else "disable_any_whitespace"
            raise InvalidRequest(f"{FIELD}.{name}: given, allowed only with json or json_object", f"{FIELD}.{name}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            name = f"{FIELD}.whitespace_pattern"
            raise InvalidRequest(f"{name}: given, allowed only without disable_any_whitespace: true", name)
        self._check_size()

    def _check_size(self) -> None:
        for name in ("json", "regex", "grammar", "whitespace_pattern", "choice", "structural_tag"):
            value = getattr(self, name)
            try:
                size = len("".join(value or ()).encode())
            except UnicodeEncodeError:
                raise InvalidRequest(f"{FIELD}.{name}: not valid Unicode", f"{FIELD}.{name}") from None
            if size > MAX_BYTES:
                raise InvalidRequest(
                    f"{FIELD}.{name}: {size} bytes, at most {MAX_BYTES} are allowed", f"{FIELD}.{name}"
                )

    @property
    def kind(self) -> str:
        """Which of the six it is."""
        return next(kind for kind in KINDS if self._says(kind))

    def _says(self, kind: str) -> bool:
        value = getattr(self, kind)
        return value is not None and value is not False

    @classmethod
    def of(cls, value: Any) -> StructuredOutputs:
        """Of an object with these fields. Raises InvalidRequest, or UnsupportedField naming a field that vLLM has."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise InvalidRequest(f"{FIELD}: {_short(value)}, allowed is an object", FIELD)
        given = {name: entry for name, entry in value.items() if entry is not None}
        for name, entry in given.items():
            if name in UNSERVED:
                if entry is False:
                    continue
                raise UnsupportedField(f"{FIELD}.{name} is not supported", f"{FIELD}.{name}")
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise InvalidRequest(f"{FIELD}.{_short(name)}: no such field, allowed are {known}", FIELD)
        return cls(**{name: entry for name, entry in given.items() if name not in UNSERVED})


def _schema_text(schema: Any, kind: str = "json") -> str:
    name = f"{FIELD}.{kind}"
    if isinstance(schema, str) and len(schema) > 2 * MAX_BYTES:  # also with much space in it
        raise InvalidRequest(f"{name}: {len(schema)} characters, at most {MAX_BYTES} bytes are allowed", name)
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise _too_deep(name) from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{name}: not JSON ({error})", name) from None
    if not isinstance(schema, dict | bool):
        raise _wrong(kind, schema, "a JSON Schema: an object, true or false")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [part for held in level if isinstance(held, dict | list) for part in _parts(held)]
        if not level:
            return text
    if any(isinstance(held, dict | list) for held in level):
        raise _too_deep(name)
    return text


def _tag_text(given: Any) -> str:
    """Its JSON, with everything in its place."""
    kind = "structural_tag"
    text = _schema_text(given, kind)
    tag = json.loads(text)
    if not isinstance(tag, dict) or not isinstance(tag.get("structures"), list):
        raise _wrong(kind, given, "an object with structures and triggers")
    if len(tag["structures"]) > MAX_STRUCTURES:
        raise _wrong(f"{kind}.structures", tag["structures"], f"a list of at most {MAX_STRUCTURES}")
    triggers = tag.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise _wrong(f"{kind}.triggers", triggers, "a list of strings of at least one character")
    for i, structure in enumerate(tag["structures"]):
        place = f"{kind}.structures.{i}"
        if not isinstance(structure, dict):
            raise _wrong(place, structure, "an object with begin, schema and end")
        for name in ("begin", "end"):
            if not isinstance(structure.get(name), str):
                raise _wrong(f"{place}.{name}", structure.get(name), "a string")
        if not isinstance(structure.get("schema"), dict):
            raise _wrong(f"{place}.schema", structure.get("schema"), "a JSON Schema, an object")
        if not structure["begin"].startswith(tuple(triggers)):
            raise _wrong(f"{place}.begin", structure["begin"], "what begins with one of triggers")
    if not isinstance(tag.get("content", {}), dict):
        raise _wrong(f"{kind}.content", tag["content"], "a JSON Schema, an object")
    openings, special = tag.get("openings", []), tag.get("special", {})
    if not isinstance(openings, list) or not all(isinstance(each, str) and each for each in openings):
        raise _wrong(f"{kind}.openings", openings, "a list of strings of at least one character")
    if not isinstance(special, dict) or not all(type(token) is int and token >= 0 for token in special.values()):
        raise _wrong(f"{kind}.special", special, "an object of token ids")
    around, patterns = tag.get("around", {}), tag.get("patterns", {})
    if not isinstance(around, dict) or not all(_surrounds(each) for each in around.values()):
        raise _wrong(f"{kind}.around", around, "an object of [text, text or null, text]")
    if not isinstance(patterns, dict) or not all(isinstance(each, str) for each in patterns.values()):
        raise _wrong(f"{kind}.patterns", patterns, "an object of regular expressions")
    if not tag["structures"] and not ("content" in tag and openings):
        raise _wrong(f"{kind}.structures", tag["structures"], "a list of at least one structure")
    return text


def _surrounds(each: Any) -> bool:
    return isinstance(each, list) and [*map(type, each)] in ([str, str, str], [str, type(None), str])


def _parts(held: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def _too_deep(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: nested too deeply, at most {MAX_DEPTH} objects and lists within each other", name)


def _choices(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise _wrong("choice", given, "a list of strings")
    choices = tuple(given)
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest(
                f"{FIELD}.choice: {_short(choice)} is in it, allowed are strings of at least one character",
                f"{FIELD}.choice",
            )
    if not choices:
        raise _wrong("choice", given, "a list of at least one string")
    return choices


def _wrong(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{name}: {_short(value)}, allowed is {allowed}", f"{FIELD}.{name}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
