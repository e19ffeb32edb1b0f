"""Weights in few bits, and checkpoints of them as the public quantisers write them, packed here number by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.nn.quantised import Codes, Pieces

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
PROJECTIONS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def random_pieces(outs: int, ins: int, codes: Codes) -> Pieces:
    """Any codes, with scales that make values of about 1 of them."""
    groups = codes.groups(ins)
    of = torch.randint(0, 1 << codes.bits, (outs, ins), dtype=torch.uint8)
    if codes.kind == "e4m3":
        of[(of & 0x7F) == 0x7F] = 0  # no numbers
        of[(of & 0x7F) > 0x48] -= 0x30  # not so large
    scales = (0.5 + torch.rand(outs, groups)) / (4 if codes.kind == "e4m3" else 1 << codes.bits - 1)
    zeros = (1 << codes.bits) * torch.rand(outs, groups) if codes.zeros else None
    return Pieces(of, scales, zeros, torch.randperm(ins) if codes.ordered else None)


@dataclass
class Written:
    """A weight as a format has it.

    Attributes:
        dense: [outs, ins] float32, what it means.
    """

    tensors: dict[str, Tensor]
    dense: Tensor


@dataclass(frozen=True)
class Variety:
    """One of the kinds of checkpoints that a format has.

    Attributes:
        config: the quantization_config.
        write: a weight [outs, ins], and numbers that a model's projections of the same input have in common.
    """

    name: str
    config: dict[str, Any]
    write: Callable[[Tensor, np.random.Generator], Written] = field(compare=False)

    def __str__(self) -> str:
        return self.name


def words(values: np.ndarray, bits: int) -> Tensor:
    """[rows, n] -> [rows, words] int32: numbers of so many bits after each other, the lowest bit first."""
    stream = (values.astype(np.uint8)[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool, scales: torch.dtype) -> tuple[Tensor, ...]:
    """Codes [outs, ins] int64, scales and whole zeros [outs, groups]."""
    outs, ins = weight.shape
    cut = weight.float().view(outs, -1, group or ins)
    low, high = cut.amin(2), cut.amax(2)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    scale = (torch.maximum(-low, high) / (middle - 0.5) if symmetric else (high - low) / most).to(scales).float()
    zero = torch.full_like(scale, middle) if symmetric else (-low / scale).round().clamp(0, most)
    codes = (cut / scale[:, :, None] + zero[:, :, None]).round().clamp(0, most).long()
    return codes.view(outs, ins), scale.to(scales), zero


def value(codes: Tensor, scale: Tensor, zero: Tensor, group: Tensor) -> Tensor:
    return (codes.float() - zero.float()[:, group]) * scale.float()[:, group]


def groups_of(ins: int, group: int) -> Tensor:
    return torch.arange(ins) // (group or ins)


def gptq(bits: int, group: int, symmetric: bool, ordered: bool, version: str) -> Variety:
    def write(weight: Tensor, common: np.random.Generator) -> Written:
        ins = weight.shape[1]
        g_idx = groups_of(ins, group)
        if ordered:
            g_idx = g_idx[torch.from_numpy(common.permutation(ins))]
        order = g_idx.argsort(stable=True)
        sorted_codes, scale, zero = rounded(weight[:, order], bits, group, symmetric, torch.float16)
        codes = torch.empty_like(sorted_codes)
        codes[:, order] = sorted_codes
        if version == "gptq":
            zero = zero.clamp(min=1)  # which the format cannot have
        stored = zero.long() - int(version == "gptq")
        tensors = {
            "qweight": words(codes.numpy(), bits).T.contiguous(),
            "qzeros": words(stored.T.numpy(), bits),
            "scales": scale.T.contiguous(),
            "g_idx": g_idx.int(),
        }
        return Written(tensors, value(codes, scale, zero, g_idx))

    config = {"bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": ordered, "true_sequential": True}
    name = f"gptq-{bits}-{group}{'' if symmetric else '-asym'}{'-order' if ordered else ''}-{version}"
    return Variety(name, {"quant_method": "gptq", "checkpoint_format": version, "lm_head": False, **config}, write)


def awq(group: int) -> Variety:
    def packed(values: np.ndarray) -> Tensor:
        rows = np.zeros((len(values), values.shape[1] // 8), np.uint32)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            rows |= values[:, output::8].astype(np.uint32) << (4 * place)
        return torch.from_numpy(rows.view(np.int32).copy())

    def write(weight: Tensor, common: np.random.Generator) -> Written:
        codes, scale, zero = rounded(weight, 4, group, False, torch.float16)
        tensors = {"qweight": packed(codes.T.numpy()), "qzeros": packed(zero.T.long().numpy())}
        tensors["scales"] = scale.T.contiguous()
        return Written(tensors, value(codes, scale, zero, groups_of(weight.shape[1], group)))

    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "gemm", "zero_point": True}
    return Variety(f"awq-{group}", config | {"modules_to_not_convert": None}, write)


def _scheme(form: str, **weights: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False, "actorder": None, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    whole = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**whole, "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}


def ct_packed(bits: int, group: int, symmetric: bool, ordered: bool) -> Variety:
    def write(weight: Tensor, common: np.random.Generator) -> Written:
        outs, ins = weight.shape
        g_idx = groups_of(ins, group)
        if ordered:
            g_idx = g_idx[torch.from_numpy(common.permutation(ins))]
        order = g_idx.argsort(stable=True)
        codes, scale, zero = rounded(weight[:, order], bits, group, symmetric, torch.bfloat16)
        codes = codes[:, order.argsort()]
        tensors = {"weight_packed": words(codes.numpy(), bits), "weight_scale": scale}
        tensors["weight_shape"] = torch.tensor([outs, ins])
        if not symmetric:
            tensors["weight_zero_point"] = words(zero.T.long().numpy(), bits).T.contiguous()
        if ordered:
            tensors["weight_g_idx"] = g_idx.int()
        return Written(tensors, value(codes, scale, zero, g_idx))

    weights = {"strategy": "group" if group else "channel", "group_size": group or None, "num_bits": bits}
    weights |= {"symmetric": symmetric, "actorder": "group" if ordered else None}
    name = f"ct-packed-{bits}-{group}{'' if symmetric else '-asym'}{'-order' if ordered else ''}"
    return Variety(name, _scheme("pack-quantized", **weights), write)


def ct_int8(group: int | None, symmetric: bool = True) -> Variety:
    """`group`: of inputs, 0 for a scale of each output, None for one of all."""

    def write(weight: Tensor, common: np.random.Generator) -> Written:
        flat = weight.reshape(1, -1) if group is None else weight
        codes, scale, zero = rounded(flat, 8, group or 0, symmetric, torch.bfloat16)
        dense = value(codes, scale, zero, groups_of(flat.shape[1], group or 0)).view(weight.shape)
        tensors = {"weight": (codes - 128).to(torch.int8).view(weight.shape)}
        tensors["weight_scale"] = scale.view(1) if group is None else scale
        if not symmetric:
            tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
        return Written(tensors, dense)

    strategy = "tensor" if group is None else "group" if group else "channel"
    config = _scheme("int-quantized", num_bits=8, strategy=strategy, group_size=group or None, symmetric=symmetric)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    return Variety(f"ct-int8-{group}{'' if symmetric else '-asym'}", config, write)


def float8(weight: Tensor, strategy: str, scales: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values in e4m3, scales as a checkpoint has them, and what they mean."""
    outs, ins = weight.shape
    high, wide = {"tensor": (outs, ins), "channel": (1, ins), "block": (128, 128)}[strategy]
    scale = torch.empty(-(-outs // high), -(-ins // wide))
    for i in range(len(scale)):
        for j in range(scale.shape[1]):
            block = weight[high * i : high * (i + 1), wide * j : wide * (j + 1)]
            scale[i, j] = block.abs().max() / 448
    scale = scale.to(scales)
    spread = scale.float().repeat_interleave(high, 0)[:outs].repeat_interleave(wide, 1)[:, :ins]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return values, scale, values.float() * spread


def fp8(strategy: str, where: str) -> Variety:
    """`where`: "fp8", "fbgemm" or "ct"."""

    def write(weight: Tensor, common: np.random.Generator) -> Written:
        scales = torch.bfloat16 if where == "ct" else torch.float32
        values, scale, dense = float8(weight.float(), strategy, scales)
        tensors = {"weight": values}
        tensors["weight_scale_inv" if (where, strategy) == ("fp8", "block") else "weight_scale"] = (
            scale.view(()) if strategy == "tensor" else scale
        )
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor(0.5)
        return Written(tensors, dense)

    if where == "ct":
        block = [128, 128] if strategy == "block" else None
        weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": block}
        return Variety(f"ct-fp8-{strategy}", _scheme("float-quantized", **weights), write)
    method = "fbgemm_fp8" if where == "fbgemm" else "fp8"
    config = {"quant_method": method, "activation_scheme": "dynamic"}
    if strategy == "block":
        config |= {"weight_block_size": [128, 128]}
    return Variety(f"{method}-{strategy}", config, write)


def hqq(bits: int, group: int) -> Variety:
    def write(weight: Tensor, common: np.random.Generator) -> Written:
        outs, ins = weight.shape
        codes, scale, zero = rounded(weight, bits, group, False, torch.float16)
        zero = (zero + 0.25).half()
        cut = codes.view(-1, group or ins).numpy().astype(np.int64)
        parts = {8: 1, 4: 2, 3: 10, 2: 4}[bits]
        cut = np.pad(cut, ((0, -len(cut) % parts), (0, 0)))
        packed = np.zeros((len(cut) // parts, cut.shape[1]), np.int64)
        for part in range(parts):
            packed |= cut[part * len(packed) : (part + 1) * len(packed)] << bits * (parts - 1 - part)
        told = {"nbits": torch.tensor(bits), "axis": torch.tensor(1), "shape": torch.tensor([outs, ins])}
        tensors = {"W_q": torch.from_numpy(packed.astype(np.int32 if bits == 3 else np.uint8))}
        tensors |= {"scale": scale.reshape(-1, 1), "zero": zero.reshape(-1, 1), **told}
        return Written(tensors, value(codes, scale, zero, groups_of(ins, group)))

    weights = {"nbits": bits, "group_size": group or None, "axis": 1, "view_as_float": False, "optimize": True}
    whole = {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None}
    return Variety(f"hqq-{bits}-{group}", {"quant_method": "hqq", "quant_config": whole, "skip_modules": []}, write)


VARIETIES = [
    gptq(4, 32, True, False, "gptq"),
    gptq(4, 64, False, True, "gptq"),
    gptq(4, 0, False, False, "gptq_v2"),
    gptq(8, 32, True, True, "gptq_v2"),
    gptq(8, 128, False, False, "gptq"),
    gptq(3, 32, False, False, "gptq_v2"),
    awq(32),
    awq(64),
    awq(128),
    ct_packed(4, 32, True, False),
    ct_packed(4, 0, False, False),
    ct_packed(4, 64, False, True),
    ct_packed(8, 32, True, True),
    ct_packed(3, 32, True, False),
    ct_int8(0),
    ct_int8(None),
    ct_int8(32, symmetric=False),
    fp8("channel", "ct"),
    fp8("tensor", "ct"),
    fp8("block", "ct"),
    fp8("tensor", "fp8"),
    fp8("block", "fp8"),
    fp8("channel", "fbgemm"),
    hqq(4, 64),
    hqq(3, 32),
    hqq(2, 32),
    hqq(8, 0),
]


def quantise_checkpoint(plain: Path, to: Path, variety: Variety, head: bool = False) -> dict[str, Tensor]:
    """Write a checkpoint's projections, and perhaps its head, in a format.

    Returns:
        Its weights as they are then, in float32.
    """
    to.mkdir(parents=True, exist_ok=True)
    rng, tensors, dense = np.random.default_rng(0), dict[str, Tensor](), dict[str, Tensor]()
    seeds: dict[str, int] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        dense[name] = tensor.float()
        if kind != "weight" or not (module.endswith(PROJECTIONS) or (head and module == "lm_head")):
            tensors[name] = tensor
            continue
        beside = module.rpartition(".")[0] + str(module.endswith(("o_proj", "down_proj")))
        common = np.random.default_rng(seeds.setdefault(beside, int(rng.integers(1 << 30))))
        written = variety.write(tensor.float(), common)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in written.tensors.items()}
        dense[name] = written.dense
    save_file(tensors, to / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": variety.config}
    (to / "config.json").write_text(json.dumps(config))
    return dense
