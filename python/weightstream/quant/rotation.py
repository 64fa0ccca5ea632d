"""The rotation of ConvRot on inputs: groups of columns times a regular Hadamard matrix, which is its own inverse."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..errors import QuantizationError

__all__ = ["hadamard", "rotated"]

_FOUR = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


@lru_cache(maxsize=64)
def hadamard(group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The normalized matrix of a group, whose size is a power of four: all its numbers are exact in any type."""
    if group < 4 or group & (group - 1) or group.bit_length() % 2 == 0:
        raise QuantizationError(f"inputs cannot be rotated in groups of {group}: that is no power of four")
    with torch.inference_mode(False), torch.no_grad():
        four = torch.tensor(_FOUR, dtype=torch.float64, device="cpu")
        matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        while matrix.shape[0] < group:
            matrix = torch.kron(matrix, four)
        return (matrix / group**0.5).to(device=device, dtype=dtype)


def rotated(input: Tensor, group: int) -> Tensor:
    """Inputs, the last dimension turned group by group. Its length is a multiple of the group's."""
    if input.shape[-1] % group:
        raise QuantizationError(f"{input.shape[-1]} columns cannot be rotated in groups of {group}")
    turned = input.reshape(-1, group) @ hadamard(group, input.dtype, input.device)
    return turned.view(input.shape)
