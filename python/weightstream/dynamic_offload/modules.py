"""The modules of a pipeline that are offloaded, by their components' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["modules_of"]


def modules_of(pipeline: Any, components: Any) -> dict[str, nn.Module]:
    """The modules: of a mapping of components all, else those of the pipeline, all or as named. TypeError or ValueError for what
    names none: nobody asks for nothing to be offloaded."""
    if isinstance(components, Mapping):
        wrong = [
            f"{name!r} is a {type(part).__name__}" for name, part in components.items() if not _is_entry(name, part)
        ]
        if wrong:
            raise TypeError(f"components has modules by name, and {', '.join(wrong)}")
        found = dict(components)
    else:
        found = _own(pipeline)
        if components is not None:
            found = {name: found[name] for name in _names(components, found)}
    if not found:
        what = "components is empty" if components is not None else f"this {type(pipeline).__name__} has no module"
        raise ValueError(f"{what}: there is nothing to offload")
    return found


def _own(pipeline: Any) -> dict[str, nn.Module]:
    if isinstance(pipeline, nn.Module):
        raise TypeError(f"a {type(pipeline).__name__} is one module and no pipeline: give it to enable_offload")
    own = pipeline if isinstance(pipeline, Mapping) else getattr(pipeline, "components", None)
    if not isinstance(own, Mapping):
        own = getattr(pipeline, "__dict__", None)
    if not isinstance(own, Mapping):
        raise TypeError(
            f"a {type(pipeline).__name__} is no pipeline: give an object with components, or components= as a dictionary of "
            f"modules by name"
        )
    return {name: part for name, part in own.items() if _is_entry(name, part)}


def _names(components: Any, found: Mapping[str, nn.Module]) -> list[str]:
    names = list(components) if isinstance(components, (list, tuple, set, frozenset)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"components={components!r} is no list of names and no dictionary of modules by name")
    missing = sorted(set(names) - set(found))
    if missing:
        raise ValueError(f"the pipeline has no module {', '.join(missing)}; it has {', '.join(found) or 'none'}")
    return names


def _is_entry(name: Any, part: Any) -> bool:
    return isinstance(name, str) and isinstance(part, nn.Module)
