"""Weights in few bits."""

import torch

from penstock.nn.quantised import Codes, Pieces


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
