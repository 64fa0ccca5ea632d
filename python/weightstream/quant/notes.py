"""Warnings about quantized weights that compute rightly and more slowly than they could. Each is given once."""

from __future__ import annotations

import threading
import warnings

__all__ = ["QuantizationNote", "note_once"]


class QuantizationNote(UserWarning):
    """Numbers are right; the text says what is slow and why."""


_given: set[str] = set()
_lock = threading.Lock()


def note_once(text: str) -> None:
    """Warns, if this was not said before."""
    with _lock:
        if text in _given:
            return
        _given.add(text)
    warnings.warn(text, QuantizationNote, stacklevel=3)
