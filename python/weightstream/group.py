"""Models that share a device: which one runs, and what of the others stays usable meanwhile.

The native share decides who leaves when a model comes. A model that left keeps its addresses, and poison lies behind them. Its
root, its hooked methods and its blocks bring it back by themselves; modules without turns get a *door* for as long as it is
away: a forward that brings the model, and is gone again before it passes the call on.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn

from ._native import Share
from .devices import Target
from .errors import StateError
from .overrides import is_adapted

if TYPE_CHECKING:
    from .running import Part, Runtime

__all__ = ["Doors", "Group", "execution_scope"]

_checkpoint: ContextVar[Callable[[], object] | None] = ContextVar("weightstream_checkpoint", default=None)


@contextmanager
def execution_scope(checkpoint: Callable[[], object]) -> Iterator[None]:
    """Calls `checkpoint` before and after a model comes to the device in this context; what it raises cancels the call that
    needed the model. All models stay usable."""
    if not callable(checkpoint):
        raise TypeError(f"execution_scope takes a function that may raise, not a {type(checkpoint).__name__}")
    token = _checkpoint.set(checkpoint)
    try:
        yield
    finally:
        _checkpoint.reset(token)


class Group:
    """The models of one device that share a page pool and a transit ring."""

    def __init__(self, target: Target, largest: int, limit: int) -> None:
        """For models of at most `largest` bytes each, which together take at most `limit`."""
        self.target = target
        self.share = Share(target.native, largest, limit)
        self.running: Runtime | None = None
        """The model that was brought last, if no other has been and it was not taken off."""
        self._members: list[weakref.ref[Runtime]] = []

    def join(self, runtime: Runtime) -> None:
        """A model shares the device from now on; it is not there yet."""
        self._members = [ref for ref in self._members if ref() is not None]
        self._members.append(weakref.ref(runtime))
        runtime.group = self

    def bring(self, runtime: Runtime) -> None:
        """Brings a model to the device. Those that it does not accept leave."""
        if self.running is runtime:
            return
        checkpoint = _checkpoint.get()
        if checkpoint is not None:
            checkpoint()
        self.running = None
        self._send_companions_away(runtime)
        try:
            self._arrive(runtime)
            for beside in (*runtime.parts, *runtime.companions):
                beside.come()
        finally:
            self.refresh()
        if checkpoint is not None:
            checkpoint()
        self.running = runtime

    def vacate(self, runtime: Runtime) -> None:
        """Takes a model off the device until it runs again."""
        self.running = None
        _vacate_companions(runtime)
        self.target.synchronize()  # what is resident may be in use on any stream
        try:
            runtime.offloader.vacate()
        finally:
            self.refresh()

    def settle(self) -> None:
        """A budget has changed: who is here may have, too."""
        if self.running is not None and not self.running.offloader.is_here():
            self.running = None
        self.refresh()

    def refresh(self) -> None:
        """Puts doors on the models that are away, and takes them off those that are here."""
        for runtime in self._alive():
            runtime.shut_doors()
            if not runtime.offloader.is_here():
                _vacate_companions(runtime)

    def _send_companions_away(self, coming: Runtime) -> None:
        """Takes off the device what is there for models that leave beside their weights: it counts in their budgets."""
        leaving = [
            runtime
            for runtime in self._alive()
            if runtime is not coming
            and not runtime.open
            and not (coming.company is None or runtime.company is None or runtime.name in coming.company)
        ]
        for runtime in leaving:
            _vacate_companions(runtime, leaving, coming.parts)

    def report(self) -> dict[str, Any]:
        """Which models are here, and the pages they hold."""
        return json.loads(self.share.report())

    def _arrive(self, runtime: Runtime) -> None:
        try:
            runtime.offloader.arrive(runtime.stream())
        except StateError:
            if not self._recover_lost(runtime):
                raise
            runtime.offloader.arrive(runtime.stream())

    def _recover_lost(self, runtime: Runtime) -> bool:
        """Gives up steps of other models that an interrupt left open; whether there was one."""
        lost = [
            other
            for other in self._alive()
            if other is not runtime
            and other.open
            and not any(other.is_running(frame) for frame in sys._current_frames().values())
        ]
        for other in lost:
            other.recover()
        return bool(lost)

    def _alive(self) -> list[Runtime]:
        return [runtime for runtime in (ref() for ref in self._members) if runtime is not None]


def _vacate_companions(runtime: Runtime, leaving: Collection[Runtime] = (), staying: Collection[Part] = ()) -> None:
    for companion in list(runtime.companions):
        companion.leave()
    for part in runtime.parts:
        if part not in staying:
            part.leave([runtime, *leaving])


class Doors:
    """The forwards that bring a model which is away, on modules with weights whose calls open no turn."""

    def __init__(self, modules: list[nn.Module], bring: Callable[[], None]) -> None:
        self._modules = modules
        self._bring = bring
        self._closed: list[tuple[nn.Module, Callable[..., Any], Callable[..., Any] | None]] = []

    def set(self, closed: bool) -> None:
        """Puts them on, or takes them off."""
        if closed and not self._closed:
            for module in self._modules:
                own = module.__dict__.get("forward")
                # What an adapter has put there stays behind its door.
                if own is None or is_adapted(own):
                    door = self._door(module, own)
                    self._closed.append((module, door, own))
                    module.__dict__["forward"] = door
        elif not closed:
            while self._closed:
                module, door, own = self._closed[-1]
                # What somebody else has set since stays.
                if module.__dict__.get("forward") is door:
                    if own is None:
                        del module.__dict__["forward"]
                    else:
                        module.__dict__["forward"] = own
                self._closed.pop()

    def _door(self, module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
        bring = self._bring

        def forward(*args: Any, **kwargs: Any) -> Any:
            bring()
            behind = type(module).forward.__get__(module) if own is None else own
            inner = behind if module.__dict__.get("forward") is forward else module.forward
            return inner(*args, **kwargs)

        return forward
