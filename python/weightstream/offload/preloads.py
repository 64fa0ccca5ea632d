"""`autoPreload`: which models of a pipeline fill what their workloads leave free, and how much each may take at most."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Optional
from weakref import WeakValueDictionary

from ..attachment import Attachment
from ..preloading import Preloading
from .amounts import budget_of
from .components import Component
from .managed import ManagedModel, OffloadObject
from .parameters import Parameters

__all__ = ["set_preloading"]

log = logging.getLogger("weightstream.offload")


def set_preloading(
    components: list[Component],
    parameters: Parameters,
    company: Mapping[str, Optional[list[str]]],
    sizes: Mapping[str, int],
    compiled: Collection[str],
    done: OffloadObject,
) -> None:
    """Switches preloading on for the models that stream, except compiled ones, and for what they share. `sizes` are bytes with
    which all of each is resident.

    Models that may be on the device together keep room for each other's budgets, so that taking turns loads nothing again.
    What models share gets what is left beside theirs, before their steps.
    """
    if parameters.autoPreload is False or not parameters.asyncTransfers:
        return
    rooms = _Rooms(parameters, company, sizes, done)
    # A model may be dropped before the others, and takes its own with it.
    preloads: WeakValueDictionary[str, Preloading] = WeakValueDictionary()

    def switch_on(managed: ManagedModel, room: int, kind: str, **options: Any) -> None:
        attachment = managed.attachment
        assert attachment is not None
        runtime = attachment._runtime
        measured = parameters.autoPreload if isinstance(parameters.autoPreload, dict) else None
        # Another pipeline may have another model of this id.
        identity = f"{managed.name}/{kind}/{sizes[managed.name]}"
        most = min(room, sizes[managed.name])
        reserved = _reserved(attachment, managed.name, room - most, preloads)
        preload = Preloading(identity, runtime, attachment._steps, most, measured, reserved, **options)
        runtime.preloading = preloads[managed.name] = preload
        attachment.after_detach.append(runtime.stop_preloading)
        attachment._steps.adapt()
        log.debug("%s: up to %.1f MB of its weights are preloaded", managed.name, most / (1 << 20))

    for managed in rooms.parts:
        part = managed.part
        assert part is not None
        room, most = rooms.of_part(managed), rooms.budget(managed)
        streams = part.shared.towers and min(room, sizes[managed.name]) > most
        if streams and not set(compiled).intersection(part.shared.names):
            switch_on(managed, room, type(part.shared.model).__name__, users=part.users)
    for component in components:
        managed = done.models[component.name]
        if managed.part is not None or managed.attachment is None or component.name in compiled:
            continue
        shared = [one for one in rooms.parts if one.name in preloads and component.name in _names(one)]
        room, budget = rooms.of_model(managed), rooms.budget(managed)
        streams = component.towers and min(room, sizes[component.name]) > budget
        if streams or shared:
            # A model that has nothing to preload itself is measured for what it shares.
            switch_on(managed, room if streams else budget, type(component.model).__name__)
            preloads[component.name].beside.extend(preloads[one.name] for one in shared)


class _Rooms:
    """What each model, and what several share, may take at most."""

    def __init__(
        self,
        parameters: Parameters,
        company: Mapping[str, Optional[list[str]]],
        sizes: Mapping[str, int],
        done: OffloadObject,
    ) -> None:
        self._parameters, self._company, self._sizes = parameters, company, sizes
        everything = [one for one in (*done.models.values(), *done.shared.values()) if one.attachment is not None]
        self._models = {one.name: one for one in everything if one.part is None}
        self.parts = [one for one in everything if one.part is not None]
        """What models share, models that lie in others among it."""

    def budget(self, managed: ManagedModel) -> int:
        """Its budget, without what is apart."""
        attachment = managed.attachment
        assert attachment is not None
        return (attachment.budget or self._sizes[managed.name] + attachment.apart) - attachment.apart

    def of_model(self, managed: ManagedModel) -> int:
        """For a model: beside all that is shared, and the models that may be here with it."""
        return self._beside(managed, None)

    def of_part(self, managed: ManagedModel) -> int:
        """For what models share: beside each of them and its company."""
        users = [self._models[name] for name in _names(managed) if name in self._models]
        rooms = (self._beside(user, managed) - min(self.budget(user), self._sizes[user.name]) for user in users)
        return min(rooms, default=0)

    def _beside(self, managed: ManagedModel, part: Optional[ManagedModel]) -> int:
        name, target = managed.name, managed.group.target
        total = target.native.total_memory
        most = budget_of(name, 0, self._parameters.workingVRAM, total, self._parameters.vram_safety_coefficient)
        for one in self.parts:
            if one is not part and one.part is not None and one.group.target is target:
                most -= one.part.taken
        for other in self._models.values():
            if other is not managed and other.group is managed.group and self._together(name, other.name):
                most -= min(self.budget(other), self._sizes[other.name])
        return most

    def _together(self, one: str, other: str) -> bool:
        """Whether either accepts the other beside it; None accepts everyone, and is accepted by everyone."""
        lists = self._company[one], self._company[other]
        if lists[0] is None or lists[1] is None:
            return True
        return other in lists[0] or one in lists[1]


def _names(managed: ManagedModel) -> tuple[str, ...]:
    """The models that have what is shared."""
    return () if managed.part is None else managed.part.shared.names


def _reserved(attachment: Attachment, name: str, slack: int, preloads: Mapping[str, Preloading]) -> Callable[[], int]:
    """Gives what of the most that this may take is not its: adapters, and what is preloaded of what models share, or of those
    models, beyond the `slack` that there is."""

    def reserved() -> int:
        mine = preloads[name]
        others = [one for one in preloads.values() if one is not mine and (one.is_shared or mine.is_shared)]
        return attachment._reserved + max(sum(one.held_beyond(mine) for one in others) - slack, 0)

    return reserved
