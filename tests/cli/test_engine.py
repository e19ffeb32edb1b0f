"""What an engine's process does before it imports what it needs."""

import os
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from penstock.cli.engine import MOONCAKE, meets_ipv6, open_way, preset_mooncake
from penstock.core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "ipv6"),
    [
        ({}, False),
        ({"transport": None, "weights": None}, False),
        ({"weights": {"public": None}}, False),
        ({"transport": {"kind": "mooncake", "address": "tcp:10.0.0.1:0"}}, False),
        ({"transport": {"kind": "mooncake", "address": "tcp:[fd00::1]:0"}}, True),
        ({"transport": {"kind": "tcp", "address": "tcp:[fd00::1]:0"}}, False),
        ({"weights": {"public": {"address": "tcp:[fd00::1]:0", "mooncake": "[fd00::1]"}}}, True),
        ({"weights": {"public": {"address": "tcp:[fd00::1]:0", "mooncake": ""}}}, False),
        ({"options": {"remote_cache": "mooncake://[fd00::1]:50051?segment=0"}}, True),
        ({"options": {"remote_cache": "MOONCAKE://[fd00::1]:50051"}}, True),
        ({"options": {"remote_cache": "mooncake://store:50051"}}, False),
        ({"options": {"remote_cache": "file:///[x]"}}, False),
        ({"options": {"remote_cache": "mooncake://[fd00::1:50051"}}, True),  # which is refused later
    ],
)
def test_mooncake_is_told_of_ipv6_where_it_meets_it(settings, ipv6):
    assert meets_ipv6({"options": {"remote_cache": None}, **settings}) == ipv6


def test_what_somebody_has_set_for_mooncake_stays(monkeypatch):
    for variable in (*MOONCAKE, "MC_USE_IPV6"):
        monkeypatch.setenv(variable, "theirs")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "7")
    preset_mooncake()
    assert "MC_USE_IPV6" not in os.environ
    preset_mooncake(ipv6=True)
    assert {name: os.environ[name] for name in MOONCAKE} == {**MOONCAKE, "MC_RPC_TIMEOUT_MS": "7"}
    assert os.environ["MC_USE_IPV6"] == "1"


def test_blocks_on_a_device_have_no_way_to_others():
    """Whether it is one is not known to who starts an engine without a device."""
    way = {"kind": "shared", "address": "unix:/nowhere", "tls": None, "faults": None}
    with ExitStack() as stack:
        settings = {"name": "e", "transport": way, "role": "any"}
        assert open_way(settings, 1, SimpleNamespace(pool=None), stack) is None
        with pytest.raises(ConfigError, match=r"role: 'prefill', on a CUDA device, .*, allowed is any"):
            open_way(settings | {"role": "prefill"}, 1, SimpleNamespace(pool=None), stack)
