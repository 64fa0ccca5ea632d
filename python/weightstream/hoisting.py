"""Finds modules that can stand for all that is read in their calls, so that a segment has one anchor instead of many.

    block     norm   attention(q k v out)   norm   up    gate    down          bytes 4 of 16, 4, 4 and 4
    anchors          [    attention     ]         [up]  [gate]  [down]         where without: q k v out up gate down

A module with at most about a third of its block's bytes is not worth a cut inside it: smaller segments would not make
the ring smaller than the largest one, and each call of an anchor costs the host a few microseconds. What is larger is
opened up. Pure function of visits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .trace import Call, Read, Visit

__all__ = ["hoisted_anchors"]

_LARGEST = (3, 8)
"""The part of its block's bytes above which a module is opened up: a third, with room for uneven widths."""


def hoisted_anchors(visits: Sequence[Visit], sizes: Mapping[int, int]) -> dict[int, set[int]]:
    """The ids of the modules in whose calls each tensor is read, the outermost that are not too large.

    `sizes` are the bytes of the block's tensors that may stream; reads of others do not count.
    """
    inside: dict[int, set[int]] = {}
    for visit in visits:
        for read in visit.reads:
            if read.tensor in sizes:
                for call in _chain(visit, read):
                    inside.setdefault(id(call.module), set()).add(read.tensor)
    # A module that is called twice would hold what runs between its calls.
    twice = {
        module
        for visit in visits
        for module, count in Counter(id(call.module) for call in visit.calls).items()
        if count > 1
    }
    total = sum(sizes.values())
    light = {
        module
        for module, tensors in inside.items()
        if module not in twice and sum(sizes[number] for number in tensors) * _LARGEST[1] <= total * _LARGEST[0]
    }
    anchors: dict[int, set[int]] = {}
    for visit in visits:
        for read in visit.reads:
            if read.tensor in sizes and read.call is not None:
                best = id(read.call.module)
                for call in _chain(visit, read):
                    outer = id(call.module)
                    # Where the outer one reads nothing more, entering the inner one leaves the copy more time.
                    if outer in light and len(inside[outer]) > len(inside[best]):
                        best = outer
                anchors.setdefault(read.tensor, set()).add(best)
    return anchors


def _chain(visit: Visit, read: Read) -> Iterator[Call]:
    """The calls inside the block's that a read was made in, from the innermost out."""
    call = read.call
    while call is not None and call is not visit.call:
        yield call
        call = call.parent
