import pytest

from tests.helpers.certificates import NEEDS_OPENSSL
from tests.helpers.links import KINDS, TLS, ends


@pytest.fixture(params=[*KINDS, pytest.param(TLS, marks=NEEDS_OPENSSL)])
def kind(request):
    return request.param


@pytest.fixture(params=[None, {}], ids=["", "faulty"])
def way(kind, request):
    """(kind, faults)"""
    return kind, request.param


@pytest.fixture
def pair(way, tmp_path):
    with ends(way[0], tmp_path, faults=way[1]) as two:
        yield two
