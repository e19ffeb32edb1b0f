import os

import pytest

from tests.helpers.keepers import Keeper


@pytest.fixture
def keeper(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    keeper = Keeper(str(tmp_path / "keeper"))
    yield keeper
    keeper.stop()
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors leak"
    assert not os.path.exists(keeper.path)
