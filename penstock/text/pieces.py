"""What single tokens spell, as the decoder in tokenizer.json has it, and whether that decoder can stream at all.

A decoder streams when the text of a sequence is made of units that do not look at each other:

- byte level: every token is a string of bytes, and the text is all of them read as UTF-8;
- otherwise a unit is one token, or a whole run of byte tokens (`<0x0A>`): a run that is not valid UTF-8 from end to end
  becomes one U+FFFD per token, so its text is known only when it is over.

The start of the text is the exception (decoders drop the space that SentencePiece puts there).
"""

from __future__ import annotations

import itertools
import json
import string
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

_PER_TOKEN = {"Replace", "ByteFallback", "Metaspace", "Strip", "WordPiece"}
_TEXT = "a"  # a piece that every decoder shows as it is, to put something before the piece that is looked at


class Pieces:
    """The vocabulary of one tokenizer, token by token.

    Attributes:
        byte_level: text is the concatenation of `spelled`, read as UTF-8 with U+FFFD for what is not.
        byte_ids: token id -> byte, of the byte tokens that a vocabulary of text pieces falls back to.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises `ConfigError` when the decoder cannot stream."""
        self._backend = backend
        self._decoder = backend.decoder
        steps = _steps(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        kinds = [step["type"] for step in steps]
        self.byte_level = kinds == ["ByteLevel"]
        if not self.byte_level:
            _check_streams(steps)
        self.byte_ids: dict[int, int] = {}
        if "ByteFallback" in kinds:
            for digits in itertools.product(string.hexdigits, repeat=2):
                code = "".join(digits)
                token = backend.token_to_id(f"<0x{code}>")
                if token is not None:
                    self.byte_ids[token] = int(code, 16)
        self._byte_of_char = _byte_level_alphabet()
        self._text_length = len(self.decode([_TEXT]))
        self._spelled: dict[int, bytes] = {}

    def piece(self, token: int) -> str | None:
        """The vocabulary's own string for a token, or None for an id that it does not have."""
        return self._backend.id_to_token(token)

    def spelled(self, token: int) -> bytes:
        """What a token adds in the middle of a text; nothing for an id that the vocabulary does not have."""
        spelled = self._spelled.get(token)
        if spelled is None:
            spelled = self._spelled[token] = self._spell(token)
        return spelled

    def decode(self, pieces: list[str]) -> str:
        """The text of these pieces at the start of a text."""
        return self._decoder.decode(pieces) if self._decoder else " ".join(pieces)

    def decode_within(self, pieces: list[str]) -> str:
        """The text of these pieces, a unit, after other text."""
        return self.decode([_TEXT, *pieces])[self._text_length :]

    def _spell(self, token: int) -> bytes:
        piece = self.piece(token)
        if piece is None:
            return b""
        if token in self.byte_ids:
            return bytes([self.byte_ids[token]])
        if not self.byte_level:
            return self.decode_within([piece]).encode()
        try:
            return bytes(self._byte_of_char[char] for char in piece)
        except KeyError:  # an added token, which is text as it stands
            return piece.encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _check_streams(steps: list[dict[str, Any]]) -> None:
    fused = False
    for step in steps:
        kind = step["type"]
        strips_start = kind == "Strip" and step["stop"] == 0
        if not (kind == "Fuse" or strips_start or (kind in _PER_TOKEN and not fused)):
            place = " after Fuse" if fused else ""
            raise ConfigError(f"decoder: {kind}{place} is not supported, its text cannot be streamed token by token")
        fused = fused or kind == "Fuse"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters are their own bytes; the other bytes are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
