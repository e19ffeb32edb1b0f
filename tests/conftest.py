"""Settings for every test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# how long an example takes says how busy the machine is, and nothing about the code
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("penstock", PATIENT, max_examples=50)
settings.register_profile("thorough", PATIENT, max_examples=500)
settings.load_profile("penstock")

REAL = Path(__file__).parent / "e2e"
SHARED = {"alone", "pair", "apart", "server"}  # its deployments that many tests use


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Real processes come first, for they wait a lot, which is no time lost as long as another worker has something to
    do; and of those the ones that share a deployment. So one worker has them, and it is not started by each."""
    items.sort(key=lambda item: (REAL not in item.path.parents, SHARED.isdisjoint(item.fixturenames)))


def pytest_configure(config):
    # tiny models gain nothing from threads, and several workers would fight over the cores
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
