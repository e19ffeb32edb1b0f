"""A checkpoint's tokenizer: text to token ids, token ids to text, conversations to token ids."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, InvalidRequest, PromptTooLong
from penstock.text import files
from penstock.text.bounds import TokenBounds
from penstock.text.chat import ChatTemplate, Message

if TYPE_CHECKING:
    import tokenizers

_PER_TOKEN = {"Replace", "ByteFallback", "Metaspace", "Strip", "WordPiece"}
_TEXT = "a"  # a piece that every decoder shows as it is, to put something before the piece that is looked at


class Tokenizer:
    """Equivalent to Hugging Face's `AutoTokenizer` for the same directory. Immutable; safe to use from several threads.

    tokenizer.json's post-processor decides whether a BOS token is added; `add_bos_token` in tokenizer_config.json is
    not used (as in transformers 5).

    Args:
        directory: the checkpoint, with tokenizer.json and usually tokenizer_config.json.
        chat_template: Jinja text, or the path of a file that holds it, instead of the checkpoint's own.

    Attributes:
        vocab_size: one more than the highest token id. The model may have more rows than that.
        special_ids: tokens that are no text.
        eos_id: the end-of-sequence token that tokenizer_config.json names, or None; pad_id: the one of padding.
        vocabulary: what single tokens spell.
        bounds: how many tokens texts have at least.
        info: tokenizer_config.json, with the chat template that is used.

    Raises:
        ConfigError: a file is missing or broken, and which.
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        directory = Path(directory)
        config = files.read_config(directory)
        self._backend = files.load_backend(directory, config)
        try:
            self.vocabulary = Vocabulary(self._backend)
        except ConfigError as error:
            raise ConfigError(f"{directory / 'tokenizer.json'}: {error}") from error
        self.bounds = TokenBounds(self._backend)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        named = {key: name for key in files.NAMED_TOKENS if (name := files.token_name(config.get(key)))}
        self.eos_id, self.pad_id = (
            self._backend.token_to_id(named[name]) if name in named else None for name in ("eos_token", "pad_token")
        )
        if chat_template is None:
            sources = files.read_templates(directory, config)
        else:
            sources = files.read_given_template(chat_template)
        self.info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        if "default" in sources:
            self.info["chat_template"] = sources["default"][0]
        self._templates = {name: ChatTemplate(text, origin, named) for name, (text, origin) in sources.items()}

    def encode(self, text: str, add_special_tokens: bool = True, max_model_len: int | None = None) -> list[int]:
        """Token ids.

        Args:
            max_model_len: refuse, early and without all of its tokens, what certainly has as many tokens or more.
                None tokenises everything.

        Raises:
            InvalidRequest: text that is not Unicode (a lone surrogate).
            PromptTooLong: see `max_model_len`. Texts that have just as many may be tokenised all the same.
        """
        return self._encode(text, add_special_tokens, "prompt", max_model_len)

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell a request's `bad_words`: each word as it begins a text, and as it follows a
        space; none empty, none twice. Raises `InvalidRequest` as `encode` does."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self._encode(text, False, "bad_words"))] = None
        found.pop((), None)
        return tuple(found)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text. Ids outside the vocabulary add nothing; ones that are no ids at all raise `InvalidRequest`."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("tokens: each must be a token id, a whole number of at least 0", "tokens") from error

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary has for just this string, if any."""
        return self._backend.token_to_id(text)

    @property
    def template_text(self) -> str:
        """The chat templates, all of them, one after another."""
        return "\n".join(template.source for template in self._templates.values())

    def token_bytes(self, token: int) -> bytes:
        """What a token adds in the middle of a text; see `Vocabulary.token_bytes`."""
        return self.vocabulary.token_bytes(token)

    def token_piece(self, token: int) -> str:
        """As the vocabulary spells it, which may be no text; "" for an id that it does not have."""
        return self.vocabulary.piece(token) or ""

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is not a whole character."""
        return self.vocabulary.token_bytes(token).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, special tokens included. See `ChatTemplate.render`.

        Raises `InvalidRequest` also when the model has no chat template.
        """
        template = (tools and self._templates.get("tool_use")) or self._templates.get("default")
        if template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; start the server with --chat-template, or use completions",
                "messages",
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs or {},
        )

    def encode_chat(
        self,
        messages: list[Message],
        *,
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation: those of `render_chat`'s text.

        Args:
            add_special_tokens: put those around it that a text gets; templates have their own.
            max_model_len: see `encode`.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self._encode(text, add_special_tokens, "messages", max_model_len)

    def _encode(self, text: str, add_special_tokens: bool, field: str, max_model_len: int | None = None) -> list[int]:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            problem = f"{field}: not valid Unicode, {code} stands alone at character {error.start}"
            raise InvalidRequest(problem, field) from error
        if max_model_len is not None and size >= max_model_len and self.bounds.exceeded_by(text, max_model_len - 1):
            raise PromptTooLong.more_than(max_model_len)
        # unlike `encode` it lets other threads run meanwhile, and spends no time on offsets
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids


class Vocabulary:
    """What single tokens spell, as the decoder in tokenizer.json has it.

    Only decoders that can stream are supported: those where the text of a sequence is made of units that are decoded
    independently of each other. With a byte-level decoder every token is a string of bytes, and the text is all of them
    read as UTF-8. With others a unit is one token, or a whole run of byte tokens (`<0x0A>`): a run that is not valid
    UTF-8 from end to end becomes one U+FFFD per token, so its text is known only when the run has ended. The start of
    the text is the exception (decoders drop the space that SentencePiece puts there).

    Attributes:
        byte_level: whether the decoder is the byte-level one.
        byte_ids: token id -> byte, of the byte tokens that a vocabulary of text pieces falls back to.
        known_bytes: token id -> `token_bytes`, of the tokens that were asked for before.
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
        self.known_bytes: dict[int, bytes] = {}

    def piece(self, token: int) -> str | None:
        """The vocabulary's own string for a token, or None for an id that it does not have."""
        return self._backend.id_to_token(token)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds in the middle of a text, special or not; nothing for an id outside the vocabulary."""
        data = self.known_bytes.get(token)
        if data is None:
            data = self.known_bytes[token] = self._spell(token)
        return data

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
