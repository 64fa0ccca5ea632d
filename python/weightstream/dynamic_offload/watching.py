"""Whether anything of a streamed module ran in a region: a peak of nothing would promise the whole device to residents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..attachment import Attachment

__all__ = ["Ran", "watched"]

Ran = Callable[[], bool]
"""Says whether anything ran since the region began."""


@contextmanager
def watched(attachment: Attachment, streams: bool) -> Iterator[Ran]:
    """Gives what says whether anything of an attached module has run since: a step that ended without an error, or outside steps
    a turn of a unit. `streams`: whether there are units; without them the calls of modules that have weights count."""
    before = _counts(attachment)
    called: list[bool] = []

    def ran() -> bool:
        steps, failed, visits = (now - then for now, then in zip(_counts(attachment), before))
        return steps > failed or (not steps and (visits > 0 or bool(called)))

    def note(*_: Any) -> None:
        called[:] = [True]

    # Of a module that streams the engine counts, which no hook could do as well.
    parts = () if streams else [part for part in attachment.model.modules() if _has_weights(part)]
    hooks = [part.register_forward_hook(note) for part in parts]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def _counts(attachment: Attachment) -> tuple[int, int, int]:
    """Steps, those of them that failed, and turns of units."""
    stats = attachment.stats()
    return stats["steps"], attachment.failed_steps, stats["visits"]


def _has_weights(part: nn.Module) -> bool:
    return any(parameter is not None for parameter in part._parameters.values())
