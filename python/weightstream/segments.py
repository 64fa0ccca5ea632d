"""Cuts blocks into segments, from what a recorder saw: pure functions of ownership and traces.

A segment is a run of a block's tensors, consecutive in the block's order, that is read between the entry of its first
anchor and the exit of its last. An anchor is a module in whose call a tensor is read: the innermost, or for coarse cuts
the outermost that has no more than a third of the block. Calls of anchors
that overlap merge (the outermost of nested anchors wins), and so do segments that run out of the block's order. A
block stays one unit where that is all that is safe: a tensor never seen read, read in the block's own forward or
outside it, or an order that changes.

    the block's order    q        k        v        out      up       down
    executed             2        3        1        4        5        6         v before q: one chunk
    segments             [ q        k        v ]    [out]    [up]     [down]
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from .chunks import chunks, common_ranks
from .hoisting import hoisted_anchors
from .ownership import Block, Ownership
from .trace import Call, Trace, Visit

SMALL_SHARE = 128
"""A tensor of at most its block's bytes divided by this is small, and lies in the base region."""
SMALL_BYTES = 1 << 20
"""No tensor above this is small."""
SMALL_TOGETHER = 16
"""A block whose small tensors are more than its bytes divided by this is made of them, and streams them all."""


class Reason(enum.Enum):
    """Why a block is one unit."""

    NOT_VISITED = "its forward was not called"
    UNSEEN = "not all of its tensors were seen read"
    OWN_FORWARD = "a tensor is read in the block's own forward"
    STRAY = "a tensor is read outside the block's forward"
    ORDER = "the order of reads changes"
    NESTED = "it runs inside another block or runs one"
    OVERLAP = "its reads overlap"
    UNORDERED = "its reads do not follow the order in which its tensors lie"


@dataclass(frozen=True, eq=False)
class Segment:
    """Tensors that come and go together, and the module calls between which they are read."""

    tensors: tuple[int, ...]
    """Consecutive in the block's order, small tensors left out."""
    anchors: tuple[nn.Module, ...]
    """Modules in whose calls they are read, by first entry. Entering any of them must make the segment present."""
    last_anchor: nn.Module
    """The module whose exit ends it: the last of the anchors to be left."""
    last_calls: int | None
    """Calls of the last anchor in a visit before its exit ends the segment; None if it changes: then the next
    segment's entry or the block's exit ends it."""

    @property
    def first_anchor(self) -> nn.Module:
        """The module whose entry begins the segment."""
        return self.anchors[0]


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """A block's segments in the block's order, which is the order they run in."""

    block: int
    """The block."""
    segments: tuple[Segment, ...]
    """At least one, unless the block has no tensor that streams."""
    reason: Reason | None
    """Why there is one only; None if there are several, or the block has one anchor."""
    detail: str
    """The tensors that say so, by name."""


@dataclass(eq=False)
class StepPlan:
    """The segments of every block and the order of one step."""

    blocks: list[SegmentPlan]
    """By block number."""
    order: list[tuple[int, int]]
    """Expected visits of one step as (block, segment); repeats where a block runs twice."""
    stray: list[int] = field(default_factory=list)
    """Tensors read outside their block's forward: these must be resident."""


def small_tensors(ownership: Ownership) -> set[int]:
    """Tensors of blocks so small that streaming them gains nothing: those that the native layout puts in the base."""
    small: set[int] = set()
    for block in ownership.blocks:
        sizes = {number: ownership.tensors[number].nbytes for number in block.tensors}
        total = sum(sizes.values())
        limit = min(total // SMALL_SHARE, SMALL_BYTES)
        together = sum(size for size in sizes.values() if size <= limit)
        if together > total // SMALL_TOGETHER:
            limit = 0
        small.update(number for number, size in sizes.items() if size <= limit)
    return small


def plan_segments(
    ownership: Ownership, traces: Sequence[Trace], resident: Collection[int] | None = None, *, coarse: bool = False
) -> StepPlan:
    """The segments that all complete traces allow, and the order of the last of them.

    `resident` are the tensors that never stream; None stands for `small_tensors`. With `coarse`, a module that has a
    third of its block or less is not cut inside, and is the anchor of all that is read in it.
    """
    kept = small_tensors(ownership) if resident is None else set(resident)
    traces = [trace for trace in traces if trace.complete]
    stray = {read.tensor for trace in traces for read in trace.stray} - kept
    visits: dict[int, list[Visit]] = {}
    for trace in traces:
        for visit in trace.visits:
            visits.setdefault(visit.block, []).append(visit)
    plans = [
        _plan_block(ownership, block, visits.get(block.index, []), kept, stray, coarse) for block in ownership.blocks
    ]
    order = _order(plans, traces[-1]) if traces else []
    return StepPlan(plans, order, sorted(stray))


def _plan_block(
    ownership: Ownership,
    block: Block,
    visits: Sequence[Visit],
    kept: Collection[int],
    stray: Collection[int],
    coarse: bool,
) -> SegmentPlan:
    """One block's segments."""
    tensors = [number for number in block.tensors if number not in kept]

    def one(reason: Reason | None, numbers: Iterable[int] = ()) -> SegmentPlan:
        names = ", ".join(ownership.tensors[number].name for number in sorted(numbers))
        whole = (Segment(tuple(tensors), (block.module,), block.module, 1),) if tensors else ()
        return SegmentPlan(block.index, whole, reason, names)

    if not tensors:
        return one(None)
    if not visits:
        return one(Reason.NOT_VISITED)
    if any(visit.nested for visit in visits):
        return one(Reason.NESTED)
    if outside := set(stray) & set(tensors):
        return one(Reason.STRAY, outside)
    if missing := set(tensors) - {read.tensor for visit in visits for read in visit.reads}:
        return one(Reason.UNSEEN, missing)
    if direct := {read.tensor for visit in visits for read in visit.reads if read.call is visit.call} - set(kept):
        return one(Reason.OWN_FORWARD, direct)
    if coarse:
        anchors = hoisted_anchors(visits, {number: ownership.tensors[number].nbytes for number in tensors})
        cut, _ = _cut(visits, anchors, tensors)
        if len(cut) > 1:
            return SegmentPlan(block.index, cut, None, "")
    anchors = _anchors(visits)
    cut, ranks = _cut(visits, anchors, tensors)
    if ranks is None:
        return one(Reason.ORDER)
    if len(cut) > 1:
        return SegmentPlan(block.index, cut, None, "")
    if len(tensors) == 1:
        return SegmentPlan(block.index, (_segment(tensors, anchors, visits),), None, "")
    return one(Reason.OVERLAP if len(set(ranks.values())) == 1 else Reason.UNORDERED)


def _cut(
    visits: Sequence[Visit], anchors: dict[int, set[int]], tensors: Sequence[int]
) -> tuple[tuple[Segment, ...], dict[int, int] | None]:
    """The segments that given anchors make, none if it would be one; and the order they follow, None if it changes."""
    ranks = common_ranks([_groups(visit, anchors, tensors) for visit in visits], tensors)
    cuts = [] if ranks is None else chunks([ranks[number] for number in tensors])
    if len(cuts) < 2:
        return (), ranks
    return tuple(_segment(tensors[first:last], anchors, visits) for first, last in cuts), ranks


def _anchors(visits: Sequence[Visit]) -> dict[int, set[int]]:
    """The ids of the modules in whose calls each tensor is read."""
    anchors: dict[int, set[int]] = {}
    for visit in visits:
        for read in visit.reads:
            if read.call is not None:
                anchors.setdefault(read.tensor, set()).add(id(read.call.module))
    return anchors


def _groups(visit: Visit, anchors: dict[int, set[int]], tensors: Sequence[int]) -> list[set[int]]:
    """Tensors whose anchors' calls overlap in time, in time order.

    A tensor's interval spans all calls of its anchors, also those that do not read it: entering an anchor makes its
    tensors present.
    """
    calls: dict[int, tuple[int, int]] = {}
    for call in visit.calls:
        begin, end = calls.get(id(call.module), (call.begin, call.end))
        calls[id(call.module)] = (min(begin, call.begin), max(end, call.end))
    hulls: dict[int, tuple[int, int]] = {}
    for number in tensors:
        spans = [calls[anchor] for anchor in anchors[number] if anchor in calls]
        if spans:
            hulls[number] = (min(begin for begin, _ in spans), max(end for _, end in spans))
    groups: list[set[int]] = []
    reach = -1
    for number, (begin, end) in sorted(hulls.items(), key=lambda item: item[1]):
        if begin < reach:
            groups[-1].add(number)
        else:
            groups.append({number})
        reach = max(reach, end)
    return groups


def _segment(tensors: Sequence[int], anchors: dict[int, set[int]], visits: Sequence[Visit]) -> Segment:
    """A segment with the anchors that all visits show."""
    wanted = set().union(*(anchors[number] for number in tensors))
    found: dict[int, nn.Module] = {}
    ends: list[tuple[nn.Module, int]] = []
    for visit in visits:
        calls = _outermost(call for call in visit.calls if id(call.module) in wanted)
        if not calls:
            continue
        for call in calls:
            found.setdefault(id(call.module), call.module)
        last = max(calls, key=lambda call: call.end).module
        ends.append((last, sum(call.module is last for call in visit.calls)))
    last, count = ends[0]
    steady = all(module is last and calls == count for module, calls in ends)
    return Segment(tuple(tensors), tuple(found.values()), last, count if steady else None)


def _outermost(calls: Iterable[Call]) -> list[Call]:
    """The calls, which come by entry, without those made inside another of them."""
    kept: list[Call] = []
    for call in calls:
        if not kept or call.begin > kept[-1].end:
            kept.append(call)
    return kept


def _order(plans: Sequence[SegmentPlan], trace: Trace) -> list[tuple[int, int]]:
    """The segments in the order in which a step ran them; those a visit did not enter are left out."""
    order: list[tuple[int, int]] = []
    for visit in trace.visits:
        called = {id(call.module) for call in visit.calls}
        order.extend(
            (visit.block, number)
            for number, segment in enumerate(plans[visit.block].segments)
            if any(id(anchor) in called for anchor in segment.anchors)
        )
    return order


def coarsen(plan: StepPlan, ownership: Ownership, least: int) -> StepPlan:
    """Joins neighbouring segments until each has at least `least` bytes, so that no copy is too short to be fast."""
    blocks: list[SegmentPlan] = []
    joined: dict[tuple[int, int], tuple[int, int]] = {}
    for entry in plan.blocks:
        groups: list[list[Segment]] = []
        for segment in entry.segments:
            if groups and _size(groups[-1], ownership) < least:
                groups[-1].append(segment)
            else:
                groups.append([segment])
        if len(groups) > 1 and _size(groups[-1], ownership) < least:
            groups[-2:] = [groups[-2] + groups[-1]]
        numbers = (number for number, group in enumerate(groups) for _ in group)
        joined.update(((entry.block, old), (entry.block, new)) for old, new in enumerate(numbers))
        blocks.append(SegmentPlan(entry.block, tuple(map(_join, groups)), entry.reason, entry.detail))
    order: list[tuple[int, int]] = []
    for block, number in plan.order:
        target = joined[(block, number)]
        # A block that runs twice in a row starts again at a segment that is not behind the last one.
        if not order or order[-1] != target or number == 0:
            order.append(target)
    return StepPlan(blocks, order, plan.stray)


def join(segments: Sequence[Segment], units: Sequence[int]) -> tuple[Segment, ...]:
    """Segments of a block, joined where neighbours are of the same unit. `units` gives each one's."""
    pairs = zip(segments, units, strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[1])
    return tuple(_join([segment for segment, _ in group]) for _, group in groups)


def _size(group: Sequence[Segment], ownership: Ownership) -> int:
    """Bytes of some segments."""
    return sum(ownership.tensors[number].nbytes for segment in group for number in segment.tensors)


def _join(group: Sequence[Segment]) -> Segment:
    """Neighbouring segments as one."""
    if len(group) == 1:
        return group[0]
    anchors = {id(anchor): anchor for segment in group for anchor in segment.anchors}
    tensors = tuple(number for segment in group for number in segment.tensors)
    return Segment(tensors, tuple(anchors.values()), group[-1].last_anchor, group[-1].last_calls)
