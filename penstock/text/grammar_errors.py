"""What llguidance says about a grammar, in words of those who wrote it: the value, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_SAID, MOST_QUOTED, MOST_READ = 240, 60, 1000  # characters
TYPES = "string, number, integer, boolean, null, array and object"
ALLOWED = {
    "f64": "a number",
    "number": "a number",
    "positive integer": "a whole number of at least 0",
    "array": "a list",
    "string": "a string",
    "bool": "true or false",
    "object": "an object",
}

Says = str | Callable[[re.Match[str]], str]


def _expression(found: re.Match[str]) -> str:
    value = found[1] if len(found[1]) <= MOST_QUOTED else found[1][: MOST_QUOTED - 3] + "..."
    return f"'{value}', which is no regular expression that is supported: {found[2]}"


def _expected(found: re.Match[str]) -> str:
    return f"{found[2]}: {found[3]}, allowed is {ALLOWED.get(found[1], found[1])}"


def _keys(found: re.Match[str]) -> str:
    return f"{found[1].replace(chr(34), '')}: not supported"


# tried in this order, on one line
SAYS: tuple[tuple[str, Says], ...] = (
    (
        r"oneOf constraints are not supported.*",
        "oneOf: supported only of parts that exclude each other, as by their types; anyOf is supported",
    ),
    (r"Unimplemented keys: \[(.*?)\]", _keys),
    (r".*?regex parse error: (.*?) \^+ error: (.*)", _expression),
    (r".*?regex parse error: .*", "no regular expression that is supported"),
    (r'invalid regex "(.*)" \(in regex\): (lookarounds not supported) yet.*', _expression),
    (r"Expected (.+?) for '(.+?)', got (.*)", _expected),
    (r"Invalid type: (.*)", rf"type: '\1', allowed are {TYPES}"),
    (r"Unsatisfiable schema: Regex is empty.*", "nothing satisfies it: pattern and format exclude each other"),
    (r"Unsatisfiable schema: anyOf is empty", "nothing satisfies it: one of its lists of possibilities is empty"),
    (r"Unsatisfiable schema: (.*)", r"nothing satisfies it: \1"),
    (
        r"grammar size \(number of symbols\) too big.*?(\d+)\)",
        r"too large, at most \1 symbols of a grammar are allowed, of which a property takes up to 8",
    ),
    (r"Pointer '(.*)' does not exist", r"$ref: '#\1', allowed is what there is in the schema"),
    (r"Resource '(.*)' is not present in a registry.*", r"$ref: '\1', allowed is what there is in the schema"),
    (r"number out of range.*", "a number in it is out of the range of floats"),
    (r"invalid multiple of", "multipleOf: allowed is a number above 0"),
    (r"Failed to generate regex for float range: (.*)", "minimum and maximum: there is no number that can be written"),
    (
        r"patternProperty regexes (.*) and (.*) are not disjoint",
        r"patternProperties: \1 and \2, supported are only those of which no name matches two",
    ),
    (r"unknown name: (.*)", r"no rule is called \1"),
    (r"NoExtension.*", "nothing may come next"),
    (r".*(?:too (?:big|large|complex|many)|TooComplex|fuel).*", "too large or too complex to be followed"),
)


def plain(said: str) -> str:
    """On one line, without what belongs to llguidance alone."""
    line = " ".join(said.removesuffix("<non-verbose/>").split())
    line = re.sub(r" \d+ \| .*$", "", line)  # the grammar itself, as it was given
    if len(line) > 2 * MOST_READ:  # with an expression in it
        line = f"{line[:MOST_READ]}...{line[-MOST_READ:]}"
    place = re.match(r"at (\d+)\((\d+)\): ", line)
    where = "" if place is None or "(in regex)" in line else f"at line {place[1]}, column {place[2]}: "
    line = (line if place is None else line[place.end() :]).removeprefix("failed to compile JSON schema: ")
    for pattern, says in SAYS:
        if (found := re.fullmatch(pattern, line)) is not None:
            line = says(found) if callable(says) else found.expand(says)
            break
    line = where + line
    return line if len(line) <= MOST_SAID else line[: MOST_SAID - 3] + "..."
