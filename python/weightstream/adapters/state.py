"""What adapters a model has: those loaded, which of them are active and how strongly, and what computes with them.

loaded     pieces by layer, in host memory; shared by models that were synchronized
active     stacked layer by layer; another set is stacked anew, other multipliers only change the vector
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

from torch import nn

from ..errors import StateError
from .adapted import Adapters
from .layers import AdaptedLayer
from .multipliers import Multiplier, at_step
from .pieces import Piece
from .placing import Placement, rearranged
from .products import ConvolutionAdapters, LinearAdapters
from .settling import Settled, turning_modules
from .strengths import Strengths
from .swapped import EmbeddingAdapters, Swap, SwappedAdapters

__all__ = ["AdapterSet", "LoadedAdapter", "ModelAdapters", "state_of"]

log = logging.getLogger("weightstream.offload")


@dataclass
class LoadedAdapter:
    """One file's adapters."""

    path: str
    pieces: dict[str, list[Piece]]
    """By the names of layers."""
    notes: list[str] = field(default_factory=list)
    """What of the file is not for the model."""
    warnings: list[str] = field(default_factory=list)
    """What the file says and is not followed."""


class AdapterSet:
    """Loaded adapters with what is active of them: one object for all models that were synchronized."""

    def __init__(self, loaded: Sequence[LoadedAdapter]) -> None:
        self.loaded = list(loaded)
        self.active: list[int] = []
        self.multipliers: list[Multiplier] = []
        self.reserve: tuple[bool, Optional[int]] = (False, None)
        """Whether what streams is page-locked, and how many bytes at most."""
        self.users: weakref.WeakSet[ModelAdapters] = weakref.WeakSet()

    def activate(self, numbers: Sequence[int], multipliers: Sequence[Multiplier]) -> None:
        """Makes these the active ones, in all models that use the set. Their steps begin anew."""
        users = list(self.users)
        for user in users:
            user.check_layers()
        built = [user.built(numbers, multipliers) for user in users]
        former = (self.active, self.multipliers, [(user._built, user.step) for user in users])
        try:
            self.active, self.multipliers = list(numbers), list(multipliers)
            for user, made in zip(users, built):
                user.step = 0
                user.use(made)
        except BaseException:
            self.active, self.multipliers, before = former
            for user, (made, step) in zip(users, before):
                user.step = step
                user.use(made)
            raise


class Built:
    """What computes one set of active adapters in one model."""

    def __init__(self, strengths: Strengths, computed: dict[int, Any], key: Any) -> None:
        self.strengths = strengths
        self.computed = computed
        """By the id of the module whose forward it is in."""
        self.key = key


class ModelAdapters:
    """The adapters of one model, and of the models that it is made of."""

    def __init__(self, model: nn.Module, layers: Mapping[str, AdaptedLayer], parts: Iterable[nn.Module] = ()) -> None:
        """`parts` are models inside it that were declared by themselves. Changes nothing."""
        self.model = weakref.ref(model)
        self.parts = [weakref.ref(part) for part in parts]
        self.layers = dict(layers)
        self.set = AdapterSet([])
        self.step = 0
        self._built: Optional[Built] = None
        self._used: Optional[Built] = None
        """What is in the slots."""
        self._placement: Optional[Placement] = None
        self._settled = Settled()
        self._follows: weakref.WeakSet[Any] = weakref.WeakSet()
        """The attachments that say when their model is given back."""

    def update_layers(self, layers: Mapping[str, AdaptedLayer]) -> None:
        """Takes the model's layers as they are now."""
        self.layers = dict(layers)

    def check_layers(self) -> None:
        """StateError if a layer with adapters is not the model's any more: they would be computed nowhere."""
        model = self.model()
        if model is None or self._placement is None:
            return
        there = {id(module) for module in model.modules()}
        for adapter in self.set.loaded:
            for name in adapter.pieces:
                layer = self.layers[name]
                if id(layer.module) not in there:
                    raise StateError(
                        f"{name} is another layer than the one that LoRAs were loaded for; load them anew with "
                        f"load_loras_into_model"
                    )

    def replace(self, chosen: AdapterSet, step: int = 0) -> None:
        """Puts other adapters in the place of those there are. An error or interrupt leaves the former ones."""
        names = {name for adapter in chosen.loaded for name in adapter.pieces}
        hosts = {id(host): host for host in (self._host(self.layers[name]) for name in names)}
        placement = Placement([*hosts.values(), *turning_modules(hosts)])
        former = (self.set, self._placement or Placement(()), self._built, self.step)
        began = False
        try:
            self.set, self._built = chosen, None
            built = self.built(chosen.active, chosen.multipliers)
            with rearranged(placement, former[1]):
                began = True
                self._used = None
                former[1].take()
                placement.put()
                self._go(chosen, placement, built, step)
        except BaseException:
            self.set, _, self._built, self.step = former
            if began:
                with rearranged(placement, former[1]):
                    self._used = None
                    placement.take()
                    former[1].take()
                    former[1].put()
                    self._go(*former)
            raise

    def _go(self, chosen: AdapterSet, placement: Placement, built: Optional[Built], step: int) -> None:
        """Computes with adapters whose forwards are in place."""
        self.set.users.discard(self)
        self.set, self._placement, self.step = chosen, placement, step
        self.use(built)
        chosen.users.add(self)
        for attachment in placement.attachments():
            if attachment not in self._follows:
                attachment.after_detach.append(partial(_left, weakref.ref(self), weakref.ref(attachment)))
                self._follows.add(attachment)

    def again(self) -> None:
        """Puts the same adapters in their places anew: the model, or a part of it, was attached."""
        self.replace(self.set, self.step)

    def left(self, attachment: Any) -> None:
        """The model was given back: its adapters follow it."""
        self._settled.leave(attachment)
        if self._placement is not None:
            self._placement.left(attachment)

    def built(self, numbers: Sequence[int], multipliers: Sequence[Multiplier]) -> Built:
        """What computes these adapters; that which there is, if it is of the same ones. Changes nothing."""
        key = (id(self.set), tuple(numbers))
        if self._built is not None and self._built.key == key:
            return self._built
        pieces: dict[str, list[tuple[int, Piece]]] = {}
        for position, number in enumerate(numbers):
            for name, found in self.set.loaded[number].pieces.items():
                pieces.setdefault(name, []).extend((position, piece) for piece in found)
        strengths = Strengths()
        computed: dict[int, Any] = {}
        swaps: dict[int, list[SwappedAdapters]] = {}
        for name, found in pieces.items():
            layer = self.layers[name]
            made = _adapters(layer, found, strengths)
            if isinstance(made, SwappedAdapters):
                swaps.setdefault(id(self._host(layer)), []).append(made)
            else:
                computed[id(self._host(layer))] = made
        for host, several in swaps.items():
            computed[host] = Swap(several) if host not in computed else _Both(computed[host], Swap(several))
        strengths.set([at_step(multiplier, 0) for multiplier in multipliers])
        return Built(strengths, computed, key)

    def use(self, built: Optional[Built]) -> None:
        """Computes with it from the next forward on; None is for no adapters."""
        placement = self._placement or Placement(())
        if built is None or self._used is not built:
            for attachment in placement.attachments():
                attachment._runtime.check_idle("a change of adapters")
            for slot in placement.slots.values():
                slot.current = None
            self._used = None
            self._settled.leave()
        self._built = built
        if built is None:
            return
        if self._used is not built:
            computed = self._settled.settle(placement, built.computed, self.set.reserve)
            for host, slot in placement.slots.items():
                slot.current = computed.get(host)
            self._used = built
        self.set_step(self.step)

    def set_step(self, step: int) -> None:
        """Takes the multipliers of a step."""
        self.step = step
        if self._built is not None:
            self._built.strengths.set([at_step(multiplier, step) for multiplier in self.set.multipliers])

    def _host(self, layer: AdaptedLayer) -> nn.Module:
        """The module whose forward is taken over for a layer."""
        return layer.leaf if layer.leaf is not None else layer.module


class _Both(nn.Module):
    """A layer that is computed with adapters and has parameters that are swapped besides."""

    def __init__(self, computed: Adapters, swap: Swap) -> None:
        super().__init__()
        self.computed = computed
        self.swap = swap

    def is_idle(self) -> bool:
        """Whether nothing is changed now."""
        return self.computed.is_idle() and self.swap.is_idle()

    def forward(self, module: nn.Module, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward with both."""

        def adapted(*args: Any, **kwargs: Any) -> Any:
            return self.computed.forward(module, inner, args, kwargs)

        return self.swap.forward(module, adapted, args, kwargs)


def _adapters(layer: AdaptedLayer, pieces: Sequence[tuple[int, Piece]], strengths: Strengths) -> Adapters:
    if layer.is_swapped:
        return SwappedAdapters(layer, pieces, strengths)
    if layer.kind == "embedding":
        return EmbeddingAdapters(layer, pieces, strengths)
    if layer.kind == "linear":
        return LinearAdapters(layer, pieces, strengths)
    return ConvolutionAdapters(layer, pieces, strengths)


def _left(state: weakref.ref[ModelAdapters], attachment: weakref.ref[Any]) -> None:
    kept, model = state(), attachment()
    if kept is not None and model is not None:
        kept.left(model)


_STATE = "_weightstream_adapters"
"""The attribute of a model, and of its parts, that keeps its adapters: they live as long as it does."""
_all: weakref.WeakSet[ModelAdapters] = weakref.WeakSet()


def state_of(model: nn.Module) -> Optional[ModelAdapters]:
    """The adapters of a model, or of the one that it is a part of; None if it has none."""
    return model.__dict__.get(_STATE)


def remember(state: ModelAdapters) -> None:
    """Makes a model's adapters known by it and by its parts."""
    _all.add(state)
    for ref in (state.model, *state.parts):
        model = ref()
        if model is not None:
            model.__dict__[_STATE] = state


def forget(state: ModelAdapters) -> None:
    """The opposite."""
    _all.discard(state)
    for ref in (state.model, *state.parts):
        model = ref()
        if model is not None and model.__dict__.get(_STATE) is state:
            del model.__dict__[_STATE]


def attached(model: nn.Module) -> None:
    """A model was attached: the adapters that it has, or that what it is a part of has, go where its weights go."""
    inside = {id(module) for module in model.modules()}
    for state in list(_all):
        if any(id(layer.module) in inside for layer in state.layers.values()):
            state.again()


def unload(model: nn.Module) -> None:
    """Takes all adapters off a model, and off what it is a part of. Does nothing to one that has none."""
    state = state_of(model)
    if state is not None:
        state.replace(AdapterSet([]))
        forget(state)
