"""The type of a model's float32 weights: converted where they are, a parameter at a time."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import nn

from ..errors import ModelError

__all__ = ["convert_weights"]

_UNSET = object()


def convert_weights(name: str, model: nn.Module, default: Optional[torch.dtype], poll: Callable[[], Any]) -> int:
    """Gives float32 parameters the type `default`, or the model's `_convertWeightsFloatTo`; None leaves them. Those with a
    `_lock_dtype`, or in a module that has one, stay. Gives how many were converted. `poll` may stop it between two."""
    dtype = getattr(model, "_convertWeightsFloatTo", _UNSET)
    if dtype is _UNSET:
        dtype = default
    elif dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ModelError(f"_convertWeightsFloatTo of {name} is {dtype!r}: it is a floating-point dtype or None")
    if dtype is None or dtype == torch.float32:
        return 0
    locked = {
        id(parameter)
        for module in model.modules()
        if _is_locked(module)
        for parameter in module.parameters(recurse=False)
    }
    count = 0
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and id(parameter) not in locked and not _is_locked(parameter):
            poll()
            with torch.no_grad():
                parameter.data = parameter.data.to(dtype)
            count += 1
    return count


def _is_locked(thing: Any) -> bool:
    return getattr(thing, "_lock_dtype", None) is not None
