"""Structured outputs as llguidance's grammars: whether one can be compiled, and what state an output has brought it to.

What a grammar may cost is limited by its size, not by time, so that the same ones are refused everywhere.
"""

from __future__ import annotations

import copy
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.structured_outputs import FIELD, StructuredOutputs
from penstock.text import files
from penstock.text.grammar_errors import plain
from penstock.text.tokenizer import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Between the parts of JSON: a space, or a new line and what indents it. Of any space weak models find no end.
SPACE = r" |\r?\n[ \t]{0,40}"
MOST_SYMBOLS = 10_000  # of a grammar: 1,240 optional properties; compiling takes time that grows with their square
MOST_STATES = 20_000  # of its lexer, which takes up to 2 kB for each
MOST_MULTIPLE = 20_000  # least common one of all `multipleOf`, without decimal points: each remainder is a state
KEPT = 64  # compiled grammars
TRIES, TRIED = 256, 1 << 20  # compilations, and bytes of them, to find where a schema is wrong
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
OPTIONS = {"lenient": False, "coerce_one_of": False}  # outputs are to be valid
PLACE = re.compile(r"^at line \d+, column \d+: ")
# where a schema holds others: by name; and one, or a list of them
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
HELD = (
    *("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)

Place = tuple[str | int, ...]


@lru_cache(64)
def check(wanted: StructuredOutputs) -> None:
    """Raises `InvalidRequest` unless it can be compiled, naming the place in a schema that cannot."""
    field = f"{FIELD}.{wanted.kind}"
    if wanted.json is None:
        if problem := _problem(_source(wanted)):
            if wanted.structural_tag is not None:  # where it stands in what was made of it tells nobody anything
                problem = PLACE.sub("", plain(problem))
            if wanted.whitespace_pattern is not None:  # of any JSON object
                field = f"{FIELD}.whitespace_pattern"
            raise InvalidRequest(f"{field}: {plain(problem)}", field)
        return
    schema = json.loads(wanted.json)
    if problem := _problem(_of_schema(wanted, schema)):
        if wanted.whitespace_pattern is not None and _problem(_of_schema(wanted, True)):
            field = f"{FIELD}.whitespace_pattern"
            raise InvalidRequest(f"{field}: {plain(problem)}", field)
        field += "".join(f".{part}" for part in _culprit(wanted, schema, problem))
        raise InvalidRequest(f"{field}: {plain(problem)}", field)


class Grammars:
    """Compiles for one model. Safe to use from several threads.

    Args:
        directory: the checkpoint, with its tokenizer.
        vocab_size: of the model.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._directory, self._vocab_size = directory, vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    @property
    def words(self) -> int:
        """How many numbers of 32 bits a mask has; it covers the model's vocabulary. Known once there is a matcher."""
        return self._tokenizer.vocab_size // 32 + 1

    @property
    def end(self) -> int:
        """The bit that says that the output may end: it is no token of the model's."""
        return self._tokenizer.eos_token

    def matcher(self, wanted: StructuredOutputs) -> LLMatcher:
        """At the start of an output. Raises `InvalidRequest` when it cannot be compiled."""
        import llguidance

        with self._lock:  # also for the tokenizer
            found = self._compiled.get(wanted)
            if found is None:
                found = llguidance.LLMatcher(self._tokenizer, _source(wanted), log_level=0, limits=_limits())
                if not found.is_error():
                    found.compute_bitmask()  # every copy then knows what may come first
                if found.is_error():
                    field = f"{FIELD}.{wanted.kind}"
                    raise InvalidRequest(f"{field}: {problem_of(found)}", field)
                self._compiled[wanted] = found
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(wanted)
            return found.deep_copy()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes a second for a large vocabulary, and a hundred megabytes."""
        import llguidance

        spelled = _Spelled(self._directory, self._vocab_size)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(spelled), eos_token=spelled.eos_token_id)


def problem_of(matcher: LLMatcher) -> str:
    """Why it goes no further, in one line."""
    return plain(matcher.get_error())


class _Spelled:
    """A tokenizer as llguidance wants it: what each token spells, and one more that is the end of the output.

    Args:
        vocab_size: of the model. Rows that no token of the tokenizer stands for spell nothing, and are never allowed.
    """

    bos_token_id = None

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._backend = files.load_backend(directory, files.read_config(directory))
        vocabulary = Vocabulary(self._backend)
        known = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        size = max(known, vocab_size)
        spelled = map(vocabulary.token_bytes, range(known))
        self.tokens = [*spelled, *[b""] * (size - known), b"<end of output>"]
        self.eos_token_id = size
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = [size, *(token for token, entry in added.items() if entry.special)]
        self._encode = lru_cache(4096)(self._tokens)

    def __call__(self, text: bytes) -> list[int]:
        """Of what can only come next: parts of grammars, so often the same."""
        return self._encode(text)

    def _tokens(self, text: bytes) -> list[int]:
        return self._backend.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids


def _limits() -> LLParserLimits:
    import llguidance

    return llguidance.LLParserLimits(max_grammar_size=MOST_SYMBOLS, max_lexer_states=MOST_STATES, verbose_errors=False)


def _source(wanted: StructuredOutputs) -> str:
    """llguidance's form of it. Raises `InvalidRequest` for what has none."""
    from llguidance import LLMatcher

    if wanted.json is not None:
        return _of_schema(wanted, json.loads(wanted.json))
    if wanted.json_object:
        return _of_schema(wanted, {"type": "object"})
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        quoted = (json.dumps(choice, ensure_ascii=False) for choice in wanted.choice)  # as Lark quotes, too
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    if wanted.structural_tag is not None:
        return LLMatcher.grammar_from_lark(_of_tag(json.loads(wanted.structural_tag)))
    assert wanted.grammar is not None
    return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar))


def _as_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    field = f"{FIELD}.grammar"
    try:
        lark = any_to_lark(grammar)
    except Exception as error:  # of many kinds
        problem = plain(str(error)) or type(error).__name__
        raise InvalidRequest(f"{field}: neither Lark's syntax nor GBNF ({problem})", field) from None
    if "multipleOf" in lark:  # in a schema within it, where nobody looks how large it is
        raise UnsupportedField(f"{field}: multipleOf, not supported in a grammar", field)
    return lark


def _of_tag(tag: dict[str, Any]) -> str:
    """In Lark's syntax. Where a trigger is complete, no text goes on: its lexeme is lazy."""
    special: dict[str, int] = tag.get("special", {})
    patterns: dict[str, str] = tag.get("patterns", {})
    marks = re.compile("(" + "|".join(map(re.escape, sorted((*special, *patterns), key=len, reverse=True))) + ")")

    def spelled(text: str) -> str:
        parts = filter(None, marks.split(text) if special or patterns else [text])
        return " ".join(
            f"<[{special[part]}]>" if part in special
            else f"/{patterns[part]}/" if part in patterns
            else json.dumps(part, ensure_ascii=False)
            for part in parts
        )  # fmt: skip

    def schema(value: Any) -> str:
        _check_multiples(value)
        options = OPTIONS | {"whitespace_flexible": True, "whitespace_pattern": SPACE}
        return "%json " + json.dumps(_without_notes(value) | {"x-guidance": options})

    rules = ["TEXT: /(.|\\n)*/"]
    by_trigger: dict[str, list[str]] = {}
    for i, each in enumerate(tag["structures"]):
        trigger = next(one for one in tag["triggers"] if each["begin"].startswith(one))
        by_trigger.setdefault(trigger, []).append(f"one_{i}")
        rest = spelled(each["begin"].removeprefix(trigger))
        rules.append(f"one_{i}: {rest} {schema(each['schema'])} {spelled(each['end'])}")
    for i, (trigger, ones) in enumerate(by_trigger.items()):
        opening, between, closing = tag.get("around", {}).get(trigger, ("", None, ""))
        more = "" if between is None else f"({spelled(between)} any_{i})*"
        rules += [f"any_{i}: {' | '.join(ones)}", f"calls_{i}: {spelled(opening)} any_{i} {more} {spelled(closing)}"]
        if "content" in tag:
            rules.append(f"tag_{i}: {spelled(trigger)} calls_{i}")
        elif any(trigger.startswith(mark) for mark in special):
            rules.append(f"tag_{i}: TEXT {spelled(trigger)} calls_{i}")
        else:
            rules += [f"tag_{i}: begin_{i} calls_{i}", f"begin_{i}[lazy]: TEXT {spelled(trigger)}"]
    tags = " | ".join(f"tag_{i}" for i in range(len(by_trigger)))
    if "content" not in tag:
        return "\n".join([f"start: ({tags})* TEXT", *rules])
    blank = "/[ \\n]{0,2}/"
    forms = ["content", *([f"({blank} ({tags}))+"] if tags else [])]
    forms += [f"{blank} {spelled(opening)} (<[*]>)*" for opening in tag.get("openings", ())]
    return "\n".join(["start: " + " | ".join(forms), f"content: {schema(tag['content'])}", *rules])


def _of_schema(wanted: StructuredOutputs, schema: Any) -> str:
    from llguidance import LLMatcher

    if schema is False:
        return LLMatcher.grammar_from_json_schema("false")
    if schema is not True:
        _check_multiples(schema)
    options: dict[str, Any] = {**OPTIONS, "whitespace_flexible": not wanted.disable_any_whitespace}
    if not wanted.disable_any_whitespace:
        options["whitespace_pattern"] = SPACE if wanted.whitespace_pattern is None else wanted.whitespace_pattern
    text = json.dumps({} if schema is True else _without_notes(schema))
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=cast(Any, options))
    except ValueError as error:  # whole numbers that no float is
        raise InvalidRequest(f"{FIELD}.json: {plain(str(error))}", f"{FIELD}.json") from None


def _check_multiples(schema: Any) -> None:
    """Those that allOf puts together are one, their least common multiple, so none of them may grow large with any."""
    common = 1
    for place, value in _numbers(schema, "multipleOf"):
        digits = Decimal(str(value)).normalize().as_tuple()
        exponent = digits.exponent
        assert isinstance(exponent, int)
        size = int("".join(map(str, digits.digits))) * 10 ** min(max(exponent, 0), 9)
        common = math.lcm(common, size or 1)
        if common > MOST_MULTIPLE or exponent < -9:
            field = f"{FIELD}.json" + "".join(f".{part}" for part in place)
            raise InvalidRequest(
                f"{field}: {value}, supported is a number whose digits, and whose least common multiple with the "
                f"other ones, are at most {MOST_MULTIPLE}",
                field,
            )


def _numbers(schema: Any, name: str, place: Place = ()) -> Iterator[tuple[Place, float]]:
    """Those of this name, wherever they stand: a reference may make a schema of anything."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == name and isinstance(value, int | float):
            yield (*place, key), value
        elif isinstance(value, dict | list):
            yield from _numbers(value, name, (*place, key))


def _without_notes(schema: Any) -> Any:
    """Without formats that are not enforced: a schema's `format` is a note unless both sides know it."""
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key != "format" or value in FORMATS}
    for key in NAMED:
        if isinstance(found.get(key), dict):
            found[key] = {name: _without_notes(value) for name, value in found[key].items()}
    for key in HELD:
        held = found.get(key)
        if isinstance(held, list):
            found[key] = [_without_notes(value) for value in held]
        elif isinstance(held, dict):
            found[key] = _without_notes(held)
    return found


def _problem(source: str) -> str:
    """Why it cannot be compiled; "" when it can."""
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=_limits())
    return messages[0] if wrong else ""


# --- where a schema is wrong


def _culprit(wanted: StructuredOutputs, schema: Any, problem: str) -> Place:
    """The innermost part of a schema without which it would have another problem, or none.

    Of several parts side by side, half are left out at a time.
    """
    place: Place = ()
    tries = min(TRIES, TRIED // len(wanted.json or " "))
    if "too big" in problem or "too large" in problem:
        return place  # which is nowhere in particular

    def without(places: Sequence[Place]) -> str:
        nonlocal tries
        tries -= 1
        return _problem(_of_schema(wanted, _with_anything_at(schema, places)))

    while True:
        parts = [place + inner for inner in _parts(_at(schema, place))]
        while len(parts) > 1 and tries > 0:
            half = parts[: len(parts) // 2]
            parts = half if without(half) != problem else parts[len(half) :]
        if not parts or tries <= 0 or without(parts) == problem:
            return place
        place = parts[0]


def _parts(schema: Any) -> Iterator[Place]:
    """Where a schema holds others."""
    if not isinstance(schema, dict):
        return
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((key, name) for name in schema[key])
    for key in HELD:
        held = schema.get(key)
        if isinstance(held, list):
            yield from ((key, i) for i in range(len(held)))
        elif held is not None:
            yield (key,)


def _at(schema: Any, place: Place) -> Any:
    for part in place:
        schema = schema[part]
    return schema


def _with_anything_at(schema: Any, places: Sequence[Place]) -> Any:
    """A copy that allows anything there."""
    changed = copy.deepcopy(schema)
    for place in places:
        _at(changed, place[:-1])[place[-1]] = True
    return changed
