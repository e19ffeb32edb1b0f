"""What a device can do, from a few steps of the model that it is to run.

No data sheet says how fast our kernels are on a CPU. A step of one row reads all weights and shows its bandwidth, one
of many rows shows its arithmetic; that is enough to begin with (xLLM, section 3.3). The rest is learned while it runs
(`sched.factors`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from penstock.core.clock import Clock
from penstock.core.device import DeviceModel, ModelShape
from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.engine.runner import Runner
from penstock.nn.graph import Forward
from penstock.sched.local.sequence import blocks_for

ROWS = (1, 1, 16, 64)  # of one step after the other; the first also reads the weights from disk
# on a CUDA device, which is idle most of the time in steps of few rows; the first of each kind also compiles kernels
CUDA_ROWS = (1, 1, 1, 512, 512, 2048, 2048)
SECONDS = 0.05  # once a step takes longer, more rows would tell no more


def trial(forward: Forward) -> Callable[[StepPlan], object]:
    """Runs plans of steps like those of `calibrated`, on blocks of their own."""
    model = forward.model
    layout = make_layout(model.config, model.dtype, "block", "")
    blocks = trial_blocks(len(layout.groups), model.device)
    return Runner(model, KVCache.on_device(layout, blocks, model.device), forward.mode).run


def trial_blocks(groups: int, device: torch.device) -> int:
    """Blocks that the steps of `calibrated` use, the first ones, of a model with so many groups of layers."""
    return blocks_for(_rows_on(device)[-1]) * groups


def _rows_on(device: torch.device) -> tuple[int, ...]:
    return CUDA_ROWS if device.type == "cuda" else ROWS


def calibrated(run: Callable[[StepPlan], object], device: torch.device, shape: ModelShape, clock: Clock) -> DeviceModel:
    """The device that a model is on. Takes as long as a few decode steps and the prefill of a short prompt.

    Args:
        run: computes a step in `trial_blocks`, whose contents are lost.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    weights = shape.read_bytes(1) + shape.head_bytes
    blocks = tuple(range(trial_blocks(len(shape.kv_groups), device)))
    bandwidth = peak = 0.0
    before = 0
    for rows in _rows_on(device):
        step = SequenceStep("calibration", 0, [0] * rows, blocks, 1, SamplingParams(temperature=0.0), 0)
        began = clock.now()
        run(StepPlan((step,), blocks))
        seconds = max(clock.now() - began, 1e-6)
        compiled, before = device.type == "cuda" and rows != before, rows
        if compiled:
            continue
        if rows == 1:
            bandwidth = weights / seconds
        else:
            peak = max(peak, 2 * (shape.active_params * rows + shape.head_params) / seconds)
            if seconds > SECONDS:
                break
    return DeviceModel(peak_flops=peak, bandwidth=bandwidth, memory=memory)
