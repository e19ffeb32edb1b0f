"""What several tests of the service need."""

import pytest

from penstock.service.checkpoint import DEMO
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)
