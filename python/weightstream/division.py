"""Blocks cut into segments, in the numbers the engine knows them by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .ownership import Block
from .segments import Segment, StepPlan, join

__all__ = ["Division"]


@dataclass
class Division:
    """The cuts of a plan as the engine takes them, before it says which of them it uses."""

    cuts: dict[int, list[int]]
    """For each block that may be cut, by its place, the tensors at which a segment may start."""
    order: list[int]
    """The visits of a step, of segments numbered block by block."""
    segments: dict[int, tuple[Segment, ...]]
    first: dict[int, int]
    """The number of each block's first segment, counted block by block."""

    @classmethod
    def of(cls, plan: StepPlan, blocks: Sequence[Block], numbers: Mapping[int, int]) -> Division:
        """The cuts of a plan; `numbers` are the engine's for tensors."""
        segments = {block.index: _usable(plan, block) for block in blocks}
        first: dict[int, int] = {}
        count = 0
        for block in blocks:
            first[block.index] = count
            count += max(1, len(segments[block.index]))
        cuts = {
            position: [numbers[segment.tensors[0]] for segment in segments[block.index][1:]]
            for position, block in enumerate(blocks)
            if len(segments[block.index]) > 1
        }
        order: list[int] = []
        for block_index, segment in plan.order:
            if block_index in first:
                unit = first[block_index] + (segment if len(segments[block_index]) > 1 else 0)
                if not order or order[-1] != unit or segment == 0:
                    order.append(unit)
        return cls(cuts, order, segments, first)

    def joined(self, units: list[int]) -> tuple[dict[int, tuple[Segment, ...]], dict[int, int]]:
        """The segments of each block and its first unit, given the unit that each segment became part of."""
        segments, first = {}, {}
        for block, parts in self.segments.items():
            start = self.first[block]
            segments[block] = join(parts, units[start : start + len(parts)])
            first[block] = units[start]
        return segments, first


def _usable(plan: StepPlan, block: Block) -> tuple[Segment, ...]:
    """A block's segments, or none if one module's calls would begin two of them."""
    segments = plan.blocks[block.index].segments
    anchors = [id(anchor) for segment in segments for anchor in segment.anchors]
    alone = len(set(anchors)) == len(anchors) and id(block.module) not in anchors
    return segments if alone else ()
