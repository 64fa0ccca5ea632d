"""Puts quantized weights into a model that is being loaded: layers that keep them packed, numbers for every other place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import nn

from ..errors import QuantizationError
from ..quant.finding import Packed
from ..quant.module import QuantModule
from ..quant.replacing import put, quantized_like, reshaped, takes
from ..quant_router.foreign import foreign_layer, prepare
from ..quant_router.merging import Foreign
from .dtypes import DtypeRules
from .quantized import Entry, numbers_of

__all__ = ["replace_layers"]

Place = tuple[nn.Module, str]


def replace_layers(
    model: nn.Module,
    sd: dict[str, Entry],
    foreign: Mapping[str, Foreign],
    ties: list[dict[str, Place]],
    rules: DtypeRules,
) -> tuple[set[str], list[str], list[Callable[[], Any]]]:
    """Takes packed weights out of `sd`, into layers of the model; those of other places become numbers in it.

    Returns the names that need nothing more, the weights for which the model has no place, and what to call when all is
    loaded. Groups of `ties` that now are one packed weight are taken out too.
    """
    done: set[str] = set()
    unfit: list[str] = []
    for name in [name for name, entry in sd.items() if isinstance(entry, Packed)]:
        packed = sd.pop(name, None)
        if not isinstance(packed, Packed):
            continue  # another name of one that has its layer
        packed.check()
        places = next((places for places in ties if name in places), None)
        if places is None:
            place = _place(model, name)
            places = {} if place is None else {name: place}
        if not places:
            unfit.append(name)
        elif all(takes(module, attribute) for module, attribute in places.values()):
            done.update(_put_layers(model, packed, places, rules))
            if places in ties:
                ties.remove(places)
                for other in places:
                    sd.pop(other, None)
        else:
            module, attribute = places.get(name) or next(iter(places.values()))
            sd[name] = _numbers(packed, module, attribute, rules)
    prepared, after = prepare(model, foreign, rules.default, -1)
    for name, one in foreign.items():
        if name in prepared:
            done.update(f"{name}.{own}" for own in _own_names(model, name))
            continue
        module = _module(model, name)
        if module is None:
            unfit.append(f"{name}.weight")
            continue
        put(model, name, foreign_layer(name, module, one))
        # Its own loader takes them, with all the others.
        sd.update({f"{name}.{tensor}" if name else tensor: value for tensor, value in one.tensors.items()})
    return done, unfit, after


def _own_names(model: nn.Module, name: str) -> list[str]:
    """What a module that its handler put in has already."""
    module = _module(model, name)
    return [] if module is None else [own for own, parameter in module.named_parameters() if not parameter.is_meta]


def _put_layers(model: nn.Module, packed: Packed, places: Mapping[str, Place], rules: DtypeRules) -> set[str]:
    """One layer for each name of a weight, all with the same parameters."""
    done: set[str] = set()
    first: Optional[QuantModule] = None
    for name, (module, _) in places.items():
        path = name.rpartition(".")[0]
        layer = quantized_like(module, packed, _compute_dtype(module, rules))
        if first is None:
            first = layer
        else:
            layer.weight = first.weight
        put(model, path, layer)
        start = path + "." if path else ""
        done.add(name)
        done.update(start + tensor for tensor in packed.parts)
    return done


def _compute_dtype(module: nn.Module, rules: DtypeRules) -> torch.dtype:
    if isinstance(module, QuantModule):
        return rules.default or module.compute_dtype
    parameter = module._parameters["weight"]
    own = parameter.dtype if parameter.is_floating_point() and parameter.dtype.itemsize > 1 else torch.bfloat16
    return rules.target(module, parameter.__dict__, own)


def _numbers(packed: Packed, module: nn.Module, attribute: str, rules: DtypeRules) -> torch.Tensor:
    """A packed weight as numbers, for a parameter or buffer that no layer multiplies with."""
    held = module._parameters.get(attribute)
    held = held if held is not None else module._buffers.get(attribute)
    if held is None or not held.is_floating_point():
        raise QuantizationError(
            f"{packed.name} is quantized, and the model has there a {None if held is None else held.dtype}"
        )
    if list(held.shape) != packed.weight.shape:
        packed = Packed(packed.name, reshaped(packed, list(held.shape)), packed.parts, packed.handler)
    parts = list(packed.parts.values())
    if len(parts) == 1 and parts[0].dtype == held.dtype and parts[0].shape == held.shape:
        return parts[0]  # FP8 of the model's own: its code knows what it means
    own = held.dtype if held.dtype.itemsize > 1 else torch.bfloat16
    return numbers_of(packed, rules.target(module, held.__dict__, own))


def _module(model: nn.Module, path: str) -> Optional[nn.Module]:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _place(model: nn.Module, name: str) -> Optional[Place]:
    path, _, attribute = name.rpartition(".")
    module = _module(model, path)
    if module is None:
        return None
    if isinstance(module, QuantModule) and attribute == "weight":
        return module, attribute
    known = module._parameters.get(attribute) is not None or module._buffers.get(attribute) is not None
    return (module, attribute) if known else None
