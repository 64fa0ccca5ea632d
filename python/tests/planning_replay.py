"""Replays a recorded step against a segment plan, as an engine would run it, and says where it would go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weightstream.ownership import Ownership, collect
from weightstream.recorder import Recorder
from weightstream.segments import StepPlan
from weightstream.towers import find_towers
from weightstream.trace import Trace


def record(model: nn.Module, run: Callable[[], Any], towers: Any = None) -> tuple[Ownership, Trace, Any]:
    """Ownership of the model, the trace of one run and what the run gave."""
    ownership = collect(model, find_towers(model, towers))
    recorder = Recorder(ownership)
    with recorder.recording():
        result = run()
    return ownership, recorder.trace(), result


def check_plan(ownership: Ownership, plan: StepPlan, resident: set[int]) -> None:
    """Each block's segments are its tensors in registration order, each tensor once."""
    assert [entry.block for entry in plan.blocks] == [block.index for block in ownership.blocks]
    for entry, block in zip(plan.blocks, ownership.blocks):
        tensors = [number for segment in entry.segments for number in segment.tensors]
        assert tensors == [number for number in block.tensors if number not in resident]
        assert all(segment.tensors and segment.last_anchor in segment.anchors for segment in entry.segments)
        if len(entry.segments) > 1:
            assert entry.reason is None and block.module not in [m for s in entry.segments for m in s.anchors]


def check_replay(plan: StepPlan, trace: Trace, resident: set[int]) -> list[tuple[int, int]]:
    """Enters and leaves segments at their anchors and checks that every read finds its segment present.

    Also that a visit enters each segment once, in order, one at a time. Returns the segments entered.
    """
    entered: list[tuple[int, int]] = []
    for visit in trace.visits:
        segments = plan.blocks[visit.block].segments
        home = {number: index for index, segment in enumerate(segments) for number in segment.tensors}
        events = [(call.begin, "enter", call.module) for call in visit.calls]
        events += [(call.end, "leave", call.module) for call in visit.calls]
        events += [(read.tick, "read", read.tensor) for read in visit.reads]
        present: int | None = None
        order: list[int] = []
        exits: dict[int, int] = {}
        for _, act, what in sorted(events, key=lambda event: event[0]):
            if act == "read" and what not in resident:
                assert home[what] == present, f"tensor {what} of block {visit.block} is read while absent"
            elif act == "enter":
                wanted = [index for index, segment in enumerate(segments) if what in segment.anchors]
                if wanted and present != wanted[0]:
                    assert present is None or segments[present].last_calls is None
                    present = wanted[0]
                    order.append(present)
            elif act == "leave":
                exits[id(what)] = exits.get(id(what), 0) + 1
                if present is not None and what is segments[present].last_anchor:
                    if exits[id(what)] == segments[present].last_calls:
                        present = None
        assert order == sorted(set(order)), f"block {visit.block} enters its segments in the order {order}"
        entered.extend((visit.block, index) for index in order)
    return entered
