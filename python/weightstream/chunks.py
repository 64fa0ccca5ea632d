"""The order arithmetic under segments: one order that several observed sequences keep, and how far a list is in order.

Plain integers only. `common_ranks` joins what was ever seen together and refuses sequences that contradict each other;
`chunks` finds the most pieces of a list that can be sorted one by one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def common_ranks(sequences: Sequence[Sequence[set[int]]], numbers: Sequence[int]) -> dict[int, int] | None:
    """A rank for each number such that every sequence of groups is in order; None if two of them disagree.

    Numbers that share a group in any sequence share a rank, and so do those that lie between them. What no sequence
    orders keeps the order of `numbers`.
    """
    position = {number: index for index, number in enumerate(numbers)}
    group = _united([[{position[n] for n in members} for members in sequence] for sequence in sequences], len(numbers))
    behind: dict[int, set[int]] = {root: set() for root in group}
    waits = dict.fromkeys(behind, 0)
    for sequence in sequences:
        run = list(dict.fromkeys(group[position[min(members)]] for members in sequence))
        for before, after in zip(run, run[1:]):
            if after not in behind[before]:
                behind[before].add(after)
                waits[after] += 1
    ready = [root for root, count in waits.items() if count == 0]
    heapq.heapify(ready)
    ranks: dict[int, int] = {}
    while ready:
        root = heapq.heappop(ready)
        ranks[root] = len(ranks)
        for after in behind[root]:
            waits[after] -= 1
            if waits[after] == 0:
                heapq.heappush(ready, after)
    if len(ranks) < len(behind):
        return None
    return {number: ranks[group[index]] for index, number in enumerate(numbers)}


def _united(sequences: Sequence[Sequence[set[int]]], count: int) -> list[int]:
    """For each of `count` positions the smallest position it is joined with."""
    parent = list(range(count))

    def root(position: int) -> int:
        while parent[position] != position:
            parent[position] = parent[parent[position]]
            position = parent[position]
        return position

    def join(one: int, other: int) -> bool:
        one, other = sorted((root(one), root(other)))
        parent[other] = one
        return one != other

    changed = True
    while changed:
        changed = False
        for sequence in sequences:
            last: dict[int, int] = {}
            for index, members in enumerate(sequence):
                first = min(members)
                for member in members:
                    changed |= join(first, member)
                start = last.setdefault(root(first), index)
                # The same group again, later: what ran in between ran inside it.
                for between in sequence[start:index]:
                    changed |= join(first, min(between))
    return [root(position) for position in range(count)]


def chunks(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The most index ranges such that sorting each sorts the whole of `ranks`; equal ranks stay together."""
    least_behind = [*ranks, max(ranks, default=0) + 1]
    for index in range(len(ranks) - 1, -1, -1):
        least_behind[index] = min(ranks[index], least_behind[index + 1])
    found: list[tuple[int, int]] = []
    first = 0
    highest = -1
    for index, rank in enumerate(ranks):
        highest = max(highest, rank)
        if highest < least_behind[index + 1]:
            found.append((first, index + 1))
            first = index + 1
    return found
