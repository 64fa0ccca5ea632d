"""What is applied to a module, kept on the module itself, and how it is taken off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checks import OFFLOAD_MARK

__all__ = ["Applied", "get_dynamic_offload_state", "mark", "remove_dynamic_offload"]


@dataclass
class Applied:
    """An offload that is on a module."""

    route: str
    remove: Callable[[], None]
    """Takes it off. Refuses, and changes nothing, while the module runs."""
    runtime: Callable[[], dict[str, Any]]
    """What has run, as JSON has it."""


def mark(module: nn.Module, applied: Applied) -> None:
    """Notes an offload on its module."""
    module.__dict__[OFFLOAD_MARK] = applied


def get_dynamic_offload_state(module: nn.Module) -> Applied | None:
    """The offload that is on this module."""
    return module.__dict__.get(OFFLOAD_MARK)


def remove_dynamic_offload(module: nn.Module, recurse: bool = True) -> None:
    """Takes off what `enable_offload` put on a module, and with `recurse` on those inside it. Forwards and weights are then as
    they were before. A second call does nothing."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"remove_dynamic_offload takes a torch.nn.Module, not a {type(module).__name__}")
    for part in list(module.modules()) if recurse else [module]:
        applied = part.__dict__.get(OFFLOAD_MARK)
        if applied is not None:
            applied.remove()
            part.__dict__.pop(OFFLOAD_MARK, None)
