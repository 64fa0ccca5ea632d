"""The numbers of a layer's weight, whatever it is packed as: for norms of magnitudes, and for layers that are computed whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from ..guard import ManagedParameter
from ..quant.module import QuantModule

__all__ = ["is_computed", "is_float8", "is_plain", "plain_forward", "weight_numbers"]

_ROWS = 1024
"""Rows of the identity that are multiplied at once."""


def is_float8(dtype: torch.dtype) -> bool:
    """Whether it is a type of 8-bit floats, which nothing adds or multiplies."""
    return dtype.is_floating_point and dtype.itemsize == 1


@torch.no_grad()
def weight_numbers(module: nn.Module, base: Callable[..., Tensor], columns: int, dtype: torch.dtype) -> Tensor:
    """The weight that plain inputs meet, during the layer's turn."""
    if isinstance(module, QuantModule):
        return module._effective(module._quant_parts(), dtype)
    weight = module._parameters.get("weight")
    if is_computed(module):
        return module.weight
    if weight is not None:
        if is_plain(weight):
            if weight.is_floating_point():
                return weight.to(dtype) if is_float8(weight.dtype) else weight
        elif not isinstance(weight, ManagedParameter) and type(weight).dequantize is not Tensor.dequantize:
            return weight.dequantize()
    return _measured(module, base, columns, dtype)


def is_computed(module: nn.Module) -> bool:
    """Whether its weight is made of other parameters at each call: by a parametrization, or as PyTorch's older norms and pruning do."""
    if "weight" in module._parameters or isinstance(module, QuantModule):
        return False
    return is_parametrized(module, "weight") or any(name in module._parameters for name in ("weight_g", "weight_orig"))


def is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are its numbers."""
    return type(tensor) in (Tensor, nn.Parameter, ManagedParameter)


def _measured(module: nn.Module, base: Callable[..., Tensor], columns: int, dtype: torch.dtype) -> Tensor:
    """The weight of a layer that nobody knows how to unpack: what it makes of the identity."""
    bias, device = module._parameters.get("bias"), next(module.parameters()).device
    if bias is not None:
        module._parameters["bias"] = None
    try:
        parts = []
        for start in range(0, columns, _ROWS):
            rows = torch.zeros(min(_ROWS, columns - start), columns, dtype=dtype, device=device)
            rows[:, start:].fill_diagonal_(1.0)
            parts.append(base(rows))
        return torch.cat(parts).t()
    finally:
        if bias is not None:
            module._parameters["bias"] = bias


def plain_forward(module: nn.Module, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a layer as it is; of a linear layer whose weight is of 8-bit floats, in its inputs' type."""
    weight = module._parameters.get("weight")
    if type(module) is nn.Linear and weight is not None and is_float8(weight.dtype):

        def forward(input: Tensor) -> Tensor:
            bias = module.bias
            return F.linear(input, module.weight.to(input.dtype), None if bias is None else bias.to(input.dtype))

        return forward
    return inner
