"""Finds the models inside a pipeline or an object of an application."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any

from torch import nn

from ..errors import ModelError

__all__ = ["extract_models"]

_PIPELINES = ("pipe", "pipeline")
"""Attributes under which applications keep a pipeline."""
_LISTS = (list, tuple, Iterator)
"""What has models one after the other, and names for them at most in pairs."""


def extract_models(obj: Any = None, prefix: Any = None) -> dict[str, nn.Module]:
    """The models in an object, by name: its attributes, the components of a pipeline in it, and dictionaries of models.

    prefix: text put before each name, as it is. Object and prefix may come in either order. A module is searched for its
    children. Of a list, a tuple or an iterator the models are named by their places, pairs of names and models by their names.
    The same model under two names is given once, under the first. Properties are not read.

    Empty for an object or a dictionary without models. ModelError for what cannot hold any by name, and where all there are lie
    deeper than is looked.
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
    if not found:
        _check_empty(obj)
    return found


def _entries(obj: Any) -> Iterable[tuple[str, Any]]:
    """Named things in an object, those of its pipeline first: they have the names that profiles go by."""
    if isinstance(obj, nn.Module):
        yield from obj.named_children()
        return
    if isinstance(obj, _LISTS):
        yield from _listed(obj)
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


def _listed(listed: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    """The elements of a list by their places, and pairs by their names."""
    found = False
    for place, value in enumerate(listed):
        if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], str):
            name, value = value
        else:
            name = str(place)
        if isinstance(value, Mapping) or (not isinstance(value, nn.Module) and any(_components(value))):
            raise ModelError(
                f"element {place} is a {type(value).__name__}, not a model: give extract_models each one alone"
            )
        found = found or isinstance(value, nn.Module)
        yield name, value
    if not found:
        raise ModelError(
            f"there is no model in this {type(listed).__name__}: give models, or pairs of names and models, one after the other"
        )


def _check_empty(obj: Any) -> None:
    """Says why nothing was found where there is nothing to find by name, or where it lies too deep."""
    kind = type(obj).__name__
    if isinstance(obj, nn.Module):
        raise ModelError(
            f'a {kind} has no modules inside it: give offload.profile a dictionary such as {{"transformer": model}}'
        )
    attributes = _attributes(obj)
    if not isinstance(obj, Mapping) and not attributes and not hasattr(obj, "__dict__"):
        raise ModelError(
            f"a {kind} holds no models by name: give a pipeline, an object or a dictionary of models by name"
        )
    for name, value in (obj if isinstance(obj, Mapping) else attributes).items():
        if isinstance(value, nn.Module):
            raise ModelError(f"the models' names are texts, and {name!r} is a {type(name).__name__}")
        if isinstance(value, (list, tuple)) and any(isinstance(one, nn.Module) for one in value):
            raise ModelError(
                f"the models in this {kind} are in the {type(value).__name__} {name!r}, which is not looked into: give "
                f"extract_models that, or a dictionary of models by name"
            )


def _attributes(obj: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots and models of its classes included. Runs no property."""
    found: dict[str, Any] = {}
    for kind in reversed(type(obj).__mro__):
        for name, value in vars(kind).items():
            if isinstance(value, nn.Module):
                found[name] = value
            elif isinstance(value, MemberDescriptorType) and not name.startswith("__"):
                found[name] = getattr(obj, name, None)  # a slot may be empty
    found.update(getattr(obj, "__dict__", None) or {})
    return found


def _components(holder: Any) -> Iterable[tuple[str, Any]]:
    """The components of a pipeline, or its attributes where it cannot say them; nothing for anything else."""
    try:
        components = None if isinstance(holder, (nn.Module, type(None))) else getattr(holder, "components", None)
    except Exception:  # noqa: BLE001, whatever a property of an application's may raise
        components = _attributes(holder)
    if isinstance(components, Mapping):
        yield from ((name, value) for name, value in components.items() if isinstance(name, str))
