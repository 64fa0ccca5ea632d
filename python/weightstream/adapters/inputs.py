"""Terms that change what a layer is given, or multiply what it gives: PEFT's OFT and BOFT, GLoRA's change of inputs, and (IA)³.

    y = base(x + Σ mᵢ Dᵢ(x))        each Dᵢ linear: a rotation less the identity, two factors, or factors less one

So weights of any format stay as they are. What other adapters of the layer add is of the inputs as they came.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .strengths import Pattern
from .terms import INPUTS, OUTPUTS, Rows, Term

__all__ = ["FactorTerm", "InputFactorTerm", "InputLowRankTerm", "InputRotationTerm", "InputTerm"]


class InputTerm(Term):
    """A change of the inputs: of a convolution, of each pixel's channels."""

    changes = INPUTS

    def given(self, inputs: Tensor, dimensions: int) -> Tensor:
        """What the layer is given instead of inputs, which have so many dimensions behind the channels."""
        channels = inputs.movedim(-dimensions - 1, -1) if dimensions else inputs
        made = self.changed(channels.reshape(-1, channels.shape[-1])).to(inputs.dtype).reshape(channels.shape)
        return made.movedim(-1, -dimensions - 1) if dimensions else made

    def changed(self, rows: Tensor) -> Tensor:
        """What becomes of inputs, a vector of them in each row."""
        raise NotImplementedError

    def of_weight(self, rows: Tensor) -> Tensor:
        """What becomes of the weight's rows instead: the transposed map."""
        raise NotImplementedError

    def delta(self, numbers: Tensor) -> Tensor:
        """The difference to the weight that gives the same."""
        channels = numbers.float().movedim(1, -1)
        rows = channels.reshape(-1, channels.shape[-1])
        return (self.of_weight(rows) - rows).reshape(channels.shape).movedim(-1, 1)


class InputRotationTerm(InputTerm):
    """Blocks of inputs are rotated, once or in the stages of a butterfly. A multiplier takes each stage so far from the identity."""

    def __init__(self, pattern: Pattern, stages: Tensor) -> None:
        """`stages` multiply blocks of a row of the weight, less the identity: stage, block, row, column. One block is all."""
        super().__init__(pattern)
        self.keep("stages", stages)

    def changed(self, rows: Tensor) -> Tensor:
        """Every stage the other way around, the last one first."""
        stages = self.stages.to(rows.dtype)
        for number in range(len(stages) - 1, -1, -1):
            rows = self._turned(rows, stages[number].transpose(1, 2), number)
        return rows

    def of_weight(self, rows: Tensor) -> Tensor:
        """Every stage."""
        stages = self.stages.to(rows.dtype)
        for number in range(len(stages)):
            rows = self._turned(rows, stages[number], number)
        return rows

    def _turned(self, rows: Tensor, stage: Tensor, number: int) -> Tensor:
        count, width = rows.shape
        size = stage.shape[-1]
        half, apart = size // 2, 2**number
        made = rows
        if number:  # halves of blocks that lie so many halves apart are neighbours
            made = made.reshape(count, -1, 2, apart, half).transpose(2, 3)
        parts = made.reshape(count, width // size, size)
        blocks = stage.expand(width // size, size, size)
        made = parts + torch.einsum("bij,nbj->nbi", blocks, parts) * self.strength.to(rows.dtype)
        if number:
            made = made.reshape(count, -1, apart, 2, half).transpose(2, 3)
        return made.reshape(count, width)


class InputLowRankTerm(InputTerm):
    """Two factors: rank by inputs, and inputs by rank."""

    def __init__(self, pattern: Pattern, down: Tensor, up: Tensor) -> None:
        super().__init__(pattern)
        self.keep("down", down)
        self.keep("up", up)

    def changed(self, rows: Tensor) -> Tensor:
        """With their product."""
        made = (rows @ self.down.to(rows.dtype).t()) * self.strength
        return rows + made.to(rows.dtype) @ self.up.to(rows.dtype).t()

    def of_weight(self, rows: Tensor) -> Tensor:
        """With their product's transpose."""
        return rows + (rows @ self.up.to(rows.dtype) * self.strength) @ self.down.to(rows.dtype)


class InputFactorTerm(InputTerm):
    """A factor for each input."""

    def __init__(self, pattern: Pattern, factors: Tensor) -> None:
        super().__init__(pattern)
        self.keep("factors", factors.float().reshape(-1) - 1)

    def changed(self, rows: Tensor) -> Tensor:
        """Multiplied."""
        return rows * (1 + self.factors * self.strength).to(rows.dtype)

    def of_weight(self, rows: Tensor) -> Tensor:
        """The same."""
        return self.changed(rows)


class FactorTerm(Term):
    """A factor for each output, with the bias or without it."""

    changes = OUTPUTS

    def __init__(self, pattern: Pattern, factors: Tensor, with_bias: bool, rows: Rows = None) -> None:
        super().__init__(pattern, rows)
        self.changes_bias = with_bias
        self.keep("factors", factors.float().reshape(-1) - 1)

    def rotated(self, columns: Tensor) -> Tensor:
        """What becomes of outputs, a vector of them in each row."""
        return columns * self._whole(columns.shape[1]).to(columns.dtype)

    def bias(self, bias: Tensor) -> Optional[Tensor]:
        """What is added to the bias, in float32."""
        return bias.float() * (self._whole(len(bias)) - 1) if self.changes_bias else None

    def delta(self, numbers: Tensor) -> Tensor:
        """The difference."""
        factors = self._whole(numbers.shape[0]) - 1
        return numbers.float() * factors.reshape(-1, *[1] * (numbers.dim() - 1))

    def _whole(self, outputs: int) -> Tensor:
        factors = self.factors * self.strength
        if self.rows is not None:
            whole = factors.new_zeros(outputs)
            whole[self.rows[0] : self.rows[1]] = factors
            factors = whole
        return 1 + factors
