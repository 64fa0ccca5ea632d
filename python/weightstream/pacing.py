"""When a step is measured, and whether planning again by what was measured is worth it.

    step 1      step 2       step 3           step 4, or the first that begins once the device is through with step 3
    watched     cut          measured         planned again, if it pays

Which bytes stream, and in how many pieces, depends on what is computed meanwhile: a projection of a short text has
the bytes of one of a long video and none of its time. Before anything was measured the planner takes compute to
follow bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._native import Offloader
from .division import Division
from .errors import WeightstreamError

__all__ = ["Pacing"]

_STEPS = 30
"""What planning again takes must be won back within so many steps: the length of a short generation."""
_LEAST_GAIN = 0.01
"""Below this part of a step, a prediction says nothing."""
_REPLANNING = 0.1
"""Seconds that planning again takes beside copying bytes. Measured on 17 GB in 2,011 pages: 90 to 125 ms, most of it to
map the pages anew."""


class Pacing:
    """The measuring of one model's step, once for every time its blocks are cut."""

    def __init__(self, offloader: Offloader, ways: Sequence[tuple[Division, float]]) -> None:
        """`ways` to cut the blocks, each with how much dearer its turns are."""
        self._offloader = offloader
        self._ways = ways
        self._steps = 0

    def after(self) -> None:
        """A step ended. The first one after a cut starts with a device that has nothing to do: not one to measure."""
        self._steps += 1
        if self._steps == 1:
            self._offloader.time_next_step()

    def is_known(self) -> bool:
        """Whether a step has been measured; asks without waiting."""
        return self._steps > 1 and self._offloader.learn_pace()

    def better(self) -> tuple[Division, float, float] | None:
        """The way to cut that is worth its switch, and the seconds of a step before and after; None if none is."""
        found = []
        for division, dearer in self._ways:
            try:
                gain = self._offloader.gain(division.cuts, division.order)
            except WeightstreamError:
                continue  # it does not fit the budget
            if gain is not None:
                now, then, switch = gain
                found.append((then * dearer, now, then, switch, division))
        if not found:
            return None
        _, now, then, switch, division = min(found, key=lambda way: way[0])
        saved = now - then
        if saved < _LEAST_GAIN * now or saved * _STEPS < switch + _REPLANNING:
            return None
        return division, now, then
