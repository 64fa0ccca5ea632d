"""The type of models' float32 weights: converted where they are, some bytes at a time, with what shares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..ownership import overlapping
from ..spans import Span, is_wrapper, span_of
from .components import Component

__all__ = ["Conversion"]

_UNSET = object()


@dataclass(frozen=True)
class _Weight:
    """A float32 parameter in one of the models."""

    name: str
    path: str
    parameter: nn.Parameter
    tensor: Tensor
    """It, or what stands for one whose bytes are not its own to see."""
    locked: bool


class Conversion:
    """What becomes of the float32 parameters of some models: they get the type `default`, or their model's
    `_convertWeightsFloatTo`; None leaves them. Those with a `_lock_dtype`, or in a module that has one, stay."""

    def __init__(self, components: Sequence[Component], default: Optional[torch.dtype]) -> None:
        """Changes nothing. ModelError where models disagree about weights that they share."""
        dtypes = {component.name: _dtype(component, default) for component in components}
        standing: dict[int, Tensor] = {}
        weights = [weight for component in components for weight in _weights(component, standing)]
        self._groups: dict[str, list[tuple[Span, list[nn.Parameter], torch.dtype]]] = {}
        for span, members in overlapping(weights):
            group = [weights[i] for i in members]
            first = group[0]
            for other in group:
                if dtypes[other.name] != dtypes[first.name] and not any(weight.locked for weight in group):
                    raise ModelError(
                        f"{other.name}.{other.path} has the weights of {first.name}.{first.path}, and _convertWeightsFloatTo of the two "
                        f"models differs ({dtypes[other.name]} and {dtypes[first.name]}): give them the same, or the weight a "
                        f"_lock_dtype"
                    )
            dtype = dtypes[first.name]
            if dtype not in (None, torch.float32) and not any(weight.locked for weight in group):
                tensors = list({id(weight.parameter): weight.parameter for weight in group}.values())
                self._groups.setdefault(first.name, []).append((span, tensors, dtype))

    def convert(self, name: str, poll: Callable[[], Any]) -> int:
        """Does it for a model, and for what others have of its weights; how many parameters that were. `poll` may stop it between
        two."""
        count = 0
        for span, tensors, dtype in self._groups.get(name, ()):
            poll()
            with torch.no_grad():
                _convert(span, tensors, dtype)
            count += len(tensors)
        return count


def _convert(span: Span, tensors: list[nn.Parameter], dtype: torch.dtype) -> None:
    """One interval of bytes: what overlaps in it still does afterwards."""
    first = tensors[0]
    if len(tensors) == 1:
        first.data = first.data.to(dtype)
        return
    storage, size = first.untyped_storage(), first.element_size()
    start = span.address - (span_of(first).address - first.storage_offset() * size)
    if start < 0 or start + span.nbytes > storage.nbytes():  # bytes that several storages show
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        return
    whole = torch.empty(0, dtype=first.dtype).set_(storage, start // size, (span.nbytes // size,)).to(dtype)
    for tensor in tensors:
        offset = (span_of(tensor).address - span.address) // size
        tensor.data = whole.as_strided(tensor.shape, tensor.stride(), offset)


def _weights(component: Component, standing: dict[int, Tensor]) -> list[_Weight]:
    """The float32 parameters of a model; `standing` has what stands for wrappers, by their ids."""
    locked = {
        id(parameter)
        for module in component.model.modules()
        if _is_locked(module)
        for parameter in module.parameters(recurse=False)
    }
    found = []
    for path, parameter in component.model.named_parameters():
        if parameter.dtype == torch.float32:
            shown = standing.setdefault(id(parameter), torch.empty(0)) if is_wrapper(parameter) else parameter
            is_locked = id(parameter) in locked or _is_locked(parameter)
            found.append(_Weight(component.name, path, parameter, shown, is_locked))
    return found


def _dtype(component: Component, default: Optional[torch.dtype]) -> Optional[torch.dtype]:
    dtype = getattr(component.model, "_convertWeightsFloatTo", _UNSET)
    if dtype is _UNSET:
        return default
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ModelError(
            f"_convertWeightsFloatTo of {component.name} is {dtype!r}: it is a floating-point dtype or None"
        )
    return dtype


def _is_locked(thing: Any) -> bool:
    return getattr(thing, "_lock_dtype", None) is not None
