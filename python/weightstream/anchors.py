"""The wrapped forwards of a block that is cut into segments: turns begin and end at module calls inside it.

    block forward   ├───────────────────────────────────────────────┤
    anchors             ├ norm ┤ ├── attn ──┤      ├── mlp ──┤
    turns               [── segment 0 ──────]      [ segment 1 ]

A segment's turn begins when one of its anchors is entered, and ends with its last anchor's last call, or when another
segment's turn begins, or with the block. A call that does not fit the recorded order is served all the same: it gets a
turn of its own around it.

Where every segment is one call of one anchor, each of these calls is simply a turn, and nothing is kept for the block.
A turn then costs 0.2 us above a call that is passed through, and the block's own wrapper less, where a turn with a state
to keep costs 0.6 and the block 0.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from .gradients import refuse_grad
from .running import ROOT, Runtime
from .segments import Segment
from .uncompiled import uncompiled
from .wrap import Forward, Guarded, wrap_unit

__all__ = ["SegmentedBlock"]

_grad_enabled = torch.is_grad_enabled


class SegmentedBlock:
    """One visit's state of a block whose turns are segments."""

    __slots__ = ("_calls", "_depth", "_mark", "_open", "_runtime", "_simple")

    def __init__(self, runtime: Runtime, mark: int, segments: Sequence[Segment]) -> None:
        """`mark` is a number below `ROOT` that stands for the block among the open turns."""
        self._runtime = runtime
        self._mark = mark
        self._open: int | None = None
        self._depth = 0
        self._calls: dict[int, int] = {}
        self._simple = all(len(segment.anchors) == 1 and segment.last_calls == 1 for segment in segments)

    def wrap_block(self, name: str, inner: Forward) -> Forward:
        """The block's forward, within which anchors take turns."""
        marked = self._wrap_marked(name, inner)
        if not self._simple:
            return marked
        at_root, is_graded = self._runtime.turns.at_root, _grad_enabled

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Only plainly inside a step there is nothing to do: anchors look after themselves.
            if at_root() and not is_graded():
                return inner(*args, **kwargs)
            return marked(*args, **kwargs)

        # Not made known to the runtime: this frame on a stack does not say that a turn is open.
        return uncompiled(forward)

    def _wrap_marked(self, name: str, inner: Forward) -> Forward:
        """The block's forward, which is open itself while it runs."""
        runtime, turns, unit, retired = self._runtime, self._runtime.open, self._mark, self._runtime.retired
        root, thread, is_graded, calls = ROOT, get_ident, _grad_enabled, self._calls

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if retired:
                return inner(*args, **kwargs)
            if not turns or turns[0] != root or runtime.thread != thread() or unit in turns:
                if runtime.arrive(unit, name):
                    return inner(*args, **kwargs)
            graded = is_graded()
            if graded:
                refuse_grad(name, "input", args)
                refuse_grad(name, "input", kwargs.values())
            self._open, self._depth = None, 0
            if calls:
                calls.clear()
            turns.append(unit)
            try:
                result = inner(*args, **kwargs)
            except BaseException:
                last, self._open = self._open, None
                _remove(turns, unit)
                if last is not None:
                    _remove(turns, last)
                    runtime.abandon(last)
                raise
            if self._open is not None:
                self._end()
            _remove(turns, unit)
            if graded:
                refuse_grad(name, "output", (result,))
            return result

        return runtime.wrapper(forward)

    @property
    def is_simple(self) -> bool:
        """Whether each segment's turn is one call of one anchor."""
        return self._simple

    def wrap_anchor(
        self, unit: int, last_calls: int | None, name: str, inner: Forward, guarded: Guarded | None = None
    ) -> Forward:
        """The forward of a module in which the segment `unit` is read; `last_calls` if its exit ends the segment."""
        alone = wrap_unit(self._runtime, unit, name, inner, guarded)
        if self._simple:
            return alone
        runtime, turns, mark, thread = self._runtime, self._runtime.open, self._mark, get_ident
        enter, stream, calls, retired = runtime.offloader.enter, runtime.stream, self._calls, runtime.retired
        ends, counted = last_calls is not None, last_calls is not None and last_calls > 1

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if retired or mark not in turns or runtime.thread != thread():
                return alone(*args, **kwargs)
            if self._open != unit:
                if self._depth:
                    return alone(*args, **kwargs)  # inside another segment's anchor, which still needs its own
                if self._open is not None:
                    self._end()
                # Noted first, as in `wrap_unit`: the block's exit then closes what an interrupt leaves open.
                self._open = unit
                turns.append(unit)
                enter(unit, stream())
            self._depth += 1
            if counted:
                calls[unit] = calls.get(unit, 0) + 1
            try:
                result = inner(*args, **kwargs)
            finally:
                self._depth -= 1
            if ends and not self._depth and self._open == unit and not (counted and calls[unit] != last_calls):
                self._end()
            return result

        return runtime.wrapper(forward)

    def _end(self) -> None:
        """Ends the open segment's turn."""
        unit, self._open = self._open, None
        _remove(self._runtime.open, unit)
        self._runtime.offloader.leave(unit, self._runtime.stream())


def _remove(turns: list[int], unit: int | None) -> None:
    """Takes the latest entry of `unit` out; it is last but for calls that were lost."""
    if turns and turns[-1] == unit:
        turns.pop()
    elif unit in turns:
        turns.remove(unit)
