"""Settings for every test."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config):
    # tiny models gain nothing from threads, and several workers would fight over the cores
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
