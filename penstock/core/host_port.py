"""Addresses of hosts, and "HOST:PORT" with an IPv6 address in brackets, as in URLs (RFC 3986, section 3.2.2)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

NOT_IN_NAMES = frozenset("[]/,: ")


def join_host_port(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port. ValueError where it is no name, IPv4 or bracketed IPv6 address with a
    port from 0 to 65535."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{text!r} has no port")
    if host.startswith("[") and host.endswith("]"):
        return str(_of_any_link(IPv6Address(host[1:-1]))), int(port)
    if not host or NOT_IN_NAMES & set(host):
        raise ValueError(f"{text!r} has no host")
    return host, int(port)


def read_address(text: str) -> str:
    """An IPv4 or IPv6 address by which other hosts can reach one, in its usual spelling. ValueError for others: of no
    host, with a zone, or IPv4 in the clothes of IPv6."""
    address = ip_address(text)
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{text!r} is no host's")
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        raise ValueError(f"{text!r} is {address.ipv4_mapped}")
    return str(_of_any_link(address))


def _of_any_link(address: IPv6Address) -> IPv6Address:
    """ValueError for a zone, which says nothing on another host, and where there has to be one."""
    if address.scope_id is not None or address.is_link_local:
        raise ValueError(f"{address} is of one link")
    return address


def has_ipv6(endpoint: str) -> bool:
    """Whether an endpoint or address is one like tcp://[::1]:7600. ZMQ has to be told, socket by socket."""
    return "[" in endpoint
