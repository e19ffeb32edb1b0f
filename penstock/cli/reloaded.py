"""What a server reads from files, and again when they change: API keys, and what TLS needs."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.core.errors import ConfigError

log = logging.getLogger("penstock.server")
LOOK = 1.0  # seconds between two looks at the files; what changed is read at the second look that finds it the same
CERT_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Reloaded:
    """Something that is read from files. What cannot be read any longer stays as it was.

    Args:
        what: its name in the log.
        read: raises ConfigError; called at once, and whenever a file has changed.
    """

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], None]) -> None:
        self._what, self._paths, self._read = what, paths, read
        self._seen = _states(paths)
        read()

    async def run(self) -> None:
        latest = self._seen
        while True:
            await asyncio.sleep(LOOK)
            before, latest = latest, _states(self._paths)
            if latest != before or latest == self._seen:  # they are being written, or have not changed
                continue
            self.read_again("as files have changed")

    def read_again(self, why: str) -> None:
        """Whether they have changed or not."""
        self._seen = _states(self._paths)
        try:
            self._read()
            log.info("%s: read again, %s", self._what, why)
        except ConfigError as error:
            log.error("%s: the files cannot be used, what was read before stays: %s", self._what, error)


def _states(paths: Sequence[str]) -> list[object]:
    """What differs when a file does; a link is followed, and may lead elsewhere the next time."""
    states: list[object] = []
    for path in paths:
        try:
            state = os.stat(path)
            states.append((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))
        except OSError:
            states.append(None)
    return states


def read_keys(path: str) -> tuple[str, ...]:
    """At least one key. Raises ConfigError."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        _refuse("api-key-file", path, f"cannot be read ({_reason(error)})")
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        _refuse("api-key-file", path, "has no key, allowed is one in each line")
    return keys


class ServerTLS:
    """The server's side of TLS. Connections keep what they began with; each new one gets what was read last.

    Attributes:
        context: for the server, for as long as it runs.
        paths: what is read.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """
        Args:
            options: ssl_certfile, ssl_keyfile, ssl_ca_certs and ssl_cert_reqs.

        Raises:
            ConfigError: a file cannot be used.
        """
        self._options = options
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        self.paths = [options[name] for name in names if options[name] is not None]
        self.context = self._latest = tls_context(options)
        self.context.sni_callback = self._choose  # called for each handshake, also of clients that name no server

    def read(self) -> None:
        """Raises ConfigError."""
        self._latest = tls_context(self._options)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._latest


def tls_context(options: Mapping[str, Any]) -> ssl.SSLContext:
    """What `ServerTLS` is made of. Raises ConfigError."""
    certificate, key, authorities = (options[name] for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (OSError, ConfigError) as error:  # ssl.SSLError is an OSError
        with_key = "" if key is None else f" with the key {key}"
        _refuse("ssl-certfile", certificate + with_key, f"cannot be used ({_reason(error)})")
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            _refuse("ssl-ca-certs", authorities, f"cannot be used ({_reason(error)})")
    context.verify_mode = CERT_REQS[options["ssl_cert_reqs"]]
    return context


def check_files(options: Mapping[str, Any]) -> None:
    """Raise ConfigError where the settings of TLS do not fit each other, or a file that a server reads cannot be used.

    Args:
        options: of the server, by their keys.
    """
    if options["api_key_file"] is not None:
        read_keys(options["api_key_file"])
    if options["ssl_certfile"] is not None:
        if options["ssl_cert_reqs"] != "none" and options["ssl_ca_certs"] is None:
            why = "allowed without ssl-ca-certs is none: nobody's certificate would do"
            raise ConfigError(f"ssl-cert-reqs: {options['ssl_cert_reqs']}, {why}", "ssl-cert-reqs")
        tls_context(options)
        return
    for name in ("ssl-keyfile", "ssl-ca-certs"):
        if (given := options[name.replace("-", "_")]) is not None:
            raise ConfigError(f"{name}: {given}, allowed only with ssl-certfile", name)


def _no_passphrase() -> NoReturn:
    raise ConfigError("the key has a passphrase, allowed is one without")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return getattr(error, "strerror", None) or (
        "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
    )


def _refuse(name: str, path: str, why: str) -> NoReturn:
    raise ConfigError(f"{name}: {path} {why}", name)
