"""Tells whether what a recorder saw may still be believed: the same modules with the same forwards, modes and adapters.

Asked once a step, so it compares identities only. It cannot see a flag that a forward reads by itself; a forward that
takes another path then shows in the order of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

from torch import nn

_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes of PEFT's tuner layers that decide which adapters a forward adds."""

_COMPILED = "_compiled_call_impl"
"""What `nn.Module.compile` sets: the module's calls, compiled. Asked of modules with children only."""

_modules_of = itemgetter("_modules")


class Evidence:
    """A fingerprint of a model's behaviour-changing state, kept in columns so that comparing one is a pass in C."""

    def __init__(self, model: nn.Module, ignoring_forward_of: Iterable[nn.Module] = ()) -> None:
        """Takes it; the forwards of modules that one wraps oneself may be left out."""
        ignored = {id(module) for module in ignoring_forward_of}
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        self._states = [module.__dict__ for module in self._modules]
        # A wrapper such as torch.compile's has no `training` of its own: it asks the module that it wraps.
        self._training = [state.get("training") for state in self._states]
        self._watched = [module.__dict__ for module in self._modules if id(module) not in ignored]
        self._forwards = [state.get("forward") for state in self._watched]
        self._dicts = [state["_modules"] for state in self._states]
        self._leaves = [children for children in self._dicts if not children]
        self._calling = [state for state in self._states if state["_modules"]]
        self._parents = [children for children in self._dicts if children]
        self._compiled = [state.get(_COMPILED) for state in self._calling]
        self._lengths = list(map(len, self._parents))
        self._children = list(chain.from_iterable(map(dict.values, self._parents)))
        self._classes = {kind: kind.forward for kind in self._types}
        self._adapters = [
            (state, _adapter_state(state)) for state in self._states if any(name in state for name in _ADAPTER_STATE)
        ]

    def holds(self) -> bool:
        """Whether nothing of it has changed. About an eighth of a microsecond a module."""
        # Lists compare their elements by identity first: equality of modules, types and functions is that.
        return (
            list(map(type, self._modules)) == self._types
            and list(map(dict.get, self._watched, repeat("forward"))) == self._forwards
            and list(map(dict.get, self._states, repeat("training"))) == self._training
            and list(map(dict.get, self._calling, repeat(_COMPILED))) == self._compiled
            and list(map(_modules_of, self._states)) == self._dicts
            and not any(self._leaves)
            and list(map(len, self._parents)) == self._lengths
            and list(chain.from_iterable(map(dict.values, self._parents))) == self._children
            and all(kind.forward is forward for kind, forward in self._classes.items())
            and all(_adapter_state(state) == kept for state, kept in self._adapters)
        )


def _adapter_state(state: dict[str, Any]) -> tuple:
    """The adapter attributes of one module, copied."""
    values = (state.get(name) for name in _ADAPTER_STATE)
    return tuple(tuple(v) if isinstance(v, list) else tuple(v.items()) if isinstance(v, dict) else v for v in values)
