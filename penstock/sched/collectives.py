"""What devices that compute a model together exchange in a step, and how long that takes.

    all-reduce   in a ring each of n devices sends 2 (n - 1) / n of the rows
    all-to-all   each of n devices sends (n - 1) / n of what its tokens' experts get, and experts as much back

A layer's attention and its feed-forward end in an all-reduce each, of the devices that share the layer in one
data-parallel group. Where groups have the experts together, rows go to their experts and come back instead, one
all-to-all each (dispatch and combine): each device sends the share of rows that the attention's all-reduce has left it
when it is half done, and the other half follows the experts. An all-to-all has two modes: at once, each row once for
each expert of it; and for many rows, each once for each host, which hands it on over its links.

A collective over several hosts is as slow as the network; of an all-to-all what stays in a host goes over its links
meanwhile.
"""

from __future__ import annotations

import math
from functools import lru_cache

from penstock.core.device import DeviceModel, ModelShape

SIZES_FIRST = 4  # times the latency where devices first tell each other how many rows will come; an estimate


@lru_cache(maxsize=64)
def collectives(device: DeviceModel, shape: ModelShape) -> tuple[float, float]:
    """(ms of a step, ms of each token of a data-parallel group in it)."""
    row = shape.hidden * shape.bytes_per_value
    tensor = device.tensor_parallel
    each_step = each_token = 0.0
    if tensor > 1:
        count = 2 * shape.layers - (shape.expert_layers if _spread(device, shape) else 0)
        each_step = count * _latency_ms(device, tensor)
        each_token = count * 2 * (tensor - 1) / tensor * row / _bandwidth(device, tensor) * 1e3
    handed = device.pipeline_parallel - 1  # rows go from stage to stage
    if handed:
        each_step += handed * _latency_ms(device, device.devices)
        each_token += handed * row / _bandwidth(device, device.devices) * 1e3
    return each_step, each_token


def all_to_alls_ms(device: DeviceModel, shape: ModelShape, tokens: float) -> float:
    """Of all layers' dispatches and combines in a step with so many tokens of a data-parallel group, in the quicker
    mode. Where weights have 8 bits or fewer, rows are dispatched in 8."""
    return min(fixed + each * tokens for fixed, each in _modes(device, shape))


@lru_cache(maxsize=64)
def _modes(device: DeviceModel, shape: ModelShape) -> tuple[tuple[float, float], ...]:
    """(ms of a step, ms of each token of a data-parallel group) in each mode, with all layers."""
    if not _spread(device, shape):
        return ((0.0, 0.0),)
    assert shape.experts is not None
    size, chosen = device.stage_devices, shape.experts.per_token
    inside = min(size, device.host_devices)
    hosts = size / inside
    quantised = shape.layer_bits is not None and shape.layer_bits <= 8
    row = shape.hidden * ((1 if quantised else shape.bytes_per_value) + shape.bytes_per_value) / device.tensor_parallel
    latency = 2 * (device.all_to_all_us + (device.network_latency_us if hosts > 1 else 0.0)) / 1e3
    sent = [
        (latency, chosen * (inside - 1) / size, chosen * (size - inside) / size),
        (latency * SIZES_FIRST, _distinct(inside, chosen), _distinct(hosts, chosen)),
    ]
    return tuple(
        (
            shape.expert_layers * fixed,
            shape.expert_layers * row * max(links / device.link_bandwidth, network / device.network_bandwidth) * 1e3,
        )
        for fixed, links, network in sent
    )


def _distinct(places: float, chosen: int) -> float:
    """Of so many places those besides a row's own that any of its experts is expected to be in."""
    return (places - 1) * (1.0 - math.pow(1.0 - 1.0 / places, chosen))


def _spread(device: DeviceModel, shape: ModelShape) -> bool:
    """Whether tokens travel to experts."""
    return device.expert_groups > 1 and shape.experts is not None


def _latency_ms(device: DeviceModel, size: int) -> float:
    within = size <= device.host_devices
    return (device.link_latency_us + (0.0 if within else device.network_latency_us)) / 1e3


def _bandwidth(device: DeviceModel, size: int) -> float:
    return device.link_bandwidth if size <= device.host_devices else device.network_bandwidth
