"""Whose turn it is: the state that the wrapped forwards of one attached model share.

Entering and leaving go straight to the engine. What is kept here tells the odd cases apart: a module called inside its
own turn, a second thread, a forked child, a stream being captured, and turns that a lost exit (an interrupt between two
bytecodes) left open.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Lock, get_ident
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ._native import Offloader, Turns
from .compiled import compiling, refuse_freezing
from .devices import Target
from .errors import StateError, WeightstreamError
from .gradients import refuse_grad
from .group import Doors, Group
from .tracing import refuse_tracing
from .uncompiled import uncompiled

if TYPE_CHECKING:
    from .preloading import Preloading

__all__ = ["ROOT", "Runtime", "close"]

ROOT = -1
"""Stands for the root's forward among the open units."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Code whose frames lose their caller while they are suspended: at the end of a stack that runs there is none."""
_LOOKS = 1000
"""Looks at another thread's stack until one is whole. The second nearly always is."""


class Companion(Protocol):
    """What is on a device for a model beside its weights."""

    def come(self) -> None:
        """Called when the model came to the device."""

    def leave(self) -> None:
        """Called before it leaves, or another comes."""


class Part(Protocol):
    """Weights that several models have, which are managed apart."""

    def joined(self, runtime: Runtime) -> None:
        """A model that has them is attached."""

    def come(self) -> None:
        """Called when one of the models came to the device."""

    def leave(self, leaving: Collection[Runtime]) -> None:
        """Called before these models leave, or after."""

    def is_here(self) -> bool:
        """Whether it is on the device."""


class Runtime:
    """The open turns of one model and the way to its engine."""

    def __init__(self, offloader: Offloader, target: Target) -> None:
        self.offloader = offloader
        self.target = target
        self.stream: Callable[[], int] = target.stream_getter()
        self.turns = Turns(offloader, None if target.emulated else self.stream, torch.is_grad_enabled)
        self.open: list[int] = self.turns.open
        """Units that are entered, oldest first, and marks below zero: `ROOT`, blocks in segments. Empty between calls."""
        self.retired: list[bool] = []
        """What wrapped forwards look at to know that they are no longer in force; true once they are not."""
        self.detached = False
        """Whether the model was given back; a root's wrapped forward that somebody kept then passes its calls through."""
        self.group: Group | None = None
        """The models that it shares its device with."""
        self.doors = Doors([], self.bring)
        """What brings the model while it is away, besides its root and its blocks."""
        self.name = ""
        """Its name there."""
        self.company: list[str] | None = []
        """Whom it accepts there; None for everyone, and everyone it."""
        self.companions: weakref.WeakSet[Companion] = weakref.WeakSet()
        """What is on the device for this model beside its weights, and comes and leaves with them."""
        self.parts: list[Part] = []
        """What it shares with other models: on the device as long as one of them is."""
        self.preloading: Preloading | None = None
        """What gives its steps what their workloads leave free."""
        self.adapt: Callable[[Any], Any] | None = None
        """What is done to the arguments of its root and of hooked methods."""
        self.closing = False
        """Whether the model is being given back: no forward may begin, and until all of it is done none will."""
        self.failed_steps = 0
        """Steps that began and ended with an error."""
        self.held: dict[int, int] = {}
        """How often each owned tensor is held by `resident`."""
        self.copied: set[int] = set()
        """Owned tensors that a forward read by a method outside their turn: the host's bytes were copied for it."""
        self.holders: list[int] = []
        """The threads that hold them."""
        self.unit_of: dict[int, int] = {}
        """The unit of each owned tensor that streams; what is not in it is always present."""
        self._claiming = Lock()
        self._claimant = 0
        """The thread that began a first turn last."""
        self._wrappers: set[CodeType] = set()
        self._pid = os.getpid()

    refuse_grad = staticmethod(refuse_grad)
    """For `turns`, whose turns check their inputs and outputs."""

    @property
    def thread(self) -> int:
        """The thread that opened the turns. Set by that thread."""
        return self.turns.thread

    @thread.setter
    def thread(self, ident: int) -> None:
        self.turns.thread = ident

    def wrapper(self, forward: FunctionType) -> FunctionType:
        """Makes a wrapped forward known by its code, and keeps it out of compiled code."""
        self._wrappers.add(forward.__code__)
        return uncompiled(forward)

    def retire_wrappers(self) -> None:
        """Makes every wrapped forward there is pass its calls through: others take their place, or none."""
        self.retired.append(True)
        self.retired = []

    def presence_of(self, tensor: int) -> Callable[[], bool]:
        """A function that says whether the owned tensor's bytes are on the device now."""

        def present() -> bool:
            if self.group is not None and not self.offloader.is_here():
                return False
            unit = self.unit_of.get(tensor)
            # Another thread's turn may end while this one reads.
            within = self.thread == get_ident()
            if unit is None or (within and unit in self.open) or tensor in self.held:
                return True
            if within and self.open:
                self.copied.add(tensor)
            return False

        return present

    def arrive(self, unit: int, name: str) -> bool:
        """Called by a wrapped forward before a turn that is not plainly the next one of a running step.

        True if the call is made inside the unit's own turn, which is then already open. Raises StateError if the caller
        may not enter.
        """
        self.check_process(name)
        if self.closing:
            raise StateError(
                f"{name} was called while its model is being detached; if that was interrupted, call detach() again"
            )
        if not self.open:
            self._claim(name)
            self.check_stream(name)
            refuse_tracing(name)
            if compiling():
                refuse_freezing(name)
            self.bring()
        elif self.thread != get_ident():
            self._refuse_second(name, self.thread)
            self.recover()
        else:
            caller = sys._getframe(2)
            if not self.is_running(caller):
                self.recover()
            elif unit == ROOT or (unit in self.open and self.is_running(caller, unit)):
                return True
            elif unit in self.open:
                self.open.remove(unit)
                self.abandon(unit)
        self.thread = get_ident()
        return False

    def _claim(self, name: str) -> None:
        """Makes the first turn this thread's, before any is open: bringing a model takes long."""
        with self._claiming:
            if self._claimant != get_ident():
                self._refuse_second(name, self._claimant)
                self._claimant = get_ident()

    def _refuse_second(self, name: str, first: int) -> None:
        """StateError if the thread `first` is in a forward of this model. If it is not, an exit was lost."""
        if self.runs_in(first):
            raise StateError(
                f"{name} was called from a second thread while another runs the model; an attached model is run by one "
                f"thread at a time"
            )

    def bring(self) -> None:
        """Brings the model to the device, if it shares one."""
        if self.group is not None and self.group.running is not self:
            self.group.bring(self)

    def is_here(self) -> bool:
        """Whether the model is on the device with what it shares with others."""
        return self.offloader.is_here() and all(part.is_here() for part in self.parts)

    def shut_doors(self) -> None:
        """Puts doors on the model if it is away, and takes them off if it is here."""
        self.doors.set(self.group is not None and not self.is_here())

    def stop_preloading(self) -> None:
        """Its steps get their budget and nothing else from now on."""
        self.preloading = None

    def check_process(self, name: str) -> None:
        """Refuses forked children: they share the addresses and have no engine."""
        if os.getpid() != self._pid:
            raise StateError(
                f"{name} was called in a forked child of the process that attached it; attach after forking, or use the "
                f"spawn start method"
            )

    def check_stream(self, name: str) -> None:
        """Refuses a stream that somebody captures: copies would be frozen into their graph."""
        if not self.target.emulated and torch.cuda.is_current_stream_capturing():
            raise StateError(f"{name} was called while its stream is being captured into a CUDA graph; run it eagerly")

    def abandon(self, unit: int) -> None:
        """Leaves a unit after an error, which is what the caller sees: a second error is not raised over it."""
        with suppress(WeightstreamError):  # it was not entered: the error came from there
            self.offloader.leave(unit, self.stream())

    def recover(self) -> None:
        """Gives up what an error or a lost exit left open: the next turn waits for all work, then starts over."""
        self.open.clear()
        self.offloader.abandon_step()

    def check_idle(self, call: str = "detach") -> None:
        """Raises StateError while any thread is in a forward of this model, or computes with what it holds.

        With `closing` set before, no forward begins behind this look.
        """
        here = get_ident()
        for thread in list(sys._current_frames()):
            if self.runs_in(thread):
                who = "the model" if thread == here else "another thread"
                what = "is running" if thread == here else "runs the model"
                raise StateError(f"{call} was called while {who} {what}; let its forward end first")
            if thread != here and thread in self.holders:
                raise StateError(f"{call} was called while another thread is in `with attachment.resident(...)`")
        if self.open:
            self.recover()

    def runs_in(self, thread: int) -> bool:
        """Whether another thread, which goes on meanwhile, is in a wrapped forward of this model."""
        for _ in range(_LOOKS):
            running, last = self._walk(sys._current_frames().get(thread), None)
            # A generator that was suspended since has lost its caller, and what lies below it was not seen.
            if running or last is None or not last.f_code.co_flags & _SUSPENDS:
                return running
        return False

    def is_running(self, frame: FrameType | None, unit: int | None = None) -> bool:
        """Whether a wrapped forward of this model (that of `unit`, if given) is on the stack that ends in `frame`."""
        return self._walk(frame, unit)[0]

    def _walk(self, frame: FrameType | None, unit: int | None) -> tuple[bool, FrameType | None]:
        """That, and the frame at which the look at the stack ended."""
        last = frame
        while frame is not None:
            if frame.f_code in self._wrappers:
                local: dict[str, Any] = frame.f_locals
                if local.get("runtime") is self and (unit is None or local.get("unit") == unit):
                    return True, frame
            last, frame = frame, frame.f_back
        return False, last


def close(offloader: Offloader, process: int) -> None:
    """Closes the engine of a model that is gone, if this is the process it runs in."""
    if os.getpid() == process:
        with suppress(WeightstreamError):
            offloader.close()
