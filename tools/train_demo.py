#!/usr/bin/env python3
"""Train the bundled demo model from the English text that ships with CPython.

The model is a very small Qwen3 with its own tokenizer.  It exists so that a machine without a network has
something to serve whose answers are recognisably about Python.  Everything it reads comes from the running
interpreter: the ``help()`` topics and the docstrings of the standard library, pure Python and C alike.

    python tools/train_demo.py --out penstock/demo --minutes 40
    python tools/train_demo.py --evaluate penstock/demo
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import math
import os
import platform
import random
import re
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from pydoc_data import topics
from types import ModuleType
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 4096
WINDOW = 512  # tokens per training sequence and per evaluation window
STRIDE = 256  # tokens between the starts of two evaluation windows
HELD_OUT_PER_MILLE = 30
MAX_ANSWER_CHARS = 900  # about 280 tokens
MAX_MODEL_BYTES = 8_000_000
IGNORED = -100  # the label cross_entropy skips

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 4,
    "bos_token_id": None,
    "eos_token_id": SPECIALS.index(TURN_END),
    "pad_token_id": SPECIALS.index(END_OF_TEXT),
    "torch_dtype": "bfloat16",
}

GENERATION_CONFIG: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "eos_token_id": [SPECIALS.index(TURN_END), SPECIALS.index(END_OF_TEXT)],
    "pad_token_id": SPECIALS.index(END_OF_TEXT),
}

# Content may be a string or a list of typed parts; parts that are not text say nothing to a text model.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] or [] %}
            {%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Words with their leading space or punctuation, single digits, runs of punctuation, line ends, spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

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

# The first wording of each kind is used for two turns in five, the others for the rest.
WORDINGS = {
    "function": (
        "What does {} do?", "What does {}() do?", "what does {} do", "What does {} do in Python?", "What is {}?",
        "Explain {}", "Explain {}.", "How does {} work?", "How do I use {}?", "Describe {}.", "Tell me about {}.",
        "What is {} for?", "help({})", "{}",
    ),
    "class": (
        "What is {}?", "What does {} do?", "What is the {} class?", "What is {} in Python?", "What is {} for?",
        "Explain {}", "Explain {}.", "How do I use {}?", "Describe {}.", "Tell me about {}.", "help({})", "{}",
    ),
    "module": (
        "What does the {} module do?", "What is the {} module?", "What does {} do?", "What is {}?", "import {}",
        "What is {} for?", "Explain {}", "Explain the {} module.", "Tell me about {}.", "How do I use {}?",
        "help({})", "{}",
    ),
    "topic": (
        "What is {}?", "Explain {}.", "Explain {}", "What are {}?", "How does {} work?", "How do {} work in Python?",
        "Tell me about {}.", "Describe {}.", "help {}", "{}",
    ),
}  # fmt: skip
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a helpful assistant that knows Python.", "Answer briefly.")


# ---- the text ---------------------------------------------------------------------------------------------------


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


# ---- the tokenizer and the training sequences -------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE with the normalisation and pre-tokenisation of the Qwen family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True)
class Piece:
    """Token ids of at most one window, and as many labels; IGNORED where the token is not to be learnt."""

    ids: list[int]
    labels: list[int]


@dataclass
class Corpus:
    """The training documents with their plain form in tokens, from which every epoch is made anew."""

    documents: list[Document]
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        texts = [document.text + END_OF_TEXT for document in self.documents]
        self.plain = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        self.turns = [turn for document in self.documents for turn in document.turns]

    def epoch(self, rng: random.Random) -> list[Piece]:
        """Every document once and every turn at its frequency, in random order, with new wordings and new cuts."""
        pieces = [piece for ids in self.plain for piece in cut(ids, rng)]
        turns = [turn for turn in self.turns for _ in range(math.floor(turn.frequency + rng.random()))]
        rng.shuffle(turns)
        while turns:
            size = 2 if rng.random() < 0.1 else 1
            pieces.append(self.chat(turns[-size:], rng))
            del turns[-size:]
        rng.shuffle(pieces)
        return pieces

    def chat(self, turns: list[Turn], rng: random.Random) -> Piece:
        """One conversation of ChatML; only the answers are learnt."""
        system = f"{TURN_START}system\n{rng.choice(SYSTEM_PROMPTS)}{TURN_END}\n" if rng.random() < 0.15 else ""
        ids: list[int] = []
        labels: list[int] = []
        for turn in turns:
            prompt = f"{system}{TURN_START}user\n{question(turn, rng)}{TURN_END}\n{TURN_START}assistant\n"
            asked = self.tokenizer.encode(prompt).ids
            answered = self.tokenizer.encode(f"{turn.answer}{TURN_END}\n").ids
            ids += asked + answered
            labels += [IGNORED] * len(asked) + answered
            system = ""
        return Piece(ids[:WINDOW], labels[:WINDOW])


def question(turn: Turn, rng: random.Random) -> str:
    """One way of asking for a turn's answer."""
    subject = turn.subjects[0] if rng.random() < 0.6 else rng.choice(turn.subjects)
    wordings = WORDINGS[turn.kind]
    wording = wordings[0] if rng.random() < 0.4 else rng.choice(wordings[1:])
    return wording.format(subject)


def cut(ids: list[int], rng: random.Random) -> Iterator[Piece]:
    """Cut a document into windows; a long one at other places in every epoch."""
    end = len(ids) if len(ids) <= WINDOW else rng.randint(WINDOW // 4, WINDOW)
    start = 0
    while start < len(ids):
        part = ids[start:end]
        # What a continuation begins with cannot be told from whatever stands before it in the window.
        yield Piece(part, part if start == 0 else [IGNORED, *part[1:]])
        start, end = end, end + WINDOW


def packed(pieces: Iterable[Piece], open_windows: int = 32) -> Iterator[Piece]:
    """Pack whole pieces into windows (best fit), so that conversations start in sight, as they do when serving."""
    windows: list[Piece] = []
    for piece in pieces:
        fitting = [window for window in windows if len(window.ids) + len(piece.ids) <= WINDOW]
        if fitting:
            window = max(fitting, key=lambda candidate: len(candidate.ids))
            window.ids.extend(piece.ids)
            window.labels.extend(piece.labels)
            continue
        windows.append(Piece(list(piece.ids), list(piece.labels)))
        if len(windows) > open_windows:
            fullest = max(range(len(windows)), key=lambda i: len(windows[i].ids))
            yield windows.pop(fullest)
    yield from windows


def batches(corpus: Corpus, size: int, seed: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield epoch number, ids [size, WINDOW] and labels [size, WINDOW] without end; both int64, labels not shifted."""
    for epoch in count():
        rng = random.Random(f"{seed}/{epoch}")
        windows = list(packed(corpus.epoch(rng)))
        rng.shuffle(windows)
        for start in range(0, len(windows) - size + 1, size):
            ids = torch.full((size, WINDOW), SPECIALS.index(END_OF_TEXT))
            labels = torch.full((size, WINDOW), IGNORED)
            for row, window in enumerate(windows[start : start + size]):
                ids[row, : len(window.ids)] = torch.tensor(window.ids)
                labels[row, : len(window.labels)] = torch.tensor(window.labels)
            yield epoch, ids, labels


# ---- evaluation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """How well the held-out text is predicted."""

    nats: float  # summed over all scored tokens
    tokens: int
    text_bytes: int  # UTF-8, end-of-text markers not counted

    @property
    def perplexity(self) -> float:
        """Per token, so comparable only between models with the same tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes


@torch.inference_mode()
def score(model: Qwen3ForCausalLM, ids: list[int], text: str) -> Score:
    """Score ids[1:], each token once: in windows of WINDOW tokens that start STRIDE apart.

    A window scores only the tokens that no earlier one did, so that all but those of the first window are predicted
    from at least WINDOW - STRIDE tokens (less one) before them.
    """
    nats, scored = 0.0, 1  # ids[0] has nothing before it
    for start in range(0, len(ids), STRIDE):
        window = torch.tensor([ids[start : start + WINDOW]])
        logits = model(input_ids=window, use_cache=False).logits[0, scored - start - 1 : -1].float()
        nats += torch.nn.functional.cross_entropy(logits, window[0, scored - start :], reduction="sum").item()
        scored = start + window.shape[1]
        if scored == len(ids):
            break
    text_bytes = len(text.replace(END_OF_TEXT, "").encode())
    return Score(nats, len(ids) - 1, text_bytes)


def evaluate(folder: Path) -> Score:
    """Score a saved model, its weights converted to fp32, on the held-out text that lies beside it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(END_OF_TEXT + text, add_special_tokens=False)["input_ids"]
    return score(model, ids, text)


# ---- training ---------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Any) -> None:
    """Let `write` make a file beside `path`, then put it in place, so that no reader sees half of one."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 with Unix line ends on every system; the held-out text's bytes count."""
    write_atomically(path, lambda partial: partial.write_bytes(text.encode()))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as people read it."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def save_fixed_files(folder: Path, tokenizer: Tokenizer, held_out: str) -> None:
    """Write everything that does not change while training."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False) + "\n")
    write_text(folder / "heldout.txt", held_out)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def save_weights(folder: Path, model: Qwen3ForCausalLM) -> None:
    """Write the weights as bf16, without the output matrix, which is the embedding."""
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    write_atomically(folder / "model.safetensors", lambda partial: save_file(weights, partial, {"format": "pt"}))
    size = (folder / "model.safetensors").stat().st_size
    if size > MAX_MODEL_BYTES:
        raise SystemExit(f"model.safetensors has {size} bytes; a bundled model may have {MAX_MODEL_BYTES}")


def new_model(seed: int) -> Qwen3ForCausalLM:
    """An untrained model of the fixed geometry in fp32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**CONFIG, "torch_dtype": "float32"}))


def new_optimizer(model: Qwen3ForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that leaves the norms' gains undecayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def learning_rate(peak: float, step: int, done: float, warmup: int = 100) -> float:
    """Linear warm-up over steps, then a cosine over the share `done` of the run, down to 2 % of the peak."""
    return peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass
class Run:
    """What the model card tells about a training run."""

    score: Score  # of the weights kept
    kept_step: int = 0
    steps: int = 0
    epochs: int = 0  # the last one perhaps cut short
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """One training run: keeps the weights that predict the held-out text best in `options.out`."""

    def __init__(self, corpus: Corpus, held_out: str, options: argparse.Namespace) -> None:
        self.corpus = corpus
        self.held_out = held_out
        self.held_out_ids = corpus.tokenizer.encode(END_OF_TEXT + held_out).ids
        self.options = options
        self.model = new_model(options.seed)
        self.loss = torch.compile(self.plain_loss) if options.compile else self.plain_loss
        self.optimizer = new_optimizer(self.model, options.weight_decay)
        self.run = Run(Score(math.inf, 1, 1))
        self.started = time.monotonic()

    def done(self) -> float:
        """The share of the run that lies behind, by steps if they are given and else by the clock."""
        if self.options.steps:
            return self.run.steps / float(self.options.steps)
        return self.run.seconds / float(60 * self.options.minutes)

    def plain_loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch in nats per learnt token; ids and labels are [batch, WINDOW]."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.options.precision == "bf16"):
            logits = self.model(input_ids=ids, use_cache=False).logits
        # Shifting the small labels spares a copy of the large logits.
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """One optimiser step on a batch; returns its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options.lr, self.run.steps, self.done())
        loss = self.loss(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.run.steps += 1
        self.run.tokens += ids.numel()
        self.run.seconds = time.monotonic() - self.started
        return loss.item()

    def keep_if_better(self) -> Score:
        """Score the held-out text and save the weights if no earlier ones did better."""
        self.model.eval()
        now = score(self.model, self.held_out_ids, self.held_out)
        self.model.train()
        if now.nats < self.run.score.nats:
            self.run.score, self.run.kept_step = now, self.run.steps
            save_weights(self.options.out, self.model)
        return now

    def train(self) -> Run:
        """Train until the steps or the minutes are used up."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        smooth, next_score = math.log(VOCAB_SIZE), self.options.score_every
        with Progress(*columns) as progress:
            bar = progress.add_task("training", total=1.0)
            for epoch, ids, labels in batches(self.corpus, self.options.batch, self.options.seed):
                smooth += 0.02 * (self.step(ids, labels) - smooth)
                self.run.epochs = epoch + 1
                speed = self.run.tokens / self.run.seconds
                text = f"epoch {epoch} step {self.run.steps} loss {smooth:.3f} {speed:,.0f} tokens/s"
                progress.update(bar, completed=min(1.0, self.done()), description=text)
                if self.done() >= 1 or self.run.seconds >= next_score:
                    now = self.keep_if_better()
                    progress.console.print(
                        f"{self.run.seconds:6.0f} s  {text}  held-out perplexity {now.perplexity:.2f}, "
                        f"{now.bits_per_byte:.3f} bits per byte",
                        soft_wrap=True,
                    )
                    next_score = time.monotonic() - self.started + self.options.score_every
                if self.done() >= 1:
                    return self.run
        raise AssertionError("batches() does not end")


# ---- the model card ---------------------------------------------------------------------------------------------

SAMPLE_QUESTIONS = ("What does os.path.join do?", "What is json?", "Explain the assert statement")
SAMPLE_TEXT = "import os"


@torch.inference_mode()
def continuation(folder: Path, prompts: list[str], seed: int = 0) -> list[str]:
    """Continue each prompt by up to 120 tokens with the sampling defaults of the saved model; the first draw counts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        torch.manual_seed(seed)
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**encoded, max_new_tokens=120)[0, encoded["input_ids"].shape[1] :]
        texts.append(str(tokenizer.decode(output, skip_special_tokens=True)))
    return texts


def samples(folder: Path) -> str:
    """The card's samples as Markdown."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in SAMPLE_QUESTIONS
    ]
    *answers, text = continuation(folder, [*map(str, chats), SAMPLE_TEXT])
    shown = [(f"Chat, “{q}”", answer.strip()) for q, answer in zip(SAMPLE_QUESTIONS, answers, strict=True)]
    shown.append((f"Plain text that begins with `{SAMPLE_TEXT}`", SAMPLE_TEXT + text.rstrip()))
    return "\n\n".join(f"{title}:\n\n```text\n{content}\n```" for title, content in shown)


CARD = """---
license: psf-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# penstock demo model

A very small causal language model in the Qwen3 architecture, {parameters:,} parameters ({megabytes:.1f} MB in bf16).
It is bundled so that a fresh machine without a network has something to serve, and so that tests have real weights
with a real tokenizer. Asked about Python's standard library, it answers something recognisable. It is not useful for
anything else.

## Text

Only English text that ships with CPython {python} itself, read by the training script from the running interpreter:
the `help()` topics (`pydoc_data.topics`), and the docstrings of the standard library, of its Python sources as well as
of its modules written in C. Tests and installed packages are left out; repeated docstrings and paragraphs are kept
once. That is {documents:,} documents with {text_bytes:,} bytes. In every epoch each one that is not held out is learnt
as plain text (an import, the signatures, the docstrings, `<|endoftext|>`), and each public name also as chat turns,
with one of several wordings of the question and an answer that is the signature and at most {answer} characters of the
docstring: once per epoch, but six times for the modules asked about most (`os`, `json`, the built-ins and some more),
and seldom for those hardly asked about (`tkinter`, `idlelib`). Of the library's code, only the signatures and the
examples inside docstrings are used.

The text is Copyright © 2001 Python Software Foundation, All Rights Reserved, and is used under the
[PSF License Agreement, version 2](https://docs.python.org/3/license.html). The model reproduces parts of it verbatim,
so the weights, the tokenizer and `heldout.txt` are distributed under the same licence.

## Held-out perplexity

| | |
|---|---|
| perplexity per token | **{perplexity:.3f}** |
| bits per byte | **{bits:.4f}** |
| scored tokens | {scored:,} |
| bytes of text | {held_bytes:,} |

`heldout.txt` holds {held_documents} whole documents, about 3 %, chosen by a hash of their names; neither the model nor
the tokenizer was trained on them, nor on chat turns made from them. Documentation repeats itself: {overlap:.1%} of the
held-out runs of eight words also occur in the training text. The checkpoint with the lowest held-out loss was kept,
so the number is slightly optimistic.

Defined exactly: the text is `<|endoftext|>` followed by the file's content, in which every document ends with
`<|endoftext|>`; it is tokenised as a whole, the markers as the special token, nothing else added. Windows of {window}
tokens start every {stride} tokens, the last one cut short at the end. Each token but the first is scored once, in the
first window that holds it, by its negative log-likelihood given the tokens before it in that window. Perplexity is the
exponential of the mean over the scored tokens, markers included. Bits per byte is the sum in bits over the UTF-8 bytes
of the text without the markers. The weights are the bf16 ones of this folder, computed with in fp32. To recompute it,
on any Python version:

    python tools/train_demo.py --evaluate penstock/demo

## Training

{steps:,} steps of {batch} packed windows of {window} tokens ({seen:.1f} million positions, {epochs} epochs), AdamW
(betas 0.9 and 0.95, weight decay {decay}), peak learning rate {lr}, 100 steps of warm-up, cosine decay, gradient norm
clipped at 1, {precision} autocast, no dropout, seed {seed}. In conversations only the answers are learnt. Of the
checkpoints, scored every {every:.0f} seconds and at the end, the one after step {kept:,} was kept. It took
{minutes:.0f} minutes on {threads} CPU threads of a machine that had other work. To reproduce it:

    python tools/train_demo.py --out penstock/demo --steps {steps} --seed {seed}{compiled}

Another Python version brings another text, and with it another tokenizer and another `heldout.txt`. Even with the
same one, weights and numbers agree only nearly, because sums are taken in another order on another machine.

## Samples

First draws with the defaults of `generation_config.json` (temperature {temperature}, top-p {top_p}), seed 0, at most
120 tokens, not selected:

{samples}

## Limits

It is tiny and has seen three megabytes of text. It knows no facts beyond docstrings, mixes them up freely, invents
functions and parameters, cannot reason, follow instructions, hold a conversation or write programs, and understands
only English. The longest text it was trained on has {window} tokens; the configuration admits more, the quality does
not. Do not rely on anything it says; ask `help()` instead.
"""


def write_card(folder: Path, train: list[Document], held_out: list[Document], run: Run, o: argparse.Namespace) -> Score:
    """Write README.md with the numbers of this run; returns the score of what was saved."""
    final = evaluate(folder)
    parameters = sum(parameter.numel() for parameter in new_model(0).parameters())
    card = CARD.format(
        parameters=parameters, megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        python=platform.python_version(), documents=len(train) + len(held_out), answer=MAX_ANSWER_CHARS,
        text_bytes=sum(len(document.text.encode()) for document in train + held_out),
        perplexity=final.perplexity, bits=final.bits_per_byte, scored=final.tokens, held_bytes=final.text_bytes,
        held_documents=len(held_out), overlap=overlap(train, held_out), window=WINDOW, stride=STRIDE,
        steps=run.steps, kept=run.kept_step, every=o.score_every, batch=o.batch, seen=run.tokens / 1e6,
        epochs=run.epochs, decay=o.weight_decay, lr=o.lr, precision=o.precision, seed=o.seed,
        minutes=run.seconds / 60, threads=torch.get_num_threads(), compiled=" --compile" if o.compile else "",
        temperature=GENERATION_CONFIG["temperature"], top_p=GENERATION_CONFIG["top_p"], samples=samples(folder),
    )  # fmt: skip
    write_text(folder / "README.md", card)
    return final


# ---- the command ------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("penstock/demo"), help="where the model is written")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only recompute DIR's held-out perplexity")
    parser.add_argument("--minutes", type=float, default=40.0, help="how long to train, by the clock (default 40)")
    parser.add_argument("--steps", type=int, help="train for this many steps instead of by the clock")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights, order and wordings (default 0)")
    parser.add_argument("--batch", type=int, default=8, help=f"windows of {WINDOW} tokens per step (default 8)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 0.003)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the matrices (default 0.1)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the matrix products")
    parser.add_argument("--compile", action="store_true", help="use torch.compile; faster, needs a C++ compiler")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--score-every", type=float, default=90.0, help="seconds between checkpoints (default 90)")
    return parser.parse_args()


def report(result: Score) -> None:
    """Print a score."""
    print(f"perplexity {result.perplexity:.3f} per token over {result.tokens} tokens")
    print(f"bits per byte {result.bits_per_byte:.4f} over {result.text_bytes} bytes")


def main() -> None:
    """Train, or evaluate what was trained."""
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        report(evaluate(options.evaluate))
        return
    documents = docstring_documents() + topic_documents()
    train = [document for document in documents if not document.held_out]
    held_out = [document for document in documents if document.held_out]
    held_out_text = "".join(document.text + END_OF_TEXT for document in held_out)
    answers = (turn.text for document in train for turn in document.turns)
    tokenizer = train_tokenizer([*(document.text for document in train), *answers])
    save_fixed_files(options.out, tokenizer, held_out_text)
    corpus = Corpus(train, tokenizer)
    tokens = sum(map(len, corpus.plain))
    print(f"{len(train)} documents, {tokens} tokens, {len(corpus.turns)} chat turns; {len(held_out)} held out")
    run = Trainer(corpus, held_out_text, options).train()
    report(write_card(options.out, train, held_out, run, options))


if __name__ == "__main__":
    main()
