"""Adapted linear layers and convolutions: the layer's own product, and its adapters' beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..quant.layers import QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear
from .adapted import Adapters, Inner
from .dora import Factors
from .layers import AdaptedLayer
from .numbers import is_plain, plain_forward, weight_numbers
from .pieces import Piece
from .strengths import Pattern, Strengths, is_recorded
from .terms import BESIDE, INPUTS, OUTPUTS, RotationTerm

__all__ = ["ConvolutionAdapters", "LinearAdapters"]

Numbers = Callable[[], Tensor]
"""Gives the layer's weight, in its turn."""
_FRESH = tuple(
    cls.forward
    for cls in (nn.Linear, QuantLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, QuantConv1d, QuantConv2d, QuantConv3d)
)
"""Forwards that give a tensor which nobody else has, so that it may be added to in place."""


class _ProductAdapters(Adapters):
    """What both have in common."""

    dimensions = 0
    """Of the outputs behind the channels."""
    _groups = 1

    def __init__(self, layer: AdaptedLayer, pieces: Sequence[tuple[int, Piece]], strengths: Strengths) -> None:
        super().__init__(layer, pieces, strengths)
        self._is_transposed = layer.is_transposed
        self._columns = layer.shape[1]
        self._is_fresh = type(layer.module).forward in _FRESH
        self._has_float8 = plain_forward(layer.module, _nothing) is not _nothing
        # The forward of such a layer cannot compute, so that there is none to leave it to.
        self._always |= self._has_float8
        self._factors = Factors()

    def forward(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's outputs with its adapters."""
        base = plain_forward(module, inner) if self._has_float8 else inner
        if not is_recorded() and self.is_idle():
            return base(*args, **kwargs)
        inputs, args, kwargs = _split(args, kwargs)
        found: list[Tensor] = []
        if len(self.magnitudes):
            found = self._factors.of(self, module, lambda: self._numbers(module, base, inputs))
        # From the last magnitude in to the first: what it multiplies, those before it have been given already.
        given = [inputs] * (len(found) + 1)
        for number in range(len(found) - 1, -1, -1):
            scale = self._by_channel(found[number].repeat(self._groups)) if self.magnitudes[number].axis == 1 else None
            given[number] = given[number + 1] if scale is None else given[number + 1] * scale.to(inputs.dtype)
        outputs = base(self._given(given[0]), *args, **kwargs)
        self.on(outputs.device)
        if not self._is_fresh:
            outputs = outputs.clone()
        outputs = self._add(module, outputs, given[0], lambda: self._numbers(module, base, inputs))
        bias = module._parameters.get("bias") if found else None
        for number, magnitude in enumerate(self.magnitudes):
            outputs = self._add_decomposed(module, outputs, given[number], number)
            if magnitude.axis == 0:
                factor = found[number]
                outputs.mul_(self._by_channel(factor))
                if bias is not None:
                    outputs.add_(self._by_channel(bias.float() * (1 - factor)))
        added = self.bias()
        return outputs if added is None else outputs.add_(self._by_channel(added))

    def _given(self, inputs: Tensor) -> Tensor:
        """What the layer is given."""
        found = [term for term in self.live_terms(INPUTS) if not term.by_weight]
        if not found:
            return inputs
        self.on(inputs.device)
        if len(found) == 1:
            return found[0].given(inputs, self.dimensions)
        made = inputs
        for term in found:
            made = made + (term.given(inputs, self.dimensions) - inputs)
        return made

    def _numbers(self, module: nn.Module, base: Inner, inputs: Tensor) -> Tensor:
        dtype = inputs.dtype if inputs.is_floating_point() else torch.bfloat16
        numbers = weight_numbers(module, base, self._columns, dtype)
        return numbers.t() if self._is_transposed else numbers

    def _by_channel(self, vector: Tensor) -> Tensor:
        return vector.reshape(-1, *[1] * self.dimensions)

    def _add(self, module: nn.Module, outputs: Tensor, inputs: Tensor, numbers: Numbers) -> Tensor:
        raise NotImplementedError

    def _add_decomposed(self, module: nn.Module, outputs: Tensor, inputs: Tensor, number: int) -> Tensor:
        raise NotImplementedError


class LinearAdapters(_ProductAdapters):
    """A linear layer's adapters."""

    _short: Optional[tuple[Tensor, Tensor, Tensor, Pattern]] = None
    """The factors and multipliers, where there is nothing but stacked low-rank adapters on a layer of a known class: most layers. The
    host then spends no more on it than the products."""

    def is_idle(self) -> bool:
        """Whether all its adapters are at zero now."""
        return super().is_idle() if self._short is None else self._short[3].live is None

    def place(self, device: torch.device, moves: bool = True) -> None:
        """Makes it compute on a device."""
        super().place(device, moves)
        stack = self.stack
        alone = not self._always and not len(self.terms) and self.biases is None and self._is_fresh
        self._short = (stack.down, stack.up, stack.strength, stack.pattern) if stack is not None and alone else None

    def leave(self) -> None:
        """Takes its tensors off the device."""
        self._short = None
        super().leave()

    def forward(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's outputs with its adapters."""
        if self._short is None or len(args) != 1 or kwargs or is_recorded():
            return super().forward(module, inner, args, kwargs)
        down, up, strength, pattern = self._short
        live = pattern.live
        if live is None:
            return inner(*args)
        if live[1] - live[0] != pattern.size:
            down, up, strength = down[live[0] : live[1]], up[:, live[0] : live[1]], strength[live[0] : live[1]]
        inputs = args[0]
        plain = _plain_weights(module, inner, inputs, down)
        if plain is not None:
            weight, bias = plain
            rows = inputs.reshape(-1, inputs.shape[-1])
            made, factor = rows @ down.t(), pattern.common
            if factor is None or bias is None:
                made, factor = made.mul_(strength), 1.0
            # The adapters' share first, which the layer's product is added to as it is made: one pass over the outputs fewer.
            up = up.t()
            made = made @ up if bias is None else torch.addmm(bias, made, up, alpha=factor)
            return made.addmm_(rows, weight.t()).view(*inputs.shape[:-1], made.shape[-1])
        outputs = inner(*args)
        if outputs.dtype != down.dtype or outputs.device != self._device or not outputs.is_contiguous():
            self.on(outputs.device)
            return self._add(module, outputs, inputs, lambda: self._numbers(module, inner, inputs))
        rows = inputs.to(outputs.device, outputs.dtype)
        made = (rows.reshape(-1, rows.shape[-1]) @ down.t()).mul_(strength)
        outputs.view(-1, outputs.shape[-1]).addmm_(made, up.t())
        return outputs

    def _add(self, module: nn.Module, outputs: Tensor, inputs: Tensor, numbers: Numbers) -> Tensor:
        made = outputs.reshape(-1, outputs.shape[-1])
        rows = _rows(inputs, made)
        own: Optional[Tensor] = None
        for term in self.live_terms(OUTPUTS):
            if own is None:
                bias = module._parameters.get("bias")
                own = made.clone() if bias is None else made - bias.to(made.dtype)
            made.add_(term.rotated(own) - own)
        more = None if own is None else self.own_bias(bias)
        if more is not None:
            made.add_(more)
        _low_rank(self.stack, made, rows)
        for term in self.live_terms(BESIDE):
            term.add(made, rows)
        return made.view(outputs.shape)

    def _add_decomposed(self, module: nn.Module, outputs: Tensor, inputs: Tensor, number: int) -> Tensor:
        magnitude = self.magnitudes[number]
        made = outputs.reshape(-1, outputs.shape[-1])
        rows = _rows(inputs, made)
        _low_rank(magnitude.stack, made, rows)
        if magnitude.term is not None:
            magnitude.term.add(made, rows)
        return made.view(outputs.shape)


class ConvolutionAdapters(_ProductAdapters):
    """A convolution's adapters: a convolution into the rank and one by points out of it; what has groups, or is no product of two
    factors, with the difference to the weight."""

    def __init__(self, layer: AdaptedLayer, pieces: Sequence[tuple[int, Piece]], strengths: Strengths) -> None:
        super().__init__(layer, pieces, strengths)
        self.dimensions = len(layer.shape) - 2
        self._shape = layer.shape
        self._groups = layer.module.groups
        for term in self.terms:
            if (
                isinstance(term, RotationTerm)
                and self._groups != 1
                and not term.stays_within(self.outputs // self._groups)
            ):
                # Its rows then meet inputs of another group than they did, as no outputs would.
                term.by_weight = True

    def _add(self, module: nn.Module, outputs: Tensor, inputs: Tensor, numbers: Numbers) -> Tensor:
        like = self._like(outputs)
        deltas = [term.delta(like) for term in self.live_terms(BESIDE)]
        filters = [term for term in self.live_terms(INPUTS) if term.by_weight]
        turned = list(self.live_terms(OUTPUTS))
        across = [term for term in turned if term.by_weight]
        turned = [term for term in turned if not term.by_weight]
        weight = numbers() if filters or across else like
        if filters:  # of its own outputs too, which others change
            outputs = self._with(module, outputs, inputs, None, [term.delta(weight) for term in filters])
        deltas += [term.delta(weight) for term in across]
        if turned:
            bias = module._parameters.get("bias")
            own = outputs if bias is None else outputs - self._by_channel(bias.to(outputs.dtype))
            at = outputs.dim() - self.dimensions - 1
            columns = own.movedim(at, -1)
            flat = columns.reshape(-1, columns.shape[-1])
            for term in turned:
                outputs = outputs + (term.rotated(flat) - flat).reshape(columns.shape).movedim(-1, at)
            more = self.own_bias(bias)
            if more is not None:
                outputs = outputs + self._by_channel(more.to(outputs.dtype))
        return self._with(module, outputs, inputs, self.stack, deltas)

    def _add_decomposed(self, module: nn.Module, outputs: Tensor, inputs: Tensor, number: int) -> Tensor:
        magnitude = self.magnitudes[number]
        deltas = [] if magnitude.term is None else [magnitude.term.delta(self._like(outputs))]
        return self._with(module, outputs, inputs, magnitude.stack, deltas)

    def _with(self, module: Any, outputs: Tensor, inputs: Tensor, stack: Any, deltas: list[Tensor]) -> Tensor:
        inputs = inputs.to(outputs.dtype)
        if stack is not None and stack.is_live():
            if self._groups != 1:
                deltas = [*deltas, stack.delta(0, self.outputs).reshape(self._shape)]
            else:
                down, up, strength = stack.live()
                made = module._conv_forward(inputs, down.to(outputs.dtype), None).mul_(self._by_channel(strength))
                at = outputs.dim() - self.dimensions - 1
                outputs = outputs + torch.matmul(made.movedim(at, -1), up.to(outputs.dtype).t()).movedim(-1, at)
        for delta in deltas:
            outputs = outputs + module._conv_forward(inputs, delta.to(outputs.dtype), None)
        return outputs

    def _like(self, outputs: Tensor) -> Tensor:
        """A tensor of the weight's shape, of which nobody reads the numbers."""
        return torch.empty(1, dtype=torch.float32, device=outputs.device).expand(self._shape)


def _plain_weights(
    module: Any, inner: Inner, inputs: Tensor, down: Tensor
) -> Optional[tuple[Tensor, Optional[Tensor]]]:
    """The weight and bias of a layer that multiplies its inputs by them and does nothing else, all in the adapters' type and on
    their device; else None. Read once: parametrizations compute them."""
    if getattr(inner, "__func__", None) is not nn.Linear.forward or inner.__self__ is not module:
        return None
    weight, bias, dtype, device = module.weight, module.bias, down.dtype, down.device
    alike = (
        type(inputs) in (Tensor, nn.Parameter)
        and inputs.dtype == weight.dtype == dtype
        and inputs.device == weight.device == device
        and (bias is None or bias.dtype == dtype)
        and is_plain(weight)
        and inputs.shape[-1:] == weight.shape[1:]
        and not torch.is_autocast_enabled(device.type)
    )
    return (weight, bias) if alike else None


def _nothing(input: Tensor) -> Tensor:
    return input


def _rows(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Inputs as a matrix, in the type and on the device of the outputs."""
    return inputs.reshape(-1, inputs.shape[-1]).to(outputs.device, outputs.dtype)


def _low_rank(stack: Any, outputs: Tensor, rows: Tensor) -> None:
    """Adds stacked low-rank adapters: two products."""
    if stack is None or not stack.is_live():
        return
    down, up, strength = stack.live()
    dtype = outputs.dtype
    # The multipliers are float32: the product is made in that and rounded once.
    made = (rows @ down.to(dtype).t()).mul_(strength)
    outputs.addmm_(made.to(dtype), up.to(dtype).t())


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The input apart from what else a layer is given."""
    if args:
        return args[0], args[1:], kwargs
    for name in ("input", "x", "hidden_states"):
        if name in kwargs:
            return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}
    raise WeightsError(f"an adapted layer was called with {sorted(kwargs)} and no input that is known")
