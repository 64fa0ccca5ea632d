"""DoRA: adapters that give the rows, or the columns, of the changed weight a length of their own.

    W' = (g0 + m·(g − g0)) ∘ (W + m·s·B·A) / ‖W + m·s·B·A‖        g0 = ‖W‖, all lengths by row or by column

W is the weight with every adapter of the layer that has no magnitude, and those with one that come before. W' is never formed in a
forward: a factor by row multiplies outputs, one by column inputs. The factors are computed once a change of multipliers, some rows
of the weight at a time, in the layer's turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from .strengths import Pattern, is_recorded
from .terms import Rows, Term

if TYPE_CHECKING:
    from .adapted import Adapters, Stack

__all__ = ["Factors", "Magnitude", "factors"]

_CHUNK = 1 << 24
"""Numbers of the weight that are looked at together: 64 MiB of float32."""


class Magnitude(nn.Module):
    """One adapter with a magnitude: its delta, and the factors of now."""

    def __init__(
        self, stack: Optional[Stack], term: Optional[Term], magnitude: Tensor, axis: int, rows: Rows, whole: Pattern
    ) -> None:
        super().__init__()
        self.stack = stack
        self.term = term
        self.magnitude = nn.Parameter(magnitude, requires_grad=False)
        self.axis = axis
        self.rows = rows
        self.whole = whole
        """The multiplier by itself."""
        self.strength: Tensor = torch.zeros(1)
        self.factor: Optional[Tensor] = None

    def values(self) -> tuple[Any, ...]:
        """What its factors depend on, of what changes."""
        return self.whole.values

    def lengths(self, before: Tensor, after: Tensor) -> Tensor:
        """The factors, from the squared lengths before and after its delta."""
        before, after = before.sqrt(), after.sqrt()
        if self.rows is not None:
            wanted = before.clone()
            wanted[self.rows[0] : self.rows[1]] = self.magnitude
        else:
            wanted = self.magnitude
        wanted = before + self.strength * (wanted - before)
        factor = torch.where(after > 0, wanted / after, torch.ones_like(after))
        # Squares that overflow would make rows of zeros, which look like numbers.
        factor = torch.where(torch.isfinite(after), factor, after * torch.nan)
        if self.rows is not None:
            inside = torch.zeros_like(factor, dtype=torch.bool)
            inside[self.rows[0] : self.rows[1]] = True
            factor = torch.where(inside, factor, torch.ones_like(factor))
        return factor

    def added(self, rows: Tensor, numbers: Tensor, first: int, past: int) -> Tensor:
        """Rows of the weight with its delta."""
        if self.stack is not None:
            return rows + self.stack.delta(first, past).reshape(rows.shape)
        return rows if self.term is None else rows + self.term.delta(numbers)[first:past]


def scaled(rows: Tensor, axis: int, factor: Tensor, first: int, past: int) -> Tensor:
    """Rows of the weight with a magnitude's factors."""
    if axis == 0:
        return rows * factor[first:past].reshape(-1, *[1] * (rows.dim() - 1))
    return rows * factor.reshape(1, -1, *[1] * (rows.dim() - 2))


@torch.no_grad()
def factors(layer: Adapters, numbers: Tensor) -> list[Tensor]:
    """The factors of each magnitude of a layer, in order; `numbers` are its weight's."""
    outputs = numbers.shape[0]
    step = max(1, _CHUNK // max(1, numbers[0].numel()))
    deltas = layer.deltas(numbers)
    done: list[tuple[Magnitude, Tensor]] = []
    for magnitude in layer.magnitudes:
        size = outputs if magnitude.axis == 0 else numbers.shape[1]
        squares = [numbers.new_zeros(size, dtype=torch.float32) for _ in range(2)]
        for first in range(0, outputs, step):
            past = min(first + step, outputs)
            rows = layer.plain_rows(numbers, deltas, first, past)
            for other, factor in done:
                rows = scaled(other.added(rows, numbers, first, past), other.axis, factor, first, past)
            for total, part in zip(squares, (rows, magnitude.added(rows, numbers, first, past))):
                if magnitude.axis == 0:
                    total[first:past] = part.square().flatten(1).sum(1)
                else:
                    total += part.square().flatten(2).sum((0, 2)) if part.dim() > 2 else part.square().sum(0)
        done.append((magnitude, magnitude.lengths(*squares)))
    return [factor for _, factor in done]


class Factors:
    """The factors of a layer's magnitudes, kept until a multiplier or the weight changes."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._key: Any = None

    def of(self, layer: Adapters, module: nn.Module, numbers: Callable[[], Tensor]) -> list[Tensor]:
        """Those of now; `numbers` gives the weight's, in the layer's turn."""
        if is_recorded():
            return factors(layer, numbers())
        key = (layer.strengths(), _written(module))
        if self._key is None or (layer.device, *key) != self._key:
            self._key = None
            found = numbers()
            layer.on(found.device)
            made = factors(layer, found)
            with torch.inference_mode(False), torch.no_grad():
                if len(self._made) != len(made) or self._made[0].device != made[0].device:
                    self._made = [factor.clone() for factor in made]
                else:  # in place: what was captured reads them
                    for factor, value in zip(self._made, made):
                        factor.copy_(value)
            self._key = (layer.device, *key)
        return self._made


def _written(module: nn.Module) -> Optional[tuple[int, int]]:
    """What changes when somebody writes the weight of a layer; those of attached models are not written."""
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.is_inference():
        return None
    return weight.data_ptr(), weight._version
