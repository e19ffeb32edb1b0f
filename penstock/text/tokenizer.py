"""A checkpoint's tokenizer: text to tokens, tokens to text, conversations to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.text import files
from penstock.text.chat import ChatTemplate, Message
from penstock.text.pieces import Pieces


class Tokenizer:
    """What Hugging Face's `AutoTokenizer` makes of the same directory. Unchanging, safe to use from several threads.

    Whether a BOS token comes first is what tokenizer.json's post-processor says; `add_bos_token` in
    tokenizer_config.json has no say beside it (as in transformers 5).

    Args:
        directory: the checkpoint, with tokenizer.json and usually tokenizer_config.json.
        chat_template: Jinja text, or the path of a file that holds it, instead of the checkpoint's own.

    Attributes:
        vocab_size: one more than the highest token id. The model may have more rows than that.
        special_ids: tokens that are no text.
        eos_id: the end-of-sequence token that tokenizer_config.json names, or None.
        pieces: the vocabulary, token by token.

    Raises:
        ConfigError: a file is missing or broken, and which.
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        directory = Path(directory)
        config = files.read_config(directory)
        self._backend = files.load_backend(directory, config)
        try:
            self.pieces = Pieces(self._backend)
        except ConfigError as error:
            raise ConfigError(f"{directory / 'tokenizer.json'}: {error}") from error
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        named = {key: name for key in files.NAMED_TOKENS if (name := files.token_name(config.get(key)))}
        self.eos_id: int | None = self._backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        if chat_template is None:
            sources = files.read_templates(directory, config)
        else:
            sources = files.read_given_template(chat_template)
        self._templates = {name: ChatTemplate(text, origin, named) for name, (text, origin) in sources.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises `InvalidRequest` for text that is not Unicode (a lone surrogate)."""
        return self._encode(text, add_special_tokens, "prompt")

    def encode_word(self, text: str) -> list[int]:
        """Token ids of one of a request's `bad_words`. Raises `InvalidRequest` as `encode` does."""
        return self._encode(text, False, "bad_words")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text. Ids outside the vocabulary add nothing; ones that are no ids at all raise `InvalidRequest`."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest("tokens: each must be a token id, a whole number of at least 0", "tokens") from error

    def token_bytes(self, token: int) -> bytes:
        """What a token adds in the middle of a text, special or not; nothing for an id outside the vocabulary."""
        return self.pieces.spelled(token)

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is not a whole character."""
        return self.pieces.spelled(token).decode("utf-8", "replace")

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

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
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation: those of `render_chat`'s text, with no special tokens put around it."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self._encode(text, False, "messages")

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            problem = f"{field}: not valid Unicode, {code} stands alone at character {error.start}"
            raise InvalidRequest(problem, field) from error
        # unlike `encode` it lets other threads run meanwhile, and spends no time on offsets
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids
