"""Puts quantized layers into a model, in the place of layers of the same shape."""

from __future__ import annotations

import copy
from typing import Any, Optional

import torch
from torch import nn

from ..errors import QuantizationError, WeightsError
from .finding import Packed
from .layers import quant_class
from .module import QuantModule

__all__ = ["put", "quantized_like", "takes"]


def takes(module: Optional[nn.Module], name: str) -> bool:
    """Whether the parameter `name` of a module may stay packed."""
    if isinstance(module, QuantModule):
        return name == "weight"
    if module is None or name != "weight" or quant_class(type(module)) is None:
        return False
    # An embedding that renormalizes its rows writes to them.
    return getattr(module, "max_norm", None) is None


def quantized_like(module: nn.Module, packed: Packed, dtype: torch.dtype) -> QuantModule:
    """A quantized layer with everything that `module` has but its weight.

    QuantizationError if the weight has another shape, or the layer cannot have one of its kind.
    """
    cls = type(module)
    if isinstance(module, QuantModule):
        shape, cls = module.quant_weight.shape, type(module)
        made_class: Optional[type[Any]] = cls
    else:
        shape, made_class = list(module._parameters["weight"].shape), quant_class(cls)
    weight = packed.weight
    if made_class is None:
        raise QuantizationError(f"{packed.name} is quantized, and a {cls.__name__} cannot have such a weight")
    if "forward" in module.__dict__:
        raise WeightsError(
            f"{packed.name}: the forward of this {cls.__name__} was replaced on the layer itself (by hooks that move or cast "
            f"weights?); take that off before loading quantized weights"
        )
    if weight.shape != shape:
        weight = reshaped(packed, shape)
    if weight.transforms and issubclass(cls, (nn.Embedding, nn.modules.conv._ConvNd)):
        raise QuantizationError(
            f"{packed.name}, {weight.format}, wants transformed inputs, which a {cls.__name__} has not"
        )
    made = made_class.__new__(made_class)
    for name, value in module.__dict__.items():
        # Hooks, buffers and children are in containers of the instance.
        made.__dict__[name] = copy.copy(value) if name.startswith("_") and isinstance(value, (dict, set)) else value
    for name in [name for name in made._parameters if name == "weight" or name.startswith("quant_")]:
        del made._parameters[name]
    made._set_weight(weight, packed.parts, dtype=dtype, hints=packed.hints, metadata=packed.metadata)
    return made


def reshaped(packed: Packed, shape: list[int]) -> Any:
    """The description in the model's shape. QuantizationError if the file has another."""
    try:
        return packed.weight.with_shape(shape)
    except QuantizationError:
        raise QuantizationError(
            f"{packed.name}, {packed.weight.format}, has the shape {packed.weight.shape} in the file and {list(shape)} in the "
            f"model"
        ) from None


def put(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Registers `layer` at a dotted path."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = layer
