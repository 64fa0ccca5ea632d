"""PEFT's rotations of what is no product's inputs: a convolution's filters, and what embeddings give.

filters    W' = W·Rᵀ, with R of channels by filter
vectors    e' = e·R
"""

from __future__ import annotations

from torch import Tensor

from .inputs import InputRotationTerm
from .terms import OUTPUTS

__all__ = ["FilterRotationTerm", "VectorRotationTerm"]


class FilterRotationTerm(InputRotationTerm):
    """The inputs of whole filters are rotated, which only the weight can be."""

    by_weight = True

    def delta(self, numbers: Tensor) -> Tensor:
        """The difference to the weight."""
        rows = numbers.float().flatten(1)
        return (self.of_weight(rows) - rows).reshape(numbers.shape)


class VectorRotationTerm(InputRotationTerm):
    """Blocks of what an embedding gives are rotated."""

    changes = OUTPUTS

    def rotated(self, rows: Tensor) -> Tensor:
        """What becomes of vectors, one in each row."""
        return self.changed(rows)

    def delta(self, numbers: Tensor) -> Tensor:
        """The difference to the embedding."""
        rows = numbers.float()
        return self.changed(rows) - rows
