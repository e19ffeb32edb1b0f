"""Addresses of transports: "unix:/path" and "tcp:host:port", with an IPv6 address in brackets."""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.host_port import split_host_port

# of accept: the connection still waits, and would be announced again at once
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BACKLOG = 128
_UNSPECIFIED = ("", "*", "0.0.0.0", "[::]")
# a peer that disappeared silently (its host failed) is noticed after about 20 s
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 30_000


def parse(address: str) -> tuple[socket.AddressFamily, Any]:
    """Family and address as the socket module wants them. ConfigError when it has neither form."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        if len(os.fsencode(rest)) > 107:
            raise ConfigError(f"address: {address}, a Unix socket's path has at most 107 bytes", "address")
        return socket.AF_UNIX, rest
    if kind == "tcp" and rest.rpartition(":")[0] in _UNSPECIFIED:
        raise ConfigError(f"address: {address!r}, name the host as its peers reach it", "address")
    try:
        if kind != "tcp":
            raise ValueError(kind)
        host, port = split_host_port(rest)
    except ValueError:
        raise ConfigError(f"address: {address!r}, allowed: unix:/path or tcp:host:port", "address") from None
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"address: {address!r}, {error.strerror}", "address") from error
    return family, where


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and its address with port 0 resolved. ConfigError when the address cannot be had."""
    family, where = parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_UNIX:
            remove_stale(where)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"address: {address}, cannot listen there: {error.strerror}", "address") from error
    if family != socket.AF_UNIX:
        address = f"{address.rpartition(':')[0]}:{sock.getsockname()[1]}"
    return sock, address


def dial(address: str) -> socket.socket:
    """A socket whose connecting has begun; it is writable when that has ended. OSError when it failed at once."""
    family, where = parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    tune(sock)
    failed = sock.connect_ex(where)
    if failed not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(failed, os.strerror(failed))
    return sock


def tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def socket_file(address: str) -> tuple[str, int] | None:
    """Path and inode of a Unix address's file; None for others."""
    family, where = parse(address)
    return (where, os.stat(where).st_ino) if family == socket.AF_UNIX else None


def remove_socket_file(file: tuple[str, int] | None) -> None:
    """Unlink it, unless a later incarnation has put its own there."""
    if file is None:
        return
    path, inode = file
    try:
        if os.stat(path).st_ino == inode:
            os.unlink(path)
    except FileNotFoundError:
        pass


def remove_stale(path: str) -> None:
    """Unlink the socket file of a killed process; one with a listener stays, and bind fails."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)
    except FileNotFoundError:
        pass
