"""A Jinja sandbox for untrusted chat templates: no access to Python's internals, immutable arguments, and a budget of
steps, characters and time for each rendering.

A template has no `while`, so its cost is that of loop iterations, calls, and values that grow. Each of them is charged
to the budget before it happens: loops, `~` and the text between tags become filters that charge; operators and
calls are intercepted. Single operations on values of bounded size are limited by the time only.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000  # loop iterations and calls
MAX_CHARS = 2**26  # of all values that are built, shown or not
MAX_SECONDS = 5.0
CLOCK_EVERY = 64  # steps
MAX_INTEGER_BITS = 4096
WIDTH = re.compile(r"\d{5,}|\*|\{[^{}]*\{")  # in a format: large, or given by an argument
PADDING = {"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "batch", "slice", "wordwrap", "tojson"}
# take a moment even for what has megabytes, or charge their elements themselves
QUICK = {"abs", "attr", "capitalize", "center", "count", "d", "default", "e", "escape", "first", "float", "forceescape"}
QUICK |= {"format", "indent", "int", "items", "join", "last", "length", "lower", "replace", "reverse", "round", "safe"}
QUICK |= {"string", "title", "tojson", "trim", "upper"}
SHOWING = {"string", "tojson", "pprint", "join", "format", "upper", "lower", "escape", "e", "safe", "urlencode"}
SHOWING |= {"urlize", "striptags", "wordwrap", "wordcount"}


class Exhausted(jinja2.TemplateError):
    """A rendering exceeds its budget."""


class _Budget(threading.local):
    """What is left to the rendering in this thread."""

    steps = MAX_STEPS
    chars = MAX_CHARS
    until = float("inf")

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise Exhausted(f"it takes more than {MAX_STEPS} steps")
        if (count > 1 or self.steps % CLOCK_EVERY == 0) and time.monotonic() > self.until:
            raise Exhausted(f"it takes longer than {MAX_SECONDS:g} s")

    def grow(self, size: int) -> None:
        self.chars -= size
        if self.chars < 0:
            raise Exhausted(f"it makes more than {MAX_CHARS} characters")
        self.step()


_budget = _Budget()


@contextmanager
def limited() -> Iterator[None]:
    """A fresh budget for what is compiled or rendered inside."""
    _budget.steps, _budget.chars, _budget.until = MAX_STEPS, MAX_CHARS, time.monotonic() + MAX_SECONDS
    yield


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; compile and render inside `limited()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_shown)
        self.globals.pop("lipsum")
        self.add_filters(**self.filters)
        self.filters |= {"_turns": _turns, "_joined": _joined}

    def add_filters(self, **filters: Callable[..., Any]) -> None:
        """Adds filters by name; each use is charged to the budget."""
        self.filters |= {name: _charged(name, filter) for name, filter in filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "_turns")
        for output in tree.find_all(nodes.Output):
            output.nodes = [_as_value(node) for node in output.nodes]
        return _without_concat(tree)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _weigh(right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif _sized(left) and _sized(right):
            _budget.grow(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:
        method, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = _check_growth(method, owner, args)
        _budget.step()
        result = super().call(context, obj, *args, **named)
        if _sized(result):
            _budget.grow(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format = super().wrap_str_format(value)
        if format is None:
            return None

        def checked(*args: Any, **named: Any) -> str:
            _check_format(value.__self__)
            _weigh([args, named])
            return format(*args, **named)

        return checked


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _as_value(node: Any) -> Any:
    """Text between tags is not handed to `finalize`; a constant is."""
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _without_concat(node: Any) -> Any:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_without_concat(item) if isinstance(item, nodes.Node) else item for item in value]
        elif isinstance(value, nodes.Node):
            setattr(node, field, _without_concat(value))
    if isinstance(node, nodes.Concat):
        joined: Any = _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")
        return joined.set_environment(node.environment)
    return node


@jinja2.pass_context
def _shown(context: Any, value: Any) -> Any:
    """Every value on its way into the text."""
    _weigh(value)
    return value


def _turns(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _budget.step()
        yield item


@jinja2.pass_environment  # so that it is not run while compiling
def _joined(environment: Any, parts: list[Any]) -> str:
    _weigh(parts)
    return "".join(map(str, parts))


def _charged(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)  # with what it says of the arguments that it wants
    def charged(*args: Any, **named: Any) -> Any:
        _budget.step()
        first = 1 if getattr(filter, "jinja_pass_arg", None) else 0
        value, rest = args[first], args[first + 1 :]
        if name == "join":
            value = list(value)
        if name in SHOWING:
            _weigh([value, rest])
        if name not in QUICK:
            value = _walked(value)
        if isinstance(value, str):
            if name == "format":
                _check_format(value)
            rest = _check_growth(name, value, (*rest, *named.values()))[: len(rest)]
        elif name in PADDING:
            _check_growth(name, "", (*rest, *named.values()))
        elif name == "join" and rest and _sized(rest[0]):
            _budget.grow(len(value) * len(rest[0]))
        result = filter(*args[:first], value, *rest, **named)
        if _sized(result):
            _budget.grow(len(result))
        return result

    return charged


def _walked(value: Any) -> Any:
    """Charge a step for each element, or character, that a filter may look at."""
    if _sized(value):
        _budget.step(len(value))
    return _turns(value) if isinstance(value, Iterator) else value


def _sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict)


def _weigh(value: Any) -> None:
    """Charge what `str` makes of it. A list may hold another twice, and that one again: the text is what grows."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        _budget.grow(len(value) if isinstance(value, str) else 8)
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value


def _check_growth(method: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Charge a method or filter of a text that may make much of little. Returns the arguments to use."""
    if method in PADDING:
        lines = 1 + text.count("\n") + text.count("\t")
        _budget.grow(lines * sum(abs(arg) for arg in args if isinstance(arg, int)))
    elif method == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _budget.grow(len(text) + text.count(args[0]) * len(args[1]))
    elif method == "join" and args:
        args = (list(args[0]), *args[1:])
        _budget.grow(sum(len(str(item)) for item in args[0]) + len(args[0]) * len(text))
    elif method == "translate":
        raise Exhausted("str.translate is not available")
    return args


def _check_format(layout: str) -> None:
    if WIDTH.search(layout):
        raise Exhausted("a format with so large a width, or one that is an argument, is not available")
    _budget.grow(len(layout) * 4 + layout.count("{") * 9999 + layout.count("%") * 9999)


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if _sized(value) and isinstance(times, int):
            _budget.grow(len(value) * max(0, times))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
        raise Exhausted("its numbers become too large")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INTEGER_BITS:
        raise Exhausted("its numbers become too large")
