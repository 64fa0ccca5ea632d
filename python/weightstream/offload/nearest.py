"""The name that was probably meant by one that is none: for errors and notes about names that callers give."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

__all__ = ["nearest"]


def nearest(name: Any, known: Collection[str]) -> str:
    """A question with the known name that is most like this one, to be put behind a sentence; empty if none is like it."""
    found = difflib.get_close_matches(str(name), list(known), 1, 0.5)
    folded = {one.lower(): one for one in known}
    near = folded.get(str(name).lower()) or (found[0] if found else None)
    return f"; did you mean {near!r}?" if near else ""
