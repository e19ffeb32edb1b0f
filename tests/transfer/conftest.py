import os

import pytest

from tests.helpers.kv_pool import PoolServer


@pytest.fixture
def server(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    server = PoolServer(str(tmp_path / "kv-pool"))
    yield server
    server.stop()
    assert set(os.listdir("/proc/self/fd")) <= before, "descriptors leak"  # what tests before left may be closed by now
    assert not os.path.exists(server.path)
