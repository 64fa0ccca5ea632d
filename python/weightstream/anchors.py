"""The wrapped forwards of a block that is cut into segments: turns begin and end at module calls inside it.

    block forward   ├───────────────────────────────────────────────┤
    anchors             ├ norm ┤ ├── attn ──┤      ├── mlp ──┤
    turns               [── segment 0 ──────]      [ segment 1 ]

A segment's turn begins when one of its anchors is entered, and ends with its last anchor's last call, or when another
segment's turn begins, or with the block. A call that does not fit the recorded order is served all the same: it gets a
turn of its own around it.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import Any

import torch

from .runtime import ROOT, Runtime
from .wrap import Forward, refuse_grad, wrap_unit

__all__ = ["SegmentedBlock"]

_grad_enabled = torch.is_grad_enabled


class SegmentedBlock:
    """One visit's state of a block whose turns are segments."""

    def __init__(self, runtime: Runtime, mark: int) -> None:
        """`mark` is a number below `ROOT` that stands for the block among the open turns."""
        self._runtime = runtime
        self._mark = mark
        self._open: int | None = None
        self._depth = 0
        self._calls: dict[int, int] = {}

    def wrap_block(self, name: str, inner: Forward) -> Forward:
        """The block's forward, within which anchors take turns."""
        runtime, turns, unit, retired = self._runtime, self._runtime.open, self._mark, self._runtime.retired

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if retired:
                return inner(*args, **kwargs)
            if not turns or turns[0] != ROOT or runtime.thread != get_ident() or unit in turns:
                if runtime.arrive(unit, name):
                    return inner(*args, **kwargs)
            graded = _grad_enabled()
            if graded:
                refuse_grad(name, "input", args)
                refuse_grad(name, "input", kwargs.values())
            self._open, self._depth = None, 0
            self._calls.clear()
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

    def wrap_anchor(self, unit: int, last_calls: int | None, name: str, inner: Forward) -> Forward:
        """The forward of a module in which the segment `unit` is read; `last_calls` if its exit ends the segment."""
        runtime, turns, mark = self._runtime, self._runtime.open, self._mark
        enter, stream, calls, retired = runtime.offloader.enter, runtime.stream, self._calls, runtime.retired
        alone = wrap_unit(runtime, unit, name, inner)

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if retired or mark not in turns or runtime.thread != get_ident():
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
            calls[unit] = calls.get(unit, 0) + (last_calls is not None)
            try:
                result = inner(*args, **kwargs)
            finally:
                self._depth -= 1
            if last_calls is not None and calls[unit] == last_calls and not self._depth and self._open == unit:
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
