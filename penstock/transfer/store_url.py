"""The URL of a store: a place, and options as a query."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.core.errors import ConfigError

T = TypeVar("T")
OPTION = "remote-cache"


class StoreURL:
    """
    Attributes:
        scheme: lower case.
        host: "HOST:PORT", or what else is between the slashes.
        path: from the next slash on.

    Raises:
        ConfigError: the text is no URL.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            parts = urlsplit(text)
            options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise self.wrong(f"a URL ({error})") from None
        if parts.fragment:
            raise self.wrong("a URL without #")
        self.scheme, self.host, self.path = parts.scheme, parts.netloc, unquote(parts.path)
        self._options = dict(options)
        if len(self._options) < len(options):
            raise self.wrong("each option once")
        self._known: list[str] = []

    def option(self, name: str, convert: Callable[[str], T], default: T) -> T:
        """The value of an option. Raises ConfigError when `convert` refuses it by a ValueError with what is allowed."""
        self._known.append(name)
        if name not in self._options:
            return default
        try:
            return convert(self._options[name])
        except ValueError as error:
            raise ConfigError(f"{OPTION}: {name}={self._options[name]}, allowed: {error}", OPTION) from None

    def finish(self) -> None:
        """Raise ConfigError for an option that nobody asked for."""
        for name in self._options:
            if name not in self._known:
                allowed = ", ".join(sorted(self._known))
                raise ConfigError(f"{OPTION}: {self.scheme} has no option {name!r}, allowed: {allowed}", OPTION)

    def wrong(self, allowed: str) -> ConfigError:
        return ConfigError(f"{OPTION}: {self._text!r}, allowed: {allowed}", OPTION)
