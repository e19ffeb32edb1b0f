"""Each file is one client library, used as its documentation has it against a server with the demo model.

`make test-clients` installs them beside the environment and runs these; a client that is not there is skipped.
"""

import asyncio

import pytest


@pytest.fixture(scope="module")
def url(alone):
    """Of OpenAI's routes."""
    return f"{alone.url}/v1"


@pytest.fixture(scope="session")
def run():
    """Runs a coroutine: all in one loop, for libraries keep connections that belong to one."""
    with asyncio.Runner() as runner:
        yield runner.run
