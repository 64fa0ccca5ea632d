"""The forwards of adapted layers: taken over once when adapters are loaded, given back exactly when they are unloaded.

Each goes into its instance's `__dict__`, beneath what `attach` puts there and above what was there before (an accelerate hook's
forward is left on top). What it computes is in a slot, so that another set of active adapters changes no forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Optional, Protocol

from torch import nn

from ..checks import MARK
from ..errors import StateError
from ..overrides import ADAPTED, Overrides, is_adapted
from .adapted import Inner
from .strengths import is_recorded

__all__ = ["Computed", "Placement", "Slot"]


class Computed(Protocol):
    """What a slot holds: the adapters of one module."""

    def forward(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward with them."""

    def is_idle(self) -> bool:
        """Whether that is the forward it has without them now."""


class Slot:
    """What is computed in one module's forward; None for what it is without adapters."""

    __slots__ = ("current", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.current: Optional[Computed] = None

    def call(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, `inner`, with its adapters."""
        current = self.current
        if current is None or (not is_recorded() and current.is_idle()):
            return inner(*args, **kwargs)
        return current.forward(self.module, inner, args, kwargs)


class Placement:
    """The slots of one model's adapted modules, and the forwards that look into them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Notes them. Changes nothing."""
        self.slots = {id(module): Slot(module) for module in modules}
        self._overrides = Overrides()
        self._roots: list[tuple[Any, Slot]] = []

    def attachments(self) -> list[Any]:
        """Of the attached models that the modules are part of."""
        found = {}
        for slot in self.slots.values():
            attachment = slot.module.__dict__.get(MARK)
            if attachment is not None:
                found[id(attachment)] = attachment
        return list(found.values())

    def put(self) -> None:
        """Takes the forwards over. Within `rearranged`."""
        for slot in self.slots.values():
            for method in ("__deepcopy__", "__reduce_ex__"):
                if method not in slot.module.__dict__:  # an attached model refuses by itself
                    self._overrides.set(slot.module, method, _refusal(type(slot.module).__name__))
        for slot in self.slots.values():
            attachment = slot.module.__dict__.get(MARK)
            if attachment is not None and slot.module is attachment.model:
                # A step goes around the root's forward; what is adapted there lies within it.
                self._roots.append((attachment, slot))
                attachment._steps.beneath_root = slot.call
            else:
                name = _attribute(slot.module)
                self._overrides.set(slot.module, name, _adapted(slot, getattr(slot.module, name)))

    def take(self) -> None:
        """Gives them back. What somebody has wrapped since passes its calls through. Within `rearranged`."""
        for slot in self.slots.values():
            slot.current = None
        while self._roots:
            attachment, slot = self._roots[-1]
            if attachment.attached and attachment._steps.beneath_root == slot.call:
                attachment._steps.beneath_root = None
            self._roots.pop()
        self._overrides.restore([attachment._overrides for attachment in self.attachments()])
        for slot in self.slots.values():
            # An accelerate hook that was removed meanwhile has put what it found, ours, in the forward's place.
            forward = slot.module.__dict__.get("forward")
            if is_adapted(forward) and forward._weightstream_slot is slot:
                del slot.module.__dict__["forward"]

    def left(self, attachment: Any) -> None:
        """A model was given back: what was within its steps is in its root's own forward from now on."""
        for entry in [entry for entry in self._roots if entry[0] is attachment]:
            slot = entry[1]
            self._overrides.set(slot.module, "forward", _adapted(slot, slot.module.forward))
            self._roots.remove(entry)


@contextmanager
def rearranged(*placements: Placement) -> Iterator[None]:
    """Lets forwards beneath those of attached models be changed. StateError, with nothing changed, while one runs."""
    attachments = {id(one): one for placement in placements for one in placement.attachments()}
    with ExitStack() as stack:
        for attachment in attachments.values():
            stack.enter_context(attachment._steps.rearranged())
        yield


def _attribute(module: nn.Module) -> str:
    """Where a module's own forward is: beneath an accelerate hook, which moves weights around it."""
    hooked = "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__
    return "_old_forward" if hooked else "forward"


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise StateError(
            f"a {name} has LoRAs, and a copy of it would compute with this one's weights; call unload_loras_from_model first"
        )

    return refuse


def _adapted(slot: Slot, inner: Inner) -> Callable[..., Any]:
    module = slot.module

    # Marks on the inner forward that keep it out of compiled code are not this one's.
    @functools.wraps(inner, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        current = slot.current
        if current is None or (not is_recorded() and current.is_idle()):
            return inner(*args, **kwargs)
        return current.forward(module, inner, args, kwargs)

    forward._weightstream_slot = slot
    ADAPTED.add(forward.__code__)
    return forward
