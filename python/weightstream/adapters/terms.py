"""Deltas that are no product of two factors: whole differences, Kronecker and Hadamard products, rotations of outputs.

Each is a module whose parameters are the adapter's tensors, so that they are placed and streamed like a layer's. `add` puts
its share on a linear layer's outputs; `delta` is the difference to the weight itself, for what needs it whole.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn

from .strengths import Pattern

__all__ = ["BESIDE", "INPUTS", "OUTPUTS", "FullTerm", "HadamardTerm", "KroneckerTerm", "RotationTerm", "Term"]

INPUTS, OUTPUTS, BESIDE = range(3)
"""What a term changes, in the order in which they do: what the layer is given, what it makes of that, and what is added to it."""

Rows = Optional[tuple[int, int]]


class Term(nn.Module):
    """One adapter's delta to one layer."""

    stays_at_zero = False
    """Whether it is computed also while its multiplier is 0."""
    changes = BESIDE
    """Of outputs: it is made of the layer's own ones, less their bias, before anything is added to them."""
    by_weight = False
    """Whether it has no meaning for inputs or outputs by themselves, and is computed with the difference to the weight."""

    def __init__(self, pattern: Pattern, rows: Rows = None, cut: Rows = None) -> None:
        """`rows` of the layer are what it changes, None for all; `cut` are the rows of its own product that those get."""
        super().__init__()
        self.pattern = pattern
        self.rows = rows
        self.cut = cut
        self.strength: Tensor = torch.zeros(1)

    def keep(self, name: str, tensor: Tensor) -> None:
        """Makes a tensor one of its parameters."""
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def product(self) -> Tensor:
        """The whole delta before it is cut, in float32."""
        raise NotImplementedError

    def delta(self, numbers: Tensor) -> Tensor:
        """The delta to the layer's whole weight in float32, its multiplier included. `numbers` are the weight's."""
        made = self.product().reshape(-1, *numbers.shape[1:]) * self.strength
        if self.cut is not None:
            made = made[self.cut[0] : self.cut[1]]
        if self.rows is None:
            return made
        whole = made.new_zeros(numbers.shape)
        whole[self.rows[0] : self.rows[1]] = made
        return whole

    def bias(self, bias: Tensor) -> Optional[Tensor]:
        """What it adds to the layer's own bias, in float32; None for nothing."""
        return None

    def outputs(self, inputs: Tensor) -> Tensor:
        """What it makes of a linear layer's inputs, before it is cut."""
        return inputs @ self.product().to(inputs.dtype).t()

    def add(self, outputs: Tensor, inputs: Tensor) -> None:
        """Adds its share to a linear layer's outputs, both as matrices."""
        made = self.outputs(inputs)
        if self.cut is not None:
            made = made[:, self.cut[0] : self.cut[1]]
        part = outputs if self.rows is None else outputs[:, self.rows[0] : self.rows[1]]
        part.add_(made * self.strength)


class FullTerm(Term):
    """A whole difference."""

    def __init__(self, pattern: Pattern, weight: Tensor, rows: Rows = None, cut: Rows = None) -> None:
        super().__init__(pattern, rows, cut)
        self.keep("weight", weight)

    def product(self) -> Tensor:
        """The difference itself."""
        return self.weight.float()

    def outputs(self, inputs: Tensor) -> Tensor:
        """A product with it."""
        return inputs @ self.weight.reshape(self.weight.shape[0], -1).to(inputs.dtype).t()


class KroneckerTerm(Term):
    """LoKr: the Kronecker product of two factors, each of which may be a product itself. Never formed for linear layers."""

    stays_at_zero = True

    def __init__(
        self, pattern: Pattern, first: list[Tensor], second: list[Tensor], rows: Rows = None, cut: Rows = None
    ) -> None:
        """Each factor is one matrix, or two whose product it is."""
        super().__init__(pattern, rows, cut)
        self._parts = (len(first), len(second))
        for name, factor in (("first", first), ("second", second)):
            for number, tensor in enumerate(factor):
                self.keep(f"{name}{number}", tensor)

    def _factor(self, name: str, count: int) -> Tensor:
        factor = getattr(self, f"{name}0").float()
        if count == 1:
            return factor
        lower = getattr(self, f"{name}1").float()
        return (factor @ lower.reshape(lower.shape[0], -1)).reshape(factor.shape[0], *lower.shape[1:])

    def product(self) -> Tensor:
        """The product; a filter of the second factor stays behind it."""
        first, second = self._factor("first", self._parts[0]), self._factor("second", self._parts[1])
        first = first.reshape(*first.shape, *[1] * (second.dim() - 2))
        return torch.kron(first, second)

    def outputs(self, inputs: Tensor) -> Tensor:
        """(W1 ⊗ W2) x as W1 X W2ᵀ, with x as a matrix of W1's columns by W2's."""
        dtype = inputs.dtype
        ones = [getattr(self, f"first{number}").to(dtype) for number in range(self._parts[0])]
        twos = [getattr(self, f"second{number}").to(dtype) for number in range(self._parts[1])]
        made = inputs.reshape(inputs.shape[0], ones[-1].shape[1], twos[-1].shape[1])
        if len(twos) == 2:  # through its rank first: less is left for the first factor
            made = made @ twos.pop().t()
        for factor in reversed(ones):
            made = factor @ made
        made = made @ twos.pop().t()
        return made.flatten(1)


class HadamardTerm(Term):
    """LoHa: two low-rank products multiplied element by element, formed where they are used."""

    def __init__(
        self,
        pattern: Pattern,
        first: tuple[Tensor, Tensor],
        second: tuple[Tensor, Tensor],
        rows: Rows = None,
        cut: Rows = None,
    ) -> None:
        super().__init__(pattern, rows, cut)
        for name, tensor in zip(("first0", "first1", "second0", "second1"), (*first, *second)):
            self.keep(name, tensor)

    def product(self) -> Tensor:
        """The product."""
        lower, other = self.first1.float().flatten(1), self.second1.float().flatten(1)
        return (self.first0.float() @ lower) * (self.second0.float() @ other)


class RotationTerm(Term):
    """OFT and BOFT: blocks of outputs are rotated, once or in the stages of a butterfly, and may be rescaled.

    A multiplier between 0 and 1 takes each rotation, and the scale, as far from the identity.
    """

    changes = OUTPUTS

    def __init__(
        self, pattern: Pattern, stages: Tensor, rescale: Optional[Tensor], is_butterfly: bool, rows: Rows = None
    ) -> None:
        """`stages` are matrices that multiply blocks of outputs, less the identity: stage, block, row, column."""
        super().__init__(pattern, rows)
        self.keep("stages", stages)
        self._butterfly = is_butterfly
        self.rescale: Optional[Tensor]
        if rescale is None:
            self.rescale = None
        else:
            self.keep("rescale", rescale.reshape(-1) - 1)

    def stays_within(self, outputs: int) -> bool:
        """Whether no output depends on one of another group of so many."""
        span = self.stages.shape[-1] * 2 ** (len(self.stages) - 1)
        return outputs % span == 0

    def rotated(self, columns: Tensor) -> Tensor:
        """What becomes of outputs, a vector of them in each row."""
        if self.rows is None:
            return self._turned(columns)
        made = columns.clone()
        made[:, self.rows[0] : self.rows[1]] = self._turned(columns[:, self.rows[0] : self.rows[1]])
        return made

    def _turned(self, columns: Tensor) -> Tensor:
        strength = self.strength.to(columns.dtype)
        made, count, width = columns, *columns.shape
        for number, stage in enumerate(self.stages.to(columns.dtype)):
            blocks, size = stage.shape[0], stage.shape[1]
            apart = 2**number * (size // 2)
            if self._butterfly:
                made = made.reshape(count, width // (2 * apart), 2, apart).transpose(2, 3)
            parts = made.reshape(count, blocks, size)
            made = parts + torch.einsum("bij,nbj->nbi", stage, parts) * strength
            if self._butterfly:
                made = made.reshape(count, width // (2 * apart), apart, 2).transpose(2, 3)
            made = made.reshape(count, width)
        return made if self.rescale is None else made * (1 + self.rescale.to(made.dtype) * strength)

    def delta(self, numbers: Tensor) -> Tensor:
        """The difference, which is not linear in the multiplier."""
        columns = numbers.float().reshape(numbers.shape[0], -1).t()
        return (self.rotated(columns) - columns).t().reshape(numbers.shape)
