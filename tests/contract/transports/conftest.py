from itertools import product

import pytest

from penstock.transfer.transports import TRANSPORTS
from tests.helpers.links import ends


@pytest.fixture(params=product(TRANSPORTS, (None, {})), ids=lambda p: f"{p[0]}{'-faulty' if p[1] is not None else ''}")
def way(request):
    """(kind, faults)"""
    return request.param


@pytest.fixture
def kind(way):
    return way[0]


@pytest.fixture
def pair(way, tmp_path):
    with ends(way[0], tmp_path, faults=way[1]) as two:
        yield two
