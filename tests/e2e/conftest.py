"""The demo behind each kind of server, for the tests that leave it as they found it."""

import openai
import pytest

from tests.helpers.deployments import deployed, disaggregated
from tests.helpers.servers import QUICK, serving


@pytest.fixture(scope="session", params=["serve", "up"])
def server(request):
    if request.param == "serve":
        with serving("demo", *QUICK, "--dtype", "float32") as running:
            yield running
    else:  # prefill apart from decode: every part of the service is in the way
        with deployed(disaggregated()) as running:
            yield running


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
