"""Hosts and ports as people write them, and as others can use them."""

import pytest

from penstock.core.host_port import has_ipv6, join_host_port, read_address, split_host_port


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("10.0.0.7", "10.0.0.7:80"),
        ("master.local", "master.local:80"),
        ("::1", "[::1]:80"),
        ("2001:db8::a", "[2001:db8::a]:80"),
    ],
)
def test_what_is_joined_is_split(host, text):
    assert join_host_port(host, 80) == text
    assert split_host_port(text) == (host, 80)
    assert has_ipv6(f"tcp://{text}") == (":" in host)


def test_one_address_has_one_spelling():
    assert split_host_port("[2001:DB8:0::000A]:0") == ("2001:db8::a", 0)
    assert read_address("2001:DB8:0::000A") == "2001:db8::a"
    assert read_address("::1") == "::1"
    assert read_address("10.0.0.7") == "10.0.0.7"


NO_PORT = ["", "host", "[::1]", "host:", "host:http", "host:65536", "host:-1", "host:\u00b2"]
NO_HOST = [":80", "::1:80", "2001:db8::a:80", "[::1:80", "::1]:80", "a,b:80", "a/b:80"]
NO_IPV6 = ["[]:80", "[host]:80", "[10.0.0.7]:80"]
OF_ONE_LINK = ["[::1%lo]:80", "[fe80::1]:80"]


@pytest.mark.parametrize("text", [*NO_PORT, *NO_HOST, *NO_IPV6, *OF_ONE_LINK])
def test_what_is_no_host_and_port(text):
    with pytest.raises(ValueError, match=r"port|host|is of one link|At least 3 parts|cannot be empty"):
        split_host_port(text)


NO_ADDRESS = ["", "host", "[::1]", "10.0.0.7:80", "10.0.0"]
OF_NO_HOST = ["0.0.0.0", "::", "ff02::1", "224.0.0.1"]
FOR_NOBODY_ELSE = ["::1%lo", "fe80::1", "fe80::1%eth0", "::ffff:10.0.0.7"]


@pytest.mark.parametrize("text", [*NO_ADDRESS, *OF_NO_HOST, *FOR_NOBODY_ELSE])
def test_what_is_no_address_that_others_can_use(text):
    with pytest.raises(ValueError, match=r" is | does not appear "):
        read_address(text)
