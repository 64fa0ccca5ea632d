"""Extra stages that a model would like captured in CUDA graphs. There are no graphs yet: stages are called as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

from torch import nn

__all__ = ["is_enabled", "run", "scope"]


@contextmanager
def scope() -> Iterator[None]:
    """A stretch in which stages may be captured."""
    yield


def run(
    stage: Any,
    *args: Any,
    owner: Optional[nn.Module] = None,
    method: str = "forward",
    enabled: bool = True,
    **kwargs: Any,
) -> Any:
    """Calls `method` of a stage. That is what a graph falls back to outside a scope, when disabled, or for an owner that has no
    graphs, and no owner has any."""
    if method == "forward" and callable(stage):
        return stage(*args, **kwargs)
    return getattr(stage, method)(*args, **kwargs)


def is_enabled(model: Any) -> bool:
    """Whether a graph of `model` could run here: no."""
    return False
