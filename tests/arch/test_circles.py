"""No module imports, directly or through others, one that imports it: not at its top, not in a function, and not for
types alone. A package's `__init__` counts where it is named; that importing a submodule runs it too does not."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "penstock"
# only the command line's own table of commands names this one, and only when the command is given
LAZY = {"penstock.cli.sim": {"penstock.cli.main"}}
# where circles are still to be mended
PENDING: tuple[str, ...] = ()


def modules() -> dict[str, Path]:
    paths = (ROOT / PACKAGE).rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Our modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


@cache
def importing() -> dict[str, set[str]]:
    """Module -> those that it imports."""
    known = modules()
    return {name: set(imported(path, known)) for name, path in known.items()}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Strongly connected sets of more than one module (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            place = stack.index(name)
            members = frozenset(stack[place:])
            del stack[place:]
            if len(members) > 1 or name in graph[name]:
                found.add(members)

    for name in graph:
        if name not in number:
            visit(name)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}) == {
        frozenset({"b", "c"}),
        frozenset({"e"}),
    }


def test_no_module_imports_itself_through_others():
    found = circles(importing())
    found = {circle for circle in found if not any(all(n.startswith(room) for n in circle) for room in PENDING)}
    assert not found, [sorted(circle) for circle in found]


def test_what_is_loaded_for_one_command_is_imported_by_its_table_alone():
    for name, allowed in LAZY.items():
        if f"{name.rpartition('.')[0]}." in PENDING:
            continue
        importers = {other for other, names in importing().items() if name in names}
        assert importers <= allowed, importers
