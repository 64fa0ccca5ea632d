"""For code of models: where a module computes, and its weights before a method of its own reads them.

from weightstream import runtime

noise = torch.randn(shape, device=runtime.execution_device(self))
runtime.ensure_loaded(self)
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from .checks import MARK
from .group import execution_scope
from .registry import registry

__all__ = ["ensure_loaded", "execution_device", "execution_scope"]


def execution_device(module: nn.Module) -> torch.device:
    """The device on which a managed module computes, also while its weights are elsewhere. That of the first parameter or
    buffer of a module that is not managed; the CPU for one that has none."""
    owner = _owner(module)
    if owner is not None:
        return owner.device
    for tensor in chain(module.parameters(), module.buffers()):
        return tensor.device
    return torch.device("cpu")


def ensure_loaded(module: nn.Module) -> None:
    """Brings what is resident of the model that owns `module` to the device; models that it does not accept leave. Blocks that
    stream stay out until their turn. Does nothing for a module that is not managed."""
    owner = _owner(module)
    if owner is not None:
        owner._runtime.check_process("ensure_loaded")
        owner._runtime.bring()


def _owner(module: nn.Module) -> Any | None:
    """The attachment that owns a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"this takes a torch.nn.Module, not a {type(module).__name__}")
    owner = registry.owner_of(module)
    if owner is None:
        owner = module.__dict__.get(MARK)
    return owner if owner is not None and owner.attached else None
