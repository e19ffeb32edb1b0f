"""One demo server for the tests that leave it as they found it."""

import openai
import pytest

from tests.helpers.servers import QUICK, serving


@pytest.fixture(scope="session")
def server():
    with serving("demo", *QUICK, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
