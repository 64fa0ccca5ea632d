"""Finds the models inside a pipeline or an object of an application."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import ModelError

__all__ = ["extract_models"]

_PIPELINES = ("pipe", "pipeline")
"""Attributes under which applications keep a pipeline."""


def extract_models(obj: Any = None, prefix: Any = None) -> dict[str, nn.Module]:
    """The models in an object, by name: its attributes, the components of a pipeline in it, and dictionaries of models.

    prefix: text put before each name, as it is. Object and prefix may come in either order. A module is searched for its
    children. The same model under two names is given once, under the first.
    """
    if isinstance(obj, str):
        obj, prefix = prefix, obj
    if obj is None:
        raise ModelError("extract_models needs the object to look into, beside the prefix")
    if not isinstance(prefix, (str, type(None))):
        raise ModelError(f"extract_models takes a text as prefix, not a {type(prefix).__name__}")
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, value in _entries(obj):
        if isinstance(value, nn.Module) and id(value) not in seen and f"{prefix or ''}{name}" not in found:
            seen.add(id(value))
            found[f"{prefix or ''}{name}"] = value
    return found


def _entries(obj: Any) -> Iterable[tuple[str, Any]]:
    """Named things in an object, those of its pipeline first: they have the names that profiles go by."""
    if isinstance(obj, nn.Module):
        yield from obj.named_children()
        return
    for holder in (*(_attributes(obj).get(name) for name in _PIPELINES), obj):
        yield from _components(holder)
    values = obj if isinstance(obj, Mapping) else _attributes(obj)
    for name, value in values.items():
        if isinstance(name, str):
            yield name, value
    for value in values.values():
        if isinstance(value, Mapping):
            yield from ((name, inner) for name, inner in value.items() if isinstance(name, str))


def _attributes(obj: Any) -> dict[str, Any]:
    return getattr(obj, "__dict__", None) or {}


def _components(holder: Any) -> Iterable[tuple[str, Any]]:
    """The components of a pipeline; nothing for anything else."""
    components = None if isinstance(holder, (nn.Module, type(None))) else getattr(holder, "components", None)
    if isinstance(components, Mapping):
        yield from ((name, value) for name, value in components.items() if isinstance(name, str))
