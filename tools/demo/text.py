"""English text that ships with CPython: `help()` topics and docstrings, as documents and as questions with answers."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from types import ModuleType
from typing import Any

END_OF_TEXT, TURN_START, TURN_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HELD_OUT_PER_MILLE = 30
MAX_ANSWER_CHARS = 900  # about 280 tokens
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Read after everything else, so that of two equal docstrings the better known place keeps its own.
READ_LAST = {"ntpath", "idlelib", "turtledemo", "distutils", "lib2to3", "ensurepip", "venv"}
# Where users know these modules' contents from.
PUBLIC_NAMES = {
    "builtins": "",
    "posixpath": "os.path",
    "posix": "os",
    "_pydecimal": "decimal",
    "_pydatetime": "datetime",
    "_pyio": "io",
    "_collections_abc": "collections.abc",
    "json.decoder": "json",
    "json.encoder": "json",
    "unittest.case": "unittest",
    "unittest.suite": "unittest",
    "unittest.runner": "unittest",
}
PUBLIC_PACKAGES = ("asyncio", "concurrent.futures")  # re-export what their submodules define
# Asked about by their short names as well: "What does deepcopy do?".
FAMILIAR = {
    "", "argparse", "asyncio", "base64", "bisect", "collections", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "glob", "hashlib", "heapq", "inspect", "io", "itertools",
    "json", "logging", "math", "os", "os.path", "pathlib", "pickle", "pprint", "queue", "random", "re", "shutil",
    "socket", "sqlite3", "statistics", "string", "struct", "subprocess", "sys", "tempfile", "textwrap", "threading",
    "time", "typing", "unittest", "uuid", "zipfile",
}  # fmt: skip
# What most questions are about; a model this small answers recognisably only what it has seen a few dozen times.
CENTRAL = {
    "", "collections", "copy", "datetime", "functools", "glob", "heapq", "itertools", "json", "math", "os", "os.path",
    "pathlib", "random", "re", "shutil", "string", "subprocess", "sys", "time",
}  # fmt: skip
SELDOM = READ_LAST | {"encodings", "tkinter", "turtle", "xml"}


@dataclass(frozen=True)
class Entry:
    """One docstring: where it stands, what kind of object it documents and how that object is called."""

    module: str
    path: tuple[str, ...]  # () for the module itself, ("Path", "exists") for a method
    kind: str
    signature: str
    doc: str

    @property
    def name(self) -> str:
        """The dotted name a user would type."""
        return ".".join(filter(None, (self.module, *self.path)))


@dataclass(frozen=True)
class Turn:
    """An answer, the names under which one may ask for it and how often an epoch does so, on average."""

    subjects: tuple[str, ...]
    kind: str
    heading: str  # names what is asked about, as help() does
    text: str
    frequency: float

    @property
    def answer(self) -> str:
        """What the assistant says."""
        return f"{self.heading}\n\n{self.text}" if self.heading else self.text


@dataclass
class Document:
    """One unit of the split: a top-level object with its members, a module's docstring, or a section of a topic."""

    name: str
    text: str
    turns: list[Turn] = field(default_factory=list)

    @property
    def held_out(self) -> bool:
        """Decided by the name alone, so that other Python versions hold out the same documents."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def normalised(text: str) -> str:
    """Text as duplicates are recognised: without case and layout."""
    return " ".join(text.split()).lower()


def public_module(module: str) -> str:
    """The module under whose name users know the contents of `module`."""
    for package in PUBLIC_PACKAGES:
        if module.startswith(package + "."):
            return package
    return PUBLIC_NAMES.get(module, module)


def python_modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield name and syntax tree of every pure Python module of the standard library, well-known ones first."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts):
            found.append((parts[0] in READ_LAST, ".".join(parts).removesuffix(".__init__"), path))
    for _, module, path in sorted(found):
        try:
            yield module, ast.parse(path.read_bytes())
        except SyntaxError:  # templates and deliberately broken files
            continue


def definitions(nodes: Iterable[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the classes and functions of a body, looking into the branches of `if` and `try` as well."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions(node.body + node.orelse + [s for h in getattr(node, "handlers", []) for s in h.body])


def source_entries(module: str, body: Iterable[ast.stmt], path: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Yield the documented classes, functions and methods of a parsed body; functions' inner ones are left out."""
    for node in definitions(body):
        here = (*path, node.name)
        doc = ast.get_docstring(node)
        if doc:
            if isinstance(node, ast.ClassDef):
                kind, signature = "class", f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
            else:
                kind, signature = "function", f"({ast.unparse(node.args)})"
            yield Entry(module, here, kind, signature, doc)
        if isinstance(node, ast.ClassDef):
            yield from source_entries(module, node.body, here)


def compiled_modules() -> Iterator[ModuleType]:
    """Yield the modules written in C, which have docstrings but no source to parse."""
    folder = Path(sysconfig.get_path("platstdlib")) / "lib-dynload"
    names = {*sys.builtin_module_names, *(path.name.split(".")[0] for path in folder.glob("*.so"))}
    for name in sorted(names):
        if "test" in name or name.lstrip("_").startswith("xx"):
            continue
        try:
            yield importlib.import_module(name)
        except ImportError:  # built against a library this machine lacks
            continue


def signature_of(thing: Any) -> str:
    """The signature of a compiled function; many do not tell theirs."""
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"


def object_entries(module: str, namespace: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Yield the documented classes and functions found in a compiled module's or class's namespace."""
    for name, thing in sorted(namespace.items()):
        is_class = inspect.isclass(thing)
        if not (is_class or inspect.isroutine(thing)) or not isinstance(thing.__doc__, str):
            continue
        kind, signature = ("class", "") if is_class else ("function", signature_of(thing))
        yield Entry(module, (*path, name), kind, signature, inspect.cleandoc(thing.__doc__))
        if is_class and not path:
            yield from object_entries(module, dict(vars(thing)), (name,))


def all_entries() -> Iterator[Entry]:
    """Yield every docstring of the standard library, duplicates included."""
    for name, tree in python_modules(Path(sysconfig.get_path("stdlib"))):
        doc = ast.get_docstring(tree)
        if doc:
            yield Entry(PUBLIC_NAMES.get(name, name), (), "module", "", doc)
        yield from source_entries(public_module(name), tree.body)
    for module in compiled_modules():
        name = PUBLIC_NAMES.get(module.__name__, module.__name__.removeprefix("_"))
        if module.__doc__ and name:
            yield Entry(name, (), "module", "", inspect.cleandoc(module.__doc__))
        yield from object_entries(name, vars(module))


def quoted(doc: str, depth: int) -> str:
    """A docstring with its quotes, indented by `depth` levels."""
    return textwrap.indent(f'"""{doc}\n"""' if "\n" in doc else f'"""{doc}"""', "    " * depth)


def rendered(entries: list[Entry]) -> str:
    """The plain form of one document: the import, then the definitions with their docstrings and no code."""
    module = entries[0].module
    parts = [f"import {module}"] if module else []
    opened: set[tuple[str, ...]] = set()
    for entry in entries:
        if not entry.path:
            parts.append(quoted(entry.doc, 0))
            continue
        for depth in range(1, len(entry.path)):  # a class without a docstring still heads its methods
            if entry.path[:depth] not in opened:
                opened.add(entry.path[:depth])
                parts.append("    " * (depth - 1) + f"class {entry.path[depth - 1]}:")
        opened.add(entry.path)
        depth = len(entry.path)
        signature = entry.signature if len(entry.signature) <= 200 else "(...)"
        keyword = "class" if entry.kind == "class" else "def"
        head = "    " * (depth - 1) + f"{keyword} {entry.path[-1]}{signature}:"
        parts.append(f"{head}\n{quoted(entry.doc, depth)}")
    return "\n\n".join(parts) + "\n"


def shortened(text: str) -> str:
    """Whole paragraphs up to the longest answer the chat form may give; at least one, cut at a sentence if need be."""
    kept = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if kept and len(kept) + len(paragraph) > MAX_ANSWER_CHARS:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    if len(kept) > MAX_ANSWER_CHARS:
        kept = kept[:MAX_ANSWER_CHARS]
        ends = [match.end() for match in re.finditer(r"[.!?](?=\s)", kept)]
        kept = kept[: ends[-1] if ends else max(kept.rfind("\n"), 0) or None]
    return kept.strip()


def heading(entry: Entry) -> str:
    """The first line of an answer; none where a C function's docstring begins with the signature itself."""
    if entry.kind == "module":
        return f"module {entry.name}"
    if entry.kind == "class":
        return f"class {entry.name}{entry.signature}"
    return f"{entry.name}{entry.signature}" if entry.signature != "(...)" and len(entry.signature) <= 200 else ""


def frequency(module: str) -> float:
    """How many chat turns per epoch each docstring of a module gets."""
    if module in CENTRAL:
        return 6
    if module in FAMILIAR:
        return 2
    return 1 / 3 if module.partition(".")[0] in SELDOM else 1


def turn_for(entry: Entry) -> Turn | None:
    """The chat turn about one docstring, or None where nobody would ask (private names, one-word docstrings)."""
    private = any(part.startswith("_") for part in (*entry.module.split("."), *entry.path))
    if private or len(entry.doc) < 20:
        return None
    telling = entry.module in FAMILIAR or len(entry.path) > 1 or entry.kind == "class"
    short = ".".join(entry.path) if entry.path and telling else entry.name
    return Turn((entry.name, short), entry.kind, heading(entry), shortened(entry.doc), frequency(entry.module))


def docstring_documents() -> list[Document]:
    """Group the docstrings by top-level object; a docstring met before is left out."""
    seen: set[str] = set()
    groups: dict[str, list[Entry]] = {}
    for entry in all_entries():
        key = normalised(entry.doc)
        if len(key) >= 15 and key not in seen:
            seen.add(key)
            name = ".".join((entry.module, *entry.path[:1])) if entry.path else f"module {entry.module}"
            groups.setdefault(name, []).append(entry)
    return [
        Document(name, rendered(entries), [turn for turn in map(turn_for, entries) if turn])
        for name, entries in groups.items()
    ]


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Split a topic at its underlined headings; yield each heading with the text below it."""
    underline = re.compile(r"([*=\-~^])\1{2,}")
    title = ""
    body: list[str] = []
    lines = text.splitlines()
    for position, line in enumerate(lines):
        following = lines[position + 1] if position + 1 < len(lines) else ""
        if line and underline.fullmatch(following) and len(following) >= len(line):
            yield title, "\n".join(body)
            title, body = line, []
        elif body or not underline.fullmatch(line):
            body.append(line)
    yield title, "\n".join(body)


def topic_turn(topic: str, title: str, paragraphs: list[str]) -> Turn:
    """The chat turn about one section, asked for by its heading, with and without the article, or by the topic."""
    plain = re.sub(r'["*]', "", title) or topic
    plain = plain[0].lower() + plain[1:] if '"' in title else plain.lower()
    names = (plain, re.sub(r"^(the|an?) ", "", plain), topic)
    return Turn(names, "topic", title, shortened("\n\n".join(paragraphs)), 3)


def topic_documents() -> list[Document]:
    """One document per section of the help topics.  Topics quote one another, so each paragraph is kept only once."""
    seen: set[str] = set()
    documents = []
    for topic, text in sorted(topics.topics.items(), key=lambda item: len(item[1])):
        for title, body in sections(text):
            fresh = [p for p in re.split(r"\n\s*\n", body) if p.strip() and normalised(p) not in seen]
            seen.update(normalised(p) for p in fresh if len(p) > 60)
            if sum(map(len, fresh)) < 80:
                continue
            underlined = f"{title}\n{'=' * len(title)}\n\n" if title else ""
            content = underlined + "\n\n".join(fresh).strip("\n") + "\n"
            documents.append(Document(f"topic {topic}: {title}", content, [topic_turn(topic, title, fresh)]))
    return documents


def overlap(train: list[Document], held_out: list[Document], words: int = 8) -> float:
    """The share of the held-out runs of `words` words that also occur in the training text."""

    def runs(document: Document) -> list[str]:
        split = normalised(document.text).split()
        return [" ".join(split[i : i + words]) for i in range(len(split) - words + 1)]

    known = {run for document in train for run in runs(document)}
    tested = [run for document in held_out for run in runs(document)]
    return sum(run in known for run in tested) / max(1, len(tested))
