"""The object that `profile` and `all` return: the models of a pipeline while they are managed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, Union

from torch import nn

from ..attachment import Attachment
from ..checks import MARK
from ..errors import WeightstreamError
from ..group import Group
from .parameters import Parameters, check_names

if TYPE_CHECKING:
    from .parts import SharedPart
    from .planning import Planned

__all__ = ["ManagedModel", "OffloadObject"]

log = logging.getLogger("weightstream.offload")


_ALL = 1 << 62
"""Bytes: more than any device has."""


class ManagedModel:
    """One model that was set up, and how to make it plain again."""

    def __init__(self, name: str, model: nn.Module, group: Group) -> None:
        """Nothing was done yet."""
        self.name = name
        self.model = model
        self.group = group
        self.attachment: Attachment | None = None
        self.part: SharedPart | None = None
        """What several models share, if it is that."""
        self.apart = 0
        """Bytes of its budget that what it shares with others takes."""
        self.undo: list[Callable[[], None]] = []
        """What was done besides attaching, to be undone last first."""

    def release(self) -> None:
        """Makes the model plain. What an error or interrupt cuts short is completed by the next call."""
        # An interrupt may have come between attaching and its being noted.
        attachment = self.attachment or self.model.__dict__.get(MARK)
        if attachment is not None:
            attachment.detach()
        while self.undo:
            self.undo[-1]()
            self.undo.pop()


class OffloadObject:
    """Models that run on a device with less memory than they take. As a context manager it releases them at the end."""

    def __init__(self, parameters: Parameters) -> None:
        """Made by `profile` and `all` only."""
        self.parameters = parameters
        """What was set."""
        self.models: dict[str, ManagedModel] = {}
        """The models by id."""
        self.shared: dict[str, ManagedModel] = {}
        """What several of them share, and is none of them: managed once, apart, under their ids joined by `+`."""
        self._order: list[str] = []
        """The names of all of these, in the order in which they are set up."""
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def note(self, planned: Collection[Planned], ids: Collection[str]) -> None:
        """Knows what is going to be managed."""
        models = {one.managed.name: one.managed for one in planned if one.component is not None}
        self.models.update({name: models[name] for name in ids})
        self.shared.update({one.managed.name: one.managed for one in planned if one.component is None})
        self._order = [one.managed.name for one in planned]

    def release(self) -> None:
        """Makes all models plain CPU models, gives device memory and reserved RAM back. Call it before setting up others.

        StateError, with the other models released, for one that is running; a second call completes it.
        """
        first: BaseException | None = None
        with self._lock:
            for name in reversed(self._order):
                managed = self.models.get(name) or self.shared.get(name)
                if managed is None or (first is not None and managed.part is not None):
                    continue  # what lies in several models goes when they are plain
                try:
                    managed.release()
                    self.models.pop(name, None)
                    self.shared.pop(name, None)
                except WeightstreamError as error:
                    first = first or error
            if first is not None:
                raise first
            while self._undo:
                self._undo[-1]()
                self._undo.pop()

    def unload_all(self, keep: Union[str, Iterable[str], None] = ()) -> None:
        """Takes every model off the device until it runs again, except those whose ids are in `keep`."""
        kept = () if keep is None else [keep] if isinstance(keep, str) else keep
        if not isinstance(kept, Iterable) or isinstance(kept, bytes):
            raise TypeError(f"keep is {keep!r}; give a model id or a list of them")
        keep = list(kept)
        with self._lock:
            check_names("keep", keep, self.models)
            for name, managed in self.models.items():
                if name not in keep and managed.attachment is not None:
                    if managed.part is not None:
                        managed.part.vacate()
                    else:
                        managed.group.vacate(managed.attachment._runtime)

    def release_preload(self, bytes: Optional[int] = None) -> int:  # noqa: A002, what it is
        """Gives back at least so many bytes of what `autoPreload` has put on the devices, or all of it: when an application needs
        memory for something else, or ran out of it, also inside a model's forward on this thread, which goes on. What was given
        back in a step counts as its workload's need from then on. The bytes that are free now."""
        if bytes is not None and (not isinstance(bytes, Integral) or isinstance(bytes, bool) or bytes < 0):
            raise TypeError(f"bytes is {bytes!r}; give a number of bytes from 0 up, or None for all of it")
        left, freed = _ALL if bytes is None else min(int(bytes), _ALL), 0
        for managed in self._in_order_of_giving():
            attachment = managed.attachment
            preloading = None if attachment is None else attachment._runtime.preloading
            if preloading is not None and freed < left:
                freed += preloading.release(left - freed)
        return freed

    def _in_order_of_giving(self) -> list[ManagedModel]:
        """What models share, then those that are idle, then those that run."""

        def runs(managed: ManagedModel) -> bool:
            return managed.attachment is not None and bool(managed.attachment._runtime.open)

        return [*self.shared.values(), *sorted(self.models.values(), key=runs)]

    def loaded(self) -> list[str]:
        """The ids of the models that are on their device now."""
        here = (name for name, managed in self.models.items() if managed.attachment is not None)
        return [name for name in here if self.models[name].attachment._runtime.offloader.is_here()]

    def report(self) -> dict[str, Any]:
        """For each model, and what several share, its attachment's report."""
        everything = {**self.models, **self.shared}
        return {name: managed.attachment.report() for name, managed in everything.items() if managed.attachment}

    def __enter__(self) -> OffloadObject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<OffloadObject of {', '.join(self.models) or 'nothing any more'}>"
