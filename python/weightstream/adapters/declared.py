"""Which models `offload.profile` and `offload.all` set up, and whether they were declared to receive LoRAs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Optional

from torch import nn

from ..errors import StateError

__all__ = ["declare", "declared_within", "name_of"]

_models: weakref.WeakKeyDictionary[nn.Module, tuple[str, bool]] = weakref.WeakKeyDictionary()


def declare(model: nn.Module, name: str, receives: bool) -> Callable[[], None]:
    """Notes a model that is managed; gives what forgets it."""
    _models[model] = (name, receives)
    kept = weakref.ref(model)

    def end() -> None:
        model = kept()
        if model is not None:
            _models.pop(model, None)

    return end


def name_of(model: nn.Module) -> Optional[str]:
    """What its pipeline calls a model; None if it was set up by no pipeline."""
    found = _models.get(model)
    return None if found is None else found[0]


def declared_within(model: nn.Module) -> Optional[list[nn.Module]]:
    """The models inside `model` that were declared by themselves; None if it may receive LoRAs whole.

    StateError if it was set up without being declared.
    """
    own = _models.get(model)
    if own is not None and own[1]:
        return None
    found = [(part, _models[part]) for part in model.modules() if part in _models]
    declared = [part for part, (_, receives) in found if receives]
    if declared:
        return declared
    if found:
        names = ", ".join(name for _, (name, _) in found)
        raise StateError(
            f"{names} was not declared to receive LoRAs: give its id as loras= to offload.profile or offload.all when it is set up"
        )
    return None
