"""Attributes put on module instances for as long as a model is attached, and taken off again exactly.

They go into the instance's `__dict__`, past `nn.Module.__setattr__`: no nn hooks, no class changed, nothing global.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Overrides"]

_ABSENT = object()


class Overrides:
    """What was put on which module, in order, with what stood there before."""

    def __init__(self) -> None:
        self._saved: list[tuple[nn.Module, str, Any]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Makes `module.name` be `value`."""
        attributes = module.__dict__
        self._saved.append((module, name, attributes.get(name, _ABSENT)))
        attributes[name] = value

    def modules(self) -> list[nn.Module]:
        """The modules that something was put on."""
        return [module for module, _, _ in self._saved]

    def restore(self) -> None:
        """Puts everything back as it was, last first. Twice is the same as once."""
        while self._saved:
            module, name, before = self._saved.pop()
            if before is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
