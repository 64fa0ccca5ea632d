"""Page-locking as a load's last phase: who watches loads hears how far it is, and may stop it."""

from __future__ import annotations

from torch import nn

from .offload.progress import Progress, progress_in_context

__all__ = ["Locking", "watch_locking"]

_PHASE = "Pinning"

_PIECE = 1 << 30
"""Bytes counted as one: memory is locked in such pieces."""


def watch_locking(model: nn.Module, nbytes: int) -> Locking | None:
    """What the native side calls while it locks at most `nbytes` of a model; None if nobody watches."""
    loaded = getattr(model, "_weightstream_load", None)
    progress = progress_in_context(loaded["files"] if isinstance(loaded, dict) else [])
    return None if progress is None else Locking(progress, nbytes)


class Locking:
    """Tells one callback how much of a model is locked."""

    def __init__(self, progress: Progress, nbytes: int) -> None:
        self._progress = progress
        self._total = max(-(-nbytes // _PIECE), 1)
        self._told = 0
        progress.phase(_PHASE, 0, self._total)

    def __call__(self, locked: int) -> None:
        """`locked` bytes are. Raises what the callback does, or LoadingCancelled."""
        self._progress.poll()
        pieces = min(locked // _PIECE, self._total - 1)
        if pieces > self._told:
            self._told = pieces
            self._progress.phase(_PHASE, pieces, self._total)

    def finish(self) -> None:
        """All that can be locked is."""
        self._progress.phase(_PHASE, self._total, self._total)
