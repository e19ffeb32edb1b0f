"""The demo behind each kind of server, started once and shared. Who kills a part of it waits for it to serve again."""

import openai
import pytest

from tests.helpers.deployments import DEMO, colocated, deployed, disaggregated
from tests.helpers.servers import QUICK, serving


@pytest.fixture(scope="session")
def record(tmp_path_factory):
    """Where `alone` records its requests."""
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="session")
def alone(record):
    """`penstock serve`."""
    with serving("demo", *QUICK, "--dtype", "float32", "--record-requests", str(record)) as running:
        yield running


@pytest.fixture(scope="session")
def pair():
    """`penstock up` of two engines that take turns."""
    with deployed(colocated(2, policy="round_robin", seed=1)) as running:
        yield running


@pytest.fixture(scope="session")
def apart():
    """`penstock up` with prefill apart from decode: every part of the service is in the way. Two engines decode.
    There is memory enough for every request to be handed over."""
    with deployed(disaggregated(decode=2, engine=DEMO | {"kv-cache-memory": "256M"})) as running:
        yield running


@pytest.fixture(scope="session", params=["serve", "up"])
def server(request):
    return request.getfixturevalue({"serve": "alone", "up": "apart"}[request.param])


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
