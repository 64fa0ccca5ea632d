"""What setting up says, and where: the logger `weightstream.offload`, shown on stderr unless somebody else handles it."""

from __future__ import annotations

import logging

__all__ = ["set_verbosity"]

_LEVELS = {0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}


class _Handler(logging.StreamHandler):
    """Ours, so that it is put on once."""


def set_verbosity(level: int) -> None:
    """0 shows warnings, 1 (also -1, the default) what was set up, 2 what a profile sets and how reserved RAM is shared."""
    log = logging.getLogger("weightstream.offload")
    log.setLevel(_LEVELS[1 if level < 0 else level])
    ours = [handler for handler in log.handlers if isinstance(handler, _Handler)]
    if not ours and not log.hasHandlers():
        handler = _Handler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
