"""The multipliers of a model's active adapters: one vector of float32 a device, updated in place.

    vector    | 0.8·2 0.8·2 0.8·2 0.8·2 0.5·1 0.5·1 | 0.8 | 0.5 | …
    pattern     rank rows of layers with these adapters,  biases, terms
                ranks and scales, all of them

Kernels read their slice of it, so that compiled code and captured graphs see a new multiplier without being made anew. Layers
whose adapters have the same ranks and scales share a slice: the vector stays small however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

__all__ = ["LARGEST", "Pattern", "Strengths", "is_recorded"]

LARGEST = 3.4028234663852886e38
"""Of float32, in which multipliers are kept."""
Span = tuple[int, float, int]
"""The number of an active adapter, what its multiplier is multiplied by, and for how many rows."""


def is_recorded() -> bool:
    """Whether what is computed now runs again later without being looked at, as compiled code or a captured graph: it must be right
    for all multipliers then."""
    return torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class Pattern:
    """A slice of the vector, and which part of it is not zero now."""

    def __init__(self, spans: tuple[Span, ...], start: int) -> None:
        self.spans = spans
        self.start = start
        self.size = sum(count for _, _, count in spans)
        self.live: Optional[tuple[int, int]] = None
        """The rows from the first to the last one of an adapter whose multiplier is not zero; None if all are."""
        self.values: tuple[float, ...] = ()
        """The multipliers of its spans now, which tell one setting from another."""
        self.common: Optional[float] = None
        """What all rows of `live` are multiplied by, if that is one number."""

    @property
    def stop(self) -> int:
        """Where the slice ends."""
        return self.start + self.size

    def set(self, multipliers: Sequence[float]) -> None:
        """Takes the active adapters' multipliers."""
        first: Optional[int] = None
        last = at = 0
        rows: list[tuple[int, float]] = []
        for adapter, scale, count in self.spans:
            factor = multipliers[adapter] * scale
            if count:
                rows.append((at, factor))
            if factor != 0.0 and count:
                first = at if first is None else first
                last = at + count
            at += count
        self.live = None if first is None else (first, last)
        factors = {factor for start, factor in rows if first is not None and first <= start < last}
        self.common = factors.pop() if len(factors) == 1 else None
        if self.common is not None and abs(self.common) > LARGEST:
            self.common = None  # a tensor of it is infinite, and no operator takes it as a number
        self.values = tuple(multipliers[adapter] for adapter, _, _ in self.spans)


class Strengths:
    """All patterns of a model's adapters, and the vector on each device that computes with them."""

    def __init__(self) -> None:
        self._patterns: dict[tuple[Span, ...], Pattern] = {}
        self._size = 0
        self._vectors: dict[torch.device, Tensor] = {}
        self._adapters: Optional[Tensor] = None
        self._scales: Optional[Tensor] = None
        self.multipliers: list[float] = []
        """Those in force."""

    def pattern(self, spans: Sequence[Span]) -> Pattern:
        """The pattern with these rows. All are asked for before the first multiplier is set."""
        key = tuple(spans)
        if key not in self._patterns:
            self._patterns[key] = Pattern(key, self._size)
            self._size += self._patterns[key].size
        return self._patterns[key]

    def set(self, multipliers: Sequence[float]) -> None:
        """Makes these the active adapters' multipliers, everywhere."""
        if self._adapters is None or len(self._adapters) != self._size:
            rows = [span for pattern in self._patterns.values() for span in pattern.spans for _ in range(span[2])]
            self._adapters = torch.tensor([adapter for adapter, _, _ in rows], dtype=torch.int64, device="cpu")
            self._scales = torch.tensor([scale for _, scale, _ in rows], dtype=torch.float64, device="cpu")
        self.multipliers = list(multipliers)
        for pattern in self._patterns.values():
            pattern.set(self.multipliers)
        values = self._values()
        with torch.inference_mode(False), torch.no_grad():
            for vector in self._vectors.values():
                # From page-locked memory, which PyTorch keeps until the copy was made: nobody waits for the device.
                vector.copy_(values.pin_memory() if vector.is_cuda else values, non_blocking=True)

    def of(self, pattern: Pattern, device: torch.device) -> Tensor:
        """A pattern's slice on a device."""
        if device not in self._vectors:
            with torch.inference_mode(False), torch.no_grad():
                self._vectors[device] = self._values().to(device)
        return self._vectors[device][pattern.start : pattern.stop]

    def _values(self) -> Tensor:
        if self._adapters is None or self._scales is None or not self.multipliers:
            return torch.zeros(self._size, dtype=torch.float32, device="cpu")
        given = torch.tensor(self.multipliers, dtype=torch.float64, device="cpu")
        return (given[self._adapters] * self._scales).to(torch.float32)
