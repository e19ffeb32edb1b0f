"""Documents and questions to the token windows that a step learns from."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tools.demo.text import END_OF_TEXT, SPECIALS, TURN_END, TURN_START, Document, Turn

VOCAB_SIZE = 4096
WINDOW = 512  # tokens per training sequence and per evaluation window
IGNORED = -100  # the label cross_entropy skips

# Words with their leading space or punctuation, single digits, runs of punctuation, line ends, spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

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
        # The first token of a continuation cannot be predicted: what precedes it in the window is another piece.
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
