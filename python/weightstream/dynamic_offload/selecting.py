"""Which leaves are page-locked where not all of them may be."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["select_pinned"]


def select_pinned(sizes: Sequence[int], budget: int, how: str) -> set[int]:
    """The numbers of the leaves to lock, of these bytes each and in the order of the module; together at most `budget` bytes.

    "first" takes them in order, "largest" by size, "spread" evenly over the module, so that no stretch of a step waits for
    slow copies alone. One that does not fit any more is passed over.
    """
    chosen: set[int] = set()
    for number in _order(sizes, budget, how):
        if sizes[number] <= budget:
            chosen.add(number)
            budget -= sizes[number]
    return chosen


def _order(sizes: Sequence[int], budget: int, how: str) -> list[int]:
    numbers = list(range(len(sizes)))
    if how == "largest":
        return sorted(numbers, key=lambda number: -sizes[number])
    total = sum(sizes)
    if how == "first" or budget >= total:
        return numbers
    # The share that is due grows with the bytes passed; who makes it grow over a whole leaf is taken, the others come after.
    taken, passed, late = [], 0, []
    locked = 0
    for number in numbers:
        passed += sizes[number]
        if locked + sizes[number] <= passed * budget / total:
            taken.append(number)
            locked += sizes[number]
        else:
            late.append(number)
    return taken + late
