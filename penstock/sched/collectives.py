"""What devices that compute a model together exchange in a step, and how long that takes.

    all-reduce   in a ring each of n devices sends 2 (n - 1) / n of the rows
    all-to-all   each of n devices sends (n - 1) / n of what its tokens' experts get, and experts as much back

A layer's attention and its dense MLP end in an all-reduce of the devices of one data-parallel group. A layer of experts
does too where all devices have the group's rows, or else every expert in slices: then it is one over all groups' rows.
Where whole experts are spread over several groups, rows go to their experts and come back: one all-to-all each
(dispatch and combine), of each row once for each expert of it. A group's devices share that work, and gather what came.

A collective over several hosts is as slow as the network; of an all-to-all what stays in a host goes over its links
meanwhile.
"""

from __future__ import annotations

from functools import lru_cache

from penstock.core.device import DeviceModel, ModelShape


@lru_cache(maxsize=64)
def collectives(device: DeviceModel, shape: ModelShape) -> tuple[float, float]:
    """(ms of a step, ms of each token of a data-parallel group in it)."""
    tensor, data = device.tensor_parallel, device.data_parallel
    row = shape.hidden * shape.bytes_per_value
    each_step = each_token = 0.0
    reduced = [(2 * shape.layers - shape.expert_layers, tensor, 1)]
    if device.expert_parallel and data > 1 and shape.experts is not None:
        sent, came = all_to_alls(device, shape)
        each_step += shape.expert_layers * sent
        each_token += shape.expert_layers * came
        if tensor > 1:
            each_step += shape.expert_layers * _latency_ms(device, tensor)
            each_token += shape.expert_layers * (tensor - 1) / tensor * row / _bandwidth(device, tensor) * 1e3
    else:
        reduced.append((shape.expert_layers, device.stage_devices, data))
    for count, size, groups in reduced:
        if size > 1:
            each_step += count * _latency_ms(device, size)
            each_token += count * 2 * (size - 1) / size * groups * row / _bandwidth(device, size) * 1e3
    handed = device.pipeline_parallel - 1  # rows go from stage to stage
    if handed:
        each_step += handed * _latency_ms(device, device.devices)
        each_token += handed * row / _bandwidth(device, device.devices) * 1e3
    return each_step, each_token


def all_to_alls(device: DeviceModel, shape: ModelShape) -> tuple[float, float]:
    """(ms, ms of each token of a data-parallel group) of one layer's dispatch and combine. Where weights have 8 bits or
    fewer, rows are dispatched in 8."""
    assert shape.experts is not None
    size = device.stage_devices
    inside = min(size, device.host_devices)
    quantised = shape.layer_bits is not None and shape.layer_bits <= 8
    values = shape.experts.per_token * shape.hidden / device.tensor_parallel
    moved = values * ((1 if quantised else shape.bytes_per_value) + shape.bytes_per_value) / size
    by_link, by_network = (inside - 1) / device.link_bandwidth, (size - inside) / device.network_bandwidth
    latency = device.all_to_all_us + (device.network_latency_us if size > inside else 0.0)
    return 2 * latency / 1e3, moved * max(by_link, by_network) * 1e3


def _latency_ms(device: DeviceModel, size: int) -> float:
    within = size <= device.host_devices
    return (device.link_latency_us + (0.0 if within else device.network_latency_us)) / 1e3


def _bandwidth(device: DeviceModel, size: int) -> float:
    return device.link_bandwidth if size <= device.host_devices else device.network_bandwidth
