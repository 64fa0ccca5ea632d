"""Layers of an application's own: its class of linear layers, in the place of a model's."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import QuantizationError
from .calling import call
from .merging import Foreign
from .registry import Registered

__all__ = ["foreign_layer", "linear_class", "prepare", "split_foreign"]


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


def foreign_layer(name: str, module: nn.Module, foreign: Foreign) -> nn.Module:
    """The handler's layer for a module of the model, whose tensors are yet to be loaded."""
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
    for scale in ("input_scale", "output_scale"):
        # Of quanto's layers; files of weights alone have none, and 1 is what they are then.
        held = layer._buffers.get(scale)
        if held is not None and held.is_meta:
            layer._buffers[scale] = torch.ones(held.shape, dtype=held.dtype, device="cpu")
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


def split_foreign(
    foreign: Mapping[str, Foreign], split_map: Optional[Mapping[str, Any]], modules: Container[str], verbose: int = -1
) -> dict[str, Foreign]:
    """The modules of an application's formats, fused ones split by their handlers for a model that has `modules`.

    QuantizationError if a handler cannot.
    """
    result = dict(foreign)
    for name, one in foreign.items():
        key = next((key for key in split_map or () if name == key or name.endswith("." + key)), None)
        if key is None or name in modules:
            continue
        function = getattr(one.handler.module, "split_fused_weights", None)
        if not callable(function):
            raise QuantizationError(f"{name} is fused, and the handler {one.handler.name} has no split_fused_weights()")
        tensors = {f"{name}.{tensor}": value for tensor, value in one.tensors.items()}
        quant_map = {name: {"weights": one.kind, "activations": "none"}}
        settings = {
            "split_map": split_map, "fused_split_map": split_map, "quantization_map": quant_map, "allowed_bases": [name],
            "default_dtype": None, "verboseLevel": verbose,
        }  # fmt: skip
        answer = call(one.handler.name, function, [tensors], settings, "split_fused_weights")
        made = answer[0] if isinstance(answer, tuple) else answer
        base = name[: len(name) - len(key)]
        entry = split_map[key] if split_map else ()
        parts = [base + part for part in (entry.get("mapped_modules", ()) if isinstance(entry, Mapping) else entry)]
        del result[name]
        for part in parts:
            own = {tensor[len(part) + 1 :]: value for tensor, value in made.items() if tensor.startswith(part + ".")}
            if not own:
                raise QuantizationError(
                    f"split_fused_weights of the handler {one.handler.name} gives nothing for {part}"
                )
            result[part] = Foreign(one.handler, one.kind, own)
    return result
