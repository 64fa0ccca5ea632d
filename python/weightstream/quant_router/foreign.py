"""Layers of an application's own: its class of linear layers, in the place of a model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import QuantizationError
from .calling import call
from .merging import Foreign
from .registry import Registered

__all__ = ["foreign_layer", "linear_class", "prepare", "split"]


def linear_class(one: Registered) -> type[nn.Module]:
    """The one class of layers that a handler has. QuantizationError if there is none, or more."""
    named = getattr(one.module, "__name__", None)
    classes = [
        value
        for value in vars(one.module).values()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and callable(getattr(value, "qcreate", None))
        and (named is None or value.__module__ == named)
    ]
    if len(classes) != 1:
        raise QuantizationError(
            f"the handler {one.name} has {len(classes)} classes of layers with qcreate(), and needs exactly one to compute with "
            f"its own format"
        )
    return classes[0]


def kind_of(one: Registered, kind: Any) -> Any:
    """The type that a map names: the handler's object of that name, or what the map says."""
    if not isinstance(kind, str):
        return kind
    for value in vars(one.module).values():
        if not isinstance(value, (str, type)) and getattr(value, "name", None) == kind:
            return value
    return kind


def foreign_layer(name: str, module: nn.Module, foreign: Foreign, dtype: torch.dtype) -> nn.Module:
    """The handler's layer for a module of the model, with its tensors in it."""
    cls = linear_class(foreign.handler)
    if not isinstance(module, nn.Linear):
        raise QuantizationError(
            f"{name} is a {type(module).__name__}, and the handler {foreign.handler.name} has layers for nn.Linear only"
        )
    settings = {
        "weights": kind_of(foreign.handler, foreign.kind), "activations": None, "optimizer": None, "device": "meta",
    }  # fmt: skip
    layer = call(foreign.handler.name, cls.qcreate, [module], settings)
    if not isinstance(layer, nn.Module):
        raise QuantizationError(f"qcreate of the handler {foreign.handler.name} gives no layer for {name}")
    try:
        layer.load_state_dict(foreign.tensors, strict=True, assign=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise QuantizationError(
            f"{name} does not fit the layer of {foreign.handler.name}: {'; '.join(lines[:8])}"
        ) from None
    layer.train(module.training)
    layer.requires_grad_(False)
    return layer


def prepare(
    model: nn.Module, foreign: Mapping[str, Foreign], dtype: Optional[torch.dtype], verbose: int
) -> tuple[set[str], list[Callable[[], Any]]]:
    """Lets handlers that want so put their modules in themselves: the modules that are done, and what to call after the load."""
    done: set[str] = set()
    after: list[Callable[[], Any]] = []
    for one in dict.fromkeys(entry.handler for entry in foreign.values()):
        apply = getattr(one.module, "apply_pre_quantization", None)
        if not callable(apply):
            continue
        modules = {name: entry for name, entry in foreign.items() if entry.handler is one}
        tensors: dict[str, Tensor] = {
            f"{name}.{tensor}" if name else tensor: value
            for name, entry in modules.items()
            for tensor, value in entry.tensors.items()
        }
        quant_map = {name: {"weights": entry.kind, "activations": "none"} for name, entry in modules.items()}
        settings = {"quantization_map": quant_map, "default_dtype": dtype, "verboseLevel": verbose}
        answer = call(one.name, apply, [model, tensors, quant_map], settings)
        remaining, hooks = answer if isinstance(answer, tuple) else (answer, [])
        done.update(set(modules) - set(remaining or {}))
        after += list(hooks or [])
    return done, after


def split(
    one: Registered, tensors: dict[str, Tensor], split_map: Any, quant_map: Any, bases: list[str], verbose: int
) -> Any:
    """Lets a handler split fused weights of its format: (tensors, the bases that were split), or None if it cannot."""
    function = getattr(one.module, "split_fused_weights", None)
    if not callable(function):
        return None
    settings = {
        "split_map": split_map, "fused_split_map": split_map, "quantization_map": quant_map, "allowed_bases": bases,
        "default_dtype": None, "verboseLevel": verbose,
    }  # fmt: skip
    return call(one.name, function, [tensors, split_map], settings)
