"""Which attached model owns a module, for those who ask about modules: ownership keeps nothing alive.

A managed root owns itself, also inside another. Modules that several roots share belong to the one that was set up last and is
not released.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Registry", "registry"]


class Registry:
    """Owners of modules, by identity."""

    def __init__(self) -> None:
        self._owners: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def add(self, root: nn.Module, owner: Any) -> Callable[[], None]:
        """Makes `owner` that of `root` and of all below it; gives what ends it."""
        ref = weakref.ref(owner)
        self._roots[root] = ref
        for module in root.modules():
            self._owners.setdefault(module, []).append(ref)
        kept = weakref.ref(root)

        def end() -> None:
            root = kept()
            if root is None:
                return
            if self._roots.get(root) is ref:
                del self._roots[root]
            for module in list(self._owners):
                refs = [other for other in self._owners[module] if other is not ref]
                if refs:
                    self._owners[module] = refs
                else:
                    del self._owners[module]

        return end

    def owner_of(self, module: nn.Module) -> Any | None:
        """The owner, or None."""
        root = self._roots.get(module)
        if root is not None and root() is not None:
            return root()
        alive = [owner for owner in (ref() for ref in self._owners.get(module, ())) if owner is not None]
        return alive[-1] if alive else None


registry = Registry()
"""The process's."""
