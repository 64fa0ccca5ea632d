"""All active adapters of one layer: what every adapted layer is, whatever it computes.

    y = base(x) + ((x·Aᵀ) ∘ m)·Bᵀ     A, B  the factors of all its low-rank adapters, one below the other: two products
      + terms                         m     their slice of the multipliers' vector
      + biases

Its tensors are parameters, so that they are placed, streamed and counted as a layer's are. They are no part of the model's module
tree, and the model is none of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..calls import WholeModule
from .dora import Magnitude
from .layers import AdaptedLayer
from .pieces import Piece, Rows
from .strengths import Pattern, Strengths, is_recorded
from .terms import BESIDE, INPUTS, OUTPUTS, Term

__all__ = ["Adapters", "Inner", "Stack"]

Inner = Callable[..., Any]
"""The forward that a layer has without adapters."""


class Stack(nn.Module):
    """Low-rank adapters one below the other."""

    def __init__(self, lows: Sequence[tuple[int, Piece]], outputs: int, strengths: Strengths) -> None:
        super().__init__()
        self._sources = [(piece.low, piece.rows) for _, piece in lows if piece.low is not None]
        self.pattern = strengths.pattern([(adapter, piece.scale, piece.low.rank) for adapter, piece in lows])
        self._outputs = outputs
        self.scatter()
        self.strength: Tensor = torch.zeros(0)

    def scatter(self) -> None:
        """Leaves the factors to the files that they are from."""
        one = self._sources[0][0]
        self.down = _unplaced(self.pattern.size, *one.down.shape[1:], dtype=one.down.dtype)
        self.up = _unplaced(self._outputs, self.pattern.size, dtype=one.up.dtype)

    def gather(self, device: torch.device) -> None:
        """Puts the adapters' factors together, on a device. What is one adapter's alone stays where it is, in its file."""
        if len(self._sources) == 1 and device.type == "cpu" and _is_whole(self._sources[0][1], self.up.shape[0]):
            low = self._sources[0][0]
            self.down, self.up = _frozen(low.down), _frozen(low.up)
            return
        down = torch.empty(self.down.shape, dtype=self.down.dtype, device=device)
        up = torch.empty(self.up.shape, dtype=self.up.dtype, device=device)
        at = 0
        for low, rows in self._sources:
            past = at + low.rank
            down[at:past].copy_(low.down, non_blocking=True)
            # One product serves all parts of a fused layer: those that are not covered have rows of zeros.
            first, last = (0, up.shape[0]) if rows is None else rows
            up[:first, at:past].zero_()
            up[first:last, at:past].copy_(low.up, non_blocking=True)
            up[last:, at:past].zero_()
            at = past
        self.down, self.up = _frozen(down), _frozen(up)

    def is_live(self) -> bool:
        """Whether any of it is computed now."""
        return is_recorded() or self.pattern.live is not None

    def live(self) -> tuple[Tensor, Tensor, Tensor]:
        """Both factors and the multipliers, of the adapters that are not at zero now. All of them for compiled code, which must
        not depend on multipliers."""
        if is_recorded():  # asked first: what is looked at is what compiled code depends on
            return self.down, self.up, self.strength
        rows = self.pattern.live
        if rows is None or rows == (0, self.pattern.size):
            return self.down, self.up, self.strength
        return self.down[rows[0] : rows[1]], self.up[:, rows[0] : rows[1]], self.strength[rows[0] : rows[1]]

    def delta(self, first: int, past: int) -> Tensor:
        """Rows of the difference to the weight, in float32."""
        down, up, strength = self.live()
        return (up[first:past].float() * strength) @ down.float().flatten(1)


class Adapters(WholeModule):
    """All active adapters of one layer, and its forward with them."""

    def __init__(self, layer: AdaptedLayer, pieces: Sequence[tuple[int, Piece]], strengths: Strengths) -> None:
        super().__init__()
        self.name = layer.name
        self.outputs = layer.shape[0] if layer.shape else 1
        plain = [(adapter, piece) for adapter, piece in pieces if piece.magnitude is None]
        lows = [(adapter, piece) for adapter, piece in plain if piece.low is not None]
        self.stack = Stack(lows, self.outputs, strengths) if lows else None
        terms = [piece.term(strengths, adapter) for adapter, piece in plain]
        self.terms = nn.ModuleList(term for term in terms if term is not None)
        self.magnitudes = nn.ModuleList()
        for adapter, piece in pieces:
            if piece.magnitude is not None:
                stack = Stack([(adapter, piece)], self.outputs, strengths) if piece.low is not None else None
                term = piece.term(strengths, adapter)
                whole = strengths.pattern([(adapter, 1.0, 1)])
                self.magnitudes.append(Magnitude(stack, term, piece.magnitude, piece.axis, piece.rows, whole))
        biases = [(adapter, piece) for adapter, piece in pieces if piece.bias is not None]
        self.bias_pattern: Optional[Pattern] = None
        self.biases: Optional[nn.Parameter] = None
        self.bias_strength: Tensor = torch.zeros(0)
        if biases:
            self.bias_pattern = strengths.pattern([(adapter, _bias_scale(piece), 1) for adapter, piece in biases])
            rows = [_spread_vector(piece.bias, piece.rows, self.outputs) for _, piece in biases]
            self.biases = nn.Parameter(torch.stack(rows), requires_grad=False)
        self._strengths = strengths
        self._device: Optional[torch.device] = None
        self._always = bool(len(self.magnitudes)) or any(term.stays_at_zero for term in self.terms)

    def forward(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of the layer `module`, whose own forward is `inner`, with its adapters."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Whether all its adapters are at zero now, so that it computes what it does without them."""
        return not self._always and not any(pattern.live for pattern in self._patterns())

    def place(self, device: torch.device, moves: bool = True) -> None:
        """Makes it compute with the multipliers on a device; if it `moves`, brings tensors there that are elsewhere."""
        with torch.inference_mode(False), torch.no_grad():
            if moves:
                self._move(device)
            for part, attribute, pattern in self._slots():
                setattr(part, attribute, self._strengths.of(pattern, device))
        self._device = device

    def leave(self) -> None:
        """Takes its tensors off the device, to where they came from."""
        with torch.inference_mode(False), torch.no_grad():
            for part in self.modules():
                if isinstance(part, Stack):
                    part.scatter()
            for parameter in self.parameters():
                if parameter.device.type not in ("cpu", "meta"):
                    parameter.data = parameter.data.to("cpu")
        self._device = None

    def _move(self, device: torch.device) -> None:
        for part in self.modules():
            if isinstance(part, Stack) and part.down.is_meta:
                part.gather(device)
        for parameter in self.parameters():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)

    def on(self, device: torch.device) -> None:
        """Follows the layer to where it computes now."""
        if device != self._device:
            self.place(device)

    @property
    def device(self) -> Optional[torch.device]:
        """Where it computes."""
        return self._device

    def strengths(self) -> tuple[Any, ...]:
        """All multipliers that it depends on."""
        return tuple(p.values for p in self._patterns()), tuple(m.values() for m in self.magnitudes)

    def bias(self) -> Optional[Tensor]:
        """What its adapters add to the bias, in float32."""
        if self.biases is None or self.bias_pattern is None:
            return None
        if not is_recorded() and self.bias_pattern.live is None:
            return None
        return self.bias_strength @ self.biases

    def live_terms(self, changes: int) -> Iterator[Term]:
        """The terms that are computed now, of those that change inputs, outputs or neither."""
        compiling = is_recorded()
        for term in self.terms:
            if term.changes == changes and (compiling or term.stays_at_zero or term.pattern.live):
                yield term

    def plain_rows(self, numbers: Tensor, deltas: list[Tensor], first: int, past: int) -> Tensor:
        """Rows of the weight with all adapters but those with a magnitude, in float32."""
        made = numbers[first:past].float()
        if self.stack is not None and self.stack.is_live():
            made = made + self.stack.delta(first, past).reshape(made.shape)
        for delta in deltas:
            made = made + delta[first:past]
        return made

    def deltas(self, numbers: Tensor) -> list[Tensor]:
        """What terms add to the weight. Those of outputs see what those of inputs made of it."""
        found = [term.delta(numbers) for term in self.live_terms(INPUTS)]
        turned = list(self.live_terms(OUTPUTS))
        own = numbers.float() + torch.stack(found).sum(0) if found and turned else numbers
        found += [term.delta(own) for term in turned]
        return found + [term.delta(numbers) for term in self.live_terms(BESIDE)]

    def own_bias(self, bias: Optional[Tensor]) -> Optional[Tensor]:
        """What terms add to the layer's own bias, in float32; None for nothing."""
        total: Optional[Tensor] = None
        if bias is not None:
            for term in self.live_terms(OUTPUTS):
                added = term.bias(bias)
                if added is not None:
                    total = added if total is None else total + added
        return total

    def _patterns(self) -> Iterator[Pattern]:
        if self.stack is not None:
            yield self.stack.pattern
        for term in self.terms:
            yield term.pattern
        if self.bias_pattern is not None:
            yield self.bias_pattern

    def _slots(self) -> Iterator[tuple[Any, str, Pattern]]:
        """Where slices of the vector are kept."""
        for part in self.modules():
            if isinstance(part, (Stack, Term)):
                yield part, "strength", part.pattern
            elif isinstance(part, Magnitude):
                yield part, "strength", part.whole
        if self.bias_pattern is not None:
            yield self, "bias_strength", self.bias_pattern


def _unplaced(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter that is nowhere yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _is_whole(rows: Rows, outputs: int) -> bool:
    return rows is None or rows == (0, outputs)


def _spread_vector(vector: Tensor, rows: Rows, outputs: int) -> Tensor:
    vector = vector.reshape(-1)
    if _is_whole(rows, outputs):
        return vector
    whole = vector.new_zeros(outputs)
    whole[rows[0] : rows[1]] = vector
    return whole


def _bias_scale(piece: Piece) -> float:
    """A bias difference is added as it is; the bias of an upper factor is multiplied as the factors are."""
    return 1.0 if piece.kind == "diff_bias" else piece.scale
