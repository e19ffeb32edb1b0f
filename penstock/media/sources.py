"""Where images and videos come from: a data: URL, or a host that the operator allows.

A request must not reach what its sender cannot (server-side request forgery): nothing is fetched from a private
address, whatever a name resolves to, and redirects are not followed.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from urllib.parse import unquote_to_bytes, urlsplit

from penstock.media.limits import MediaLimits
from penstock.media.processor import Refused

SCHEMES = {"http": 80, "https": 443}
PIECE = 1 << 16
ALLOWED = "allowed are data: URLs"


def read_data(url: str, limits: MediaLimits) -> bytes:
    """What a data: URL holds. Raises Refused."""
    head, comma, body = url[len("data:") :].partition(",")
    if not comma:
        raise Refused("is a data: URL without a comma, data:TYPE;base64,... is allowed")
    if not head.lower().endswith(";base64"):
        if len(body) > 3 * limits.bytes:
            raise _too_long(limits)
        data = unquote_to_bytes(body)
    else:
        if len(body) > 4 * (limits.bytes // 3 + 1) + PIECE:
            raise _too_long(limits)
        try:
            data = base64.b64decode("".join(body.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise Refused(f"is not valid base64 ({error})") from None
    if len(data) > limits.bytes:
        raise _too_long(limits)
    return data


def check_url(url: str, limits: MediaLimits) -> tuple[str, str, int, str]:
    """Scheme, host, port and the rest of a URL that may be fetched. Raises Refused."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Refused(f"is not a URL ({error})") from None
    if parts.scheme not in SCHEMES:
        raise Refused(f"has the scheme {parts.scheme[:20]!r}, {ALLOWED}, and http and https of allowed hosts")
    if not limits.domains:
        raise Refused(f"is to be fetched, {ALLOWED} here; --allowed-media-domains allows hosts")
    host = (parts.hostname or "").rstrip(".")
    if parts.username is not None or parts.password is not None:
        raise Refused("has a user name in it, which is not allowed")
    if host not in limits.domains:
        raise Refused(f"is at the host {host[:80]!r}, which is not one of those that are allowed")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise Refused("has characters that URLs do not have")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, SCHEMES[parts.scheme] if port is None else port, target


def resolve(host: str, port: int) -> tuple[str, int]:
    """A public address of a host, all of whose addresses are public. Raises Refused."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Refused(f"is at the host {host[:80]!r}, which cannot be found") from None
    addresses = [str(address[0]) for *_, address in found]
    for each in addresses:
        if not is_public(each):
            raise Refused(f"is at the host {host[:80]!r}, whose address is private")
    return addresses[0], port


def is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if inner is not None and not is_public(str(inner)):
            return False
        if parsed in NAT64 and not is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))):
            return False
    return parsed.is_global and not parsed.is_multicast


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def fetch(url: str, limits: MediaLimits) -> bytes:
    """What is at a URL; it blocks. Raises Refused."""
    scheme, host, port, target = check_url(url, limits)
    ends = time.monotonic() + limits.fetch_seconds
    address = resolve(host, port)
    late = threading.Event()
    try:
        connection = _connect(scheme, host, address, ends)
    except OSError as error:
        raise Refused(f"cannot be fetched ({error.strerror or error})") from None

    def give_up() -> None:
        late.set()
        with contextlib.suppress(OSError):  # it has ended just now
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, ends - time.monotonic()), give_up)
    timer.daemon = True
    timer.start()
    try:
        return _get(connection, host if port == SCHEMES[scheme] else f"{host}:{port}", target, limits)
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise Refused(f"takes more than {limits.fetch_seconds:g} s to fetch") from None
        raise Refused(f"cannot be fetched ({type(error).__name__})") from None
    finally:
        timer.cancel()
        connection.close()


def _connect(scheme: str, host: str, address: tuple[str, int], ends: float) -> socket.socket:
    plain = socket.create_connection(address, timeout=max(0.001, ends - time.monotonic()))
    if scheme == "http":
        return plain
    try:
        plain.settimeout(max(0.001, ends - time.monotonic()))
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _get(connection: socket.socket, host: str, target: str, limits: MediaLimits) -> bytes:
    head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: penstock\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode("ascii"))
    answer = http.client.HTTPResponse(connection, method="GET")
    answer.begin()
    if 300 <= answer.status < 400:
        raise Refused(f"is answered with a redirect ({answer.status}), which is not followed")
    if answer.status != 200:
        raise Refused(f"is answered with {answer.status}")
    if answer.length is not None and answer.length > limits.bytes:
        raise _too_long(limits)
    pieces, size = [], 0
    while piece := answer.read(PIECE):
        size += len(piece)
        if size > limits.bytes:
            raise _too_long(limits)
        pieces.append(piece)
    if answer.length:
        raise Refused("ends before its end")
    return b"".join(pieces)


def _too_long(limits: MediaLimits) -> Refused:
    return Refused(f"has more than the {limits.bytes} bytes that are allowed (--max-media-bytes)")
