"""The models of a pipeline, by id, and what their hints say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import nn

from ..errors import ModelError
from ..towers import Tower, find_towers, has_forward

__all__ = ["Component", "components_of", "describe"]

IGNORED = "_mmgp_ignore_models"


@dataclass
class Component:
    """One model to manage."""

    name: str
    """Its id."""
    model: nn.Module
    """The module that holds its weights: for a mere wrapper, what it wraps."""
    towers: list[Tower] = field(default_factory=list)
    """Its lists of repeated blocks, and the blocks that a hint makes of single modules."""
    hooked: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Methods besides forward that need the model."""
    budget: Optional[int] = None
    """Its own hint, in bytes."""
    dtype: Optional[torch.dtype] = None
    """What float32 arguments of its entry points become."""


def components_of(pipe: Any) -> dict[str, nn.Module]:
    """The models of a pipeline or a dictionary, without those it says to ignore. The same model twice is there once."""
    try:
        entries = pipe if isinstance(pipe, Mapping) else getattr(pipe, "components", None)
    except Exception as error:
        raise ModelError(f"the components of this {type(pipe).__name__} cannot be read: {error}") from error
    if not isinstance(entries, Mapping):
        raise ModelError(
            f"a {type(pipe).__name__} is no pipeline: give an object with components, as diffusers' pipelines have, or a "
            f"dictionary of models by id; offload.extract_models finds models in other objects"
        )
    ignored = getattr(pipe, IGNORED, None) or ()
    if not _are_names(ignored):
        raise ModelError(f"{IGNORED} is {ignored!r}: it is a list of model ids")
    found: dict[str, nn.Module] = {}
    for name, model in entries.items():
        if isinstance(model, nn.Module) and name not in ignored:
            if not isinstance(name, str):
                raise ModelError(f"the models' ids are texts, and {name!r} is a {type(name).__name__}")
            inner = _unwrapped(model)
            if any(True for _ in inner.parameters()) and all(inner is not other for other in found.values()):
                found[name] = inner
    if not found:
        raise ModelError(f"there is no model with weights in this {type(pipe).__name__}")
    return found


def describe(name: str, model: nn.Module) -> Component:
    """A model with its towers and hints; ModelError for a hint that names what is not there."""
    component = Component(name, model, find_towers(model))
    for path in _texts(model, name, "_offload_separate_blocks"):
        component.towers.append(Tower(path, ((path, _part(model, name, path, component.towers)),)))
    for module in (model, *model.children()):
        for method in _texts(module, name, "_offload_hooks"):
            if not callable(getattr(module, method, None)):
                raise ModelError(f"_offload_hooks of {name} names {method!r}, which is no method of {_kind(module)}")
            if method != "forward":
                component.hooked.append((module, method))
    budget = getattr(model, "_budget", None)
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise ModelError(f"_budget of {name} is {budget!r}: it is a number of bytes, 0 for no limit")
        component.budget = budget
    component.dtype = _dtype(model, name, "_model_dtype")
    return component


def to_device(device: torch.device, dtype: Optional[torch.dtype]) -> Optional[Callable[[Any], Any]]:
    """What is done to arguments of entry points: tensors on the CPU go to the device, and float32 ones become `dtype`, where
    the model says that it has one. None if that is nothing."""
    if device.type == "cpu" and dtype is None:
        return None

    def adapt(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            other = dtype if value.dtype == torch.float32 and dtype is not None else value.dtype
            moves = value.device.type == "cpu" and device.type != "cpu"
            return value.to(device if moves else value.device, other) if moves or other != value.dtype else value
        if type(value) in (tuple, list):
            return type(value)(adapt(one) for one in value)
        if type(value) is dict:
            return {key: adapt(one) for key, one in value.items()}
        return value

    return adapt


def _unwrapped(model: nn.Module) -> nn.Module:
    """What a mere wrapper wraps: its only child, if that is a model by itself and the wrapper has no weights of its own."""
    children = [child for child in model.children()]
    owns = any(True for _ in model.parameters(recurse=False)) or any(True for _ in model.buffers(recurse=False))
    if len(children) != 1 or owns:
        return model
    child = children[0]
    is_model = hasattr(child, "config") or hasattr(child, "base_model")
    return child if is_model and has_forward(child) else model


def _part(model: nn.Module, name: str, path: str, towers: list[Tower]) -> nn.Module:
    """The module that a hint makes a block of its own."""
    try:
        part = model.get_submodule(path)
    except AttributeError:
        raise ModelError(f"_offload_separate_blocks of {name} names {path!r}, which it does not have") from None
    if part is model or not has_forward(part):
        raise ModelError(
            f"_offload_separate_blocks of {name} names {path!r}, which is no module with a forward inside it"
        )
    within = {id(sub) for sub in part.modules()}
    for tower in towers:
        for block, module in tower.blocks:
            if id(module) in within or any(sub is part for sub in module.modules()):
                raise ModelError(
                    f"_offload_separate_blocks of {name} names {path!r}, which shares modules with {block}"
                )
    return part


def _texts(module: nn.Module, name: str, hint: str) -> list[str]:
    given = module.__dict__.get(hint, getattr(type(module), hint, None))
    if given is None:
        return []
    names = [given] if isinstance(given, str) else given
    if not _are_names(names):
        raise ModelError(f"{hint} of {name} is {given!r}: it is a list of names")
    return list(names)


def _are_names(given: Any) -> bool:
    return isinstance(given, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in given)


def _dtype(model: nn.Module, name: str, hint: str) -> Optional[torch.dtype]:
    dtype = getattr(model, hint, None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ModelError(f"{hint} of {name} is {dtype!r}: it is a floating-point dtype")
    return dtype


def _kind(module: nn.Module) -> str:
    return type(module).__name__
