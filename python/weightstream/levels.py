"""Where a warning points: at the line outside this package that led to it."""

from __future__ import annotations

import sys

__all__ = ["levels_outside"]


def levels_outside() -> int:
    """How many calls above its caller the first one outside this package is, as `warnings.warn` counts levels."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (package, "contextlib"):
        level, frame = level + 1, frame.f_back
    return level
