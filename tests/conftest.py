"""Settings for every test."""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# how long an example takes says how busy the machine is, and nothing about the code
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


def pytest_configure(config):
    # tiny models gain nothing from threads, and several workers would fight over the cores
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
