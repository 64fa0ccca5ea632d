"""Warnings of loading and saving, which point at the line of the program that asked for it."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]


def warn(note: str) -> None:
    """Warns of what a user should know and what does not stop the load."""
    warnings.warn(note, stacklevel=_levels_outside())


def _levels_outside() -> int:
    """How many calls above its caller the first one outside this package is: what a warning points at."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (package, "contextlib"):
        level, frame = level + 1, frame.f_back
    return level
