"""Adapted layers whose weight is changed for the time of a forward: norms, bare parameters, and what lies in modules that hand their
parts' weights to one operator, such as `nn.MultiheadAttention`. The parameter object stays; another tensor takes its place meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calls import WholeModule
from ..uncompiled import uncompiled
from .adapted import Adapters, Inner, Stack
from .dora import Factors, factors, scaled
from .layers import AdaptedLayer
from .numbers import is_float8, weight_numbers
from .pieces import Piece
from .strengths import Strengths, is_recorded
from .terms import BESIDE, OUTPUTS

__all__ = ["EmbeddingAdapters", "Swap", "SwappedAdapters"]


class EmbeddingAdapters(Adapters):
    """An embedding's adapters: rows of whole differences and of low-rank ones are looked up beside its own, which may be rotated. A
    magnitude is of the columns, so that its factors multiply what is looked up."""

    def __init__(self, layer: AdaptedLayer, pieces: Sequence[tuple[int, Piece]], strengths: Strengths) -> None:
        super().__init__(layer, pieces, strengths)
        self._columns = layer.shape[1]
        self._factors = Factors()

    def forward(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The rows with the differences'."""
        outputs = inner(*args, **kwargs)
        if not is_recorded() and self.is_idle():
            return outputs
        self.on(outputs.device)
        dtype = outputs.dtype
        indices = args[0] if args else kwargs["input"]
        turned = list(self.live_terms(OUTPUTS))
        if turned:
            own = outputs.float().reshape(-1, self._columns)
            for term in turned:
                outputs = outputs + (term.rotated(own) - own).reshape(outputs.shape).to(dtype)
        outputs = _looked_up(self.stack, indices, outputs)
        for term in self.live_terms(BESIDE):
            outputs = outputs + (F.embedding(indices, term.weight) * term.strength).to(dtype)
        if len(self.magnitudes):
            found = self._factors.of(self, module, lambda: weight_numbers(module, inner, self._columns, dtype))
            for magnitude, factor in zip(self.magnitudes, found):
                outputs = (_looked_up(magnitude.stack, indices, outputs) * factor).to(dtype)
        return outputs


def _looked_up(stack: Optional[Stack], indices: Tensor, outputs: Tensor) -> Tensor:
    """Outputs with rows of stacked low-rank adapters."""
    if stack is None or not stack.is_live():
        return outputs
    down, up, strength = stack.live()
    return outputs + ((F.embedding(indices, up) * strength).to(down.dtype) @ down).to(outputs.dtype)


class SwappedAdapters(Adapters):
    """Adapters of one parameter, and of the bias beside it, that are added to them."""

    def __init__(self, layer: AdaptedLayer, pieces: Sequence[tuple[int, Piece]], strengths: Strengths) -> None:
        super().__init__(layer, pieces, strengths)
        # Not as attributes: neither module becomes a part of this one.
        self.__dict__["_owner"] = layer.module
        self._parameter = layer.parameter
        self._shape = layer.shape
        self._is_transposed = layer.is_transposed

    def changed(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """The parameters that are others now, in their turn."""
        owner = self.__dict__["_owner"]
        weight = owner._parameters.get(self._parameter)
        if weight is not None and (self._always or self._changes_weight()):
            self.on(weight.device)
            numbers = (weight.t() if self._is_transposed else weight).reshape(self._shape)
            made = self._changed(numbers)
            yield owner, self._parameter, _rounded(made.t() if self._is_transposed else made, weight)
        bias = owner._parameters.get("bias")
        if bias is not None and (self.biases is not None or len(self.terms)):
            self.on(bias.device)
            found = [one for one in (self.bias(), self.own_bias(bias)) if one is not None]
            if found:
                added = torch.stack([one.reshape(bias.shape) for one in found]).sum(0)
                yield owner, "bias", _rounded(bias.float() + added, bias)

    def _changes_weight(self) -> bool:
        if self.stack is None and not len(self.terms):
            return False
        stacked = self.stack is not None and self.stack.is_live()
        return stacked or is_recorded() or any(term.pattern.live for term in self.terms)

    def _changed(self, numbers: Tensor) -> Tensor:
        whole = numbers.shape[0] if numbers.dim() else 1
        if not numbers.dim():
            numbers = numbers.reshape(1)
        deltas = self.deltas(numbers)
        made = self.plain_rows(numbers, deltas, 0, whole)
        if len(self.magnitudes):
            for magnitude, factor in zip(self.magnitudes, factors(self, numbers)):
                made = scaled(magnitude.added(made, numbers, 0, whole), magnitude.axis, factor, 0, whole)
        return made.reshape(self._shape)


class Swap(WholeModule):
    """Everything that is swapped around one module's forward."""

    def __init__(self, layers: Sequence[SwappedAdapters]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward with its parameters changed."""
        saved: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for layer in self.layers:
                for owner, name, tensor in layer.changed():
                    saved.append((owner._parameters, name, owner._parameters[name]))
                    owner._parameters[name] = tensor
            return inner(*args, **kwargs)
        finally:
            while saved:
                parameters, name, before = saved[-1]
                parameters[name] = before
                saved.pop()

    def is_idle(self) -> bool:
        """Whether nothing is changed now."""
        return all(layer.is_idle() for layer in self.layers)


# A compiler cannot follow parameters that are others for a moment: it cuts its graph around this call.
uncompiled(Swap.forward)


def _rounded(numbers: Tensor, like: Tensor) -> Tensor:
    """In the type of the parameter; what an 8-bit float cannot hold is the largest that it can."""
    if is_float8(like.dtype):
        largest = torch.finfo(like.dtype).max
        numbers = numbers.clamp(-largest, largest)
    return numbers.to(like.dtype)
