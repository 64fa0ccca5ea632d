"""The rotations of OFT and BOFT, from the tensors of a file: matrices that multiply blocks, less the identity.

Computed once at loading, in float64. LyCORIS rotates outputs by (I + Q)(I − Q)⁻¹ with Q = A − Aᵀ; PEFT rotates inputs, at first outputs,
by (I − S)(I + S)⁻¹ with S = (A − Aᵀ)/2, and later by some terms of a series with what stands above the diagonal of S. Where PEFT
constrains rotations, a block's A, and later its S, is made shorter if it is longer than the constraint.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Optional

import torch
from torch import Tensor

__all__ = ["input_stages", "output_stages"]


def output_stages(
    parts: Mapping[str, Tensor], bound: float, kind: str, outputs: int, constraint: Optional[float] = None
) -> Tensor:
    """What multiplies blocks of outputs: stage, block, row, column. `bound` is of the size of all rotations, 0 for none; `constraint`
    of that of each block of PEFT's."""
    if "rotations" in parts:
        turned = parts["rotations"].double()
    else:
        half = parts.get("half_blocks")
        blocks = parts["blocks"].double() if half is None else _constrained(half.double(), constraint) / -2
        skew = blocks - blocks.transpose(-1, -2)
        norm = skew.norm() + 1e-8
        if 0.0 < bound < float(norm):
            skew = skew * (bound / norm)
        one = torch.eye(blocks.shape[-1], dtype=torch.float64, device=blocks.device)
        turned = torch.linalg.solve(one - skew, one + skew, left=False)
        if half is not None:  # one block may stand for all of them
            turned = turned.expand(outputs // turned.shape[-1], -1, -1)
    if kind == "oft":
        turned = turned.transpose(-1, -2).unsqueeze(0)
    return (turned - torch.eye(turned.shape[-1], dtype=torch.float64, device=turned.device)).float()


def input_stages(parts: Mapping[str, Tensor], series: Optional[int], constraint: Optional[float] = None) -> Tensor:
    """What multiplies blocks of a row of the weight: stage, block, row, column."""
    packed = parts.get("packed_blocks", parts.get("embedding_blocks"))
    if packed is not None:
        packed = packed.double()
        size = (1 + isqrt(1 + 8 * packed.shape[1])) // 2
        skew = packed.new_zeros(len(packed), size, size)
        row, column = torch.triu_indices(size, size, 1)
        skew[:, row, column] = packed
        skew = _constrained(skew - skew.transpose(1, 2), constraint).unsqueeze(0)
    else:
        blocks = _constrained(parts["half_blocks"].double(), constraint)
        skew = (blocks - blocks.transpose(-1, -2)) / 2
        if skew.dim() == 3:
            skew = skew.unsqueeze(0)
    one = torch.eye(skew.shape[-1], dtype=torch.float64, device=skew.device)
    turned = torch.linalg.solve(one + skew, one - skew, left=False) if series is None else _series(skew, series) + one
    return (turned - one).float()


def _constrained(blocks: Tensor, constraint: Optional[float]) -> Tensor:
    """Each block no longer than the constraint."""
    if constraint is None:
        return blocks
    length = blocks.flatten(-2).norm(dim=-1)[..., None, None]
    return torch.where(length > constraint, blocks * (constraint / length), blocks)


def _series(skew: Tensor, terms: int) -> Tensor:
    """2S + 2S² + … with the last power once, and with three terms as with four: as PEFT sums it."""
    total = torch.zeros_like(skew)
    if terms > 1:
        total = total + 2 * skew
    if terms > 2:
        power = skew @ skew
        total = total + 2 * power
        for _ in range(3, terms - 1):
            power = power @ skew
            total = total + 2 * power
        total = total + power @ skew
    return total
