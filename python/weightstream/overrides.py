"""Attributes put on module instances for as long as a model is attached, and taken off again exactly.

They go into the instance's `__dict__`, past `nn.Module.__setattr__`: no nn hooks, no class changed, nothing global.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch import nn

__all__ = ["ADAPTED", "Overrides", "is_adapted"]

ADAPTED: set[CodeType] = set()
"""The code of forwards that compute adapters beside their layer's own."""

_ABSENT = object()


class Overrides:
    """What was put on which module, in order, with what stood there before."""

    def __init__(self) -> None:
        self._saved: list[tuple[nn.Module, str, Any, Any]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Makes `module.name` be `value`."""
        attributes = module.__dict__
        self._saved.append((module, name, attributes.get(name, _ABSENT), value))
        attributes[name] = value

    def changed(self) -> bool:
        """Whether somebody has put something else in the place of what was put."""
        return any(module.__dict__.get(name) is not value for module, name, _, value in self._saved)

    def restore(self, above: Iterable[Overrides] = ()) -> None:
        """Puts everything back as it was, last first, except what somebody else has put there since: those `above` will then
        put back what there was before this.

        What an interrupt cuts short is completed by the next call.
        """
        while self._saved:
            module, name, before, value = self._saved[-1]
            if module.__dict__.get(name) is value:
                if before is _ABSENT:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = before
            else:
                for other in above:
                    other._saved[:] = [
                        (owner, what, before if owner is module and what == name and found is value else found, put)
                        for owner, what, found, put in other._saved
                    ]
            self._saved.pop()


def is_adapted(forward: Any) -> bool:
    """Whether it computes adapters, and is not what somebody has wrapped around that."""
    return getattr(forward, "__code__", None) in ADAPTED
