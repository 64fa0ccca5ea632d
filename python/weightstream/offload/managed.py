"""The object that `profile` and `all` return: the models of a pipeline while they are managed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Optional

from torch import nn

from ..attachment import Attachment
from ..errors import WeightstreamError
from ..group import Group
from .parameters import Parameters, check_names

__all__ = ["ManagedModel", "OffloadObject"]

log = logging.getLogger("weightstream.offload")


class ManagedModel:
    """One model that was set up, and how to make it plain again."""

    def __init__(self, name: str, model: nn.Module, group: Group) -> None:
        """Nothing was done yet."""
        self.name = name
        self.model = model
        self.group = group
        self.attachment: Attachment | None = None
        self.undo: list[Callable[[], None]] = []
        """What was done besides attaching, to be undone last first."""

    def release(self) -> None:
        """Makes the model plain. What an error or interrupt cuts short is completed by the next call."""
        if self.attachment is not None:
            self.attachment.detach()
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
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def release(self) -> None:
        """Makes all models plain CPU models, gives device memory and reserved RAM back. Call it before setting up others.

        StateError, with the other models released, for one that is running; a second call completes it.
        """
        first: BaseException | None = None
        with self._lock:
            for name in reversed(list(self.models)):
                try:
                    self.models[name].release()
                    del self.models[name]
                except WeightstreamError as error:
                    first = first or error
            if first is not None:
                raise first
            while self._undo:
                self._undo[-1]()
                self._undo.pop()

    def unload_all(self, keep: Collection[str] = ()) -> None:
        """Takes every model off the device until it runs again, except those whose ids are in `keep`."""
        keep = [keep] if isinstance(keep, str) else list(keep)
        with self._lock:
            check_names("keep", keep, self.models)
            for name, managed in self.models.items():
                if name not in keep and managed.attachment is not None:
                    managed.group.vacate(managed.attachment._runtime)

    def release_preload(self, bytes: Optional[int] = None) -> int:  # noqa: A002, what it is
        """Gives back at least so many bytes of what `autoPreload` has put on the devices, or all of it: when an application needs
        memory for something else, or ran out of it, also inside a model's forward on this thread, which goes on. What was given
        back in a step counts as its workload's need from then on. The bytes that are free now."""
        left, freed = (1 << 62) if bytes is None else bytes, 0
        for managed in self._idle_first():
            attachment = managed.attachment
            preloading = None if attachment is None else attachment._runtime.preloading
            if preloading is not None and freed < left:
                freed += preloading.release(left - freed)
        return freed

    def _idle_first(self) -> list[ManagedModel]:
        runs = {
            name: managed.attachment and bool(managed.attachment._runtime.open) for name, managed in self.models.items()
        }
        return [self.models[name] for name in sorted(self.models, key=lambda name: bool(runs[name]))]

    def loaded(self) -> list[str]:
        """The ids of the models that are on their device now."""
        here = (name for name, managed in self.models.items() if managed.attachment is not None)
        return [name for name in here if self.models[name].attachment._runtime.offloader.is_here()]

    def report(self) -> dict[str, Any]:
        """For each model its attachment's report."""
        return {name: managed.attachment.report() for name, managed in self.models.items() if managed.attachment}

    def __enter__(self) -> OffloadObject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<OffloadObject of {', '.join(self.models) or 'nothing any more'}>"
