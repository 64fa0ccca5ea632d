"""What a model keeps on its device beside its budget: as much as each workload leaves free, measured in its first step.

    before a step   which workload is it, and what is free? the native policy says what the weights may take
    a first step    is measured: what PyTorch allocates in it beyond what was allocated when it began
    after it        what was measured is kept, for the process or in the caller's dictionary

What several models share is managed apart, and runs inside their steps: before each it gets what that model leaves.

Here is the mechanism; what is decided, and by which numbers, stands in the native policy (`preload.rs`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from ._native import Allocations, Preload
from .errors import BudgetError, DeviceError, StateError
from .step_memory import allocations_of, memory_of, release_pools

if TYPE_CHECKING:
    from .running import Runtime
    from .steps import ModelSteps

__all__ = ["MEASURED", "Preloading", "serve_allocations", "workload_of"]

log = logging.getLogger("weightstream.offload")

_serves = False
"""Whether allocations in forwards may ask for room."""


def serve_allocations(on: bool) -> None:
    """Whether allocations in forwards may ask for room, from the next step on."""
    global _serves  # noqa: PLW0603, a switch of the process
    _serves = on
    if not on:
        release_pools()


MEASURED: dict[str, Any] = {}
"""What steps of workloads take, in bytes, where the caller keeps no dictionary."""
_MARGIN = 256 << 20
"""Bytes left free beside what a step takes: workspaces of libraries, which PyTorch's allocator does not count."""
_LEAST_MARGIN = 64
"""On a small device this part of it is enough."""


class Preloading:
    """The preloading of one model that streams."""

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        steps: ModelSteps,
        most: int,
        measured: MutableMapping[str, Any] | None,
        reserved: Callable[[], int] = lambda: 0,
        users: Callable[[], Collection[Runtime]] | None = None,
    ) -> None:
        """`most` is the most the weights ever take, of which `reserved` says what is kept for adapters and preloaded by others;
        `measured` is the caller's dictionary, or None for the process. `users` gives the models whose steps these weights are
        a part of, if they are what several models share."""
        self._name = name
        self._runtime = runtime
        self._steps = steps
        self._known = MEASURED if measured is None else measured
        self._device = memory_of(runtime.target)
        margin = min(_MARGIN, runtime.target.native.total_memory // _LEAST_MARGIN)
        self._policy = Preload(most, margin)
        self._most = most
        self._reserved = reserved
        self._workload: str | None = None
        self._measures = False
        self._expected: tuple[int, int] | None = None
        """The budget and what of it was preloaded, as the last step began or as it was changed since."""
        self.allocations: Allocations | None = None
        """Allocations for which this model makes room, if it does."""
        self.is_shared = users is not None
        """Whether it is of what several models share."""
        self._users = tuple if users is None else users
        self._with: weakref.ref[Preloading] | None = None
        """Whose step the workload is, if it is a model's that has these weights."""
        self.beside: list[Preloading] = []
        """Those of what the model shares with others, which get what its own leaves."""

    def before(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A step begins, in which nothing of the model runs yet."""
        self._measures = False
        if any(user.open for user in self._users()):
            return  # it lies in a model's step, before which this was looked at
        workload = f"{self._name}.{workload_of(method, args, kwargs)}"
        self._with = None
        for one in (self, *self.beside):
            one._note_pressure()
        known = self._known.get(workload)
        if (
            self._policy.need(workload) is None
            and isinstance(known, int)
            and not isinstance(known, bool)
            and known >= 0
        ):
            self._policy.learn(workload, known)
        measures = self._fill(workload)
        for shared in self.beside:
            shared.accompany(self, workload, None if measures else self._policy.need(workload))
        self._measures = measures
        if measures:
            self._device.begin()

    def accompany(self, user: Preloading, workload: str, need: int | None) -> None:
        """A step begins of a model that has these weights, which needs so much; None if it is to be measured."""
        self._with = weakref.ref(user)
        if need is not None:
            self._policy.learn(workload, max(need, self._policy.need(workload) or 0))
        self._fill(workload)

    def forget(self) -> None:
        """The weights have left the device: they come back with their budget alone, for which there is room."""
        try:
            self._runtime.offloader.preload(0)
        except (BudgetError, DeviceError, StateError) as error:
            log.debug("%s keeps its preload while it is away: %s", self._name, error)
        finally:
            self._settle()
        self._expected = self._now()

    def _fill(self, workload: str) -> bool:
        """Lets the weights take what a step of the workload leaves. Whether that is to be measured first."""
        offloader = self._runtime.offloader
        if self.allocations is None and _serves:
            self.allocations = allocations_of(self._runtime.target)
            self.allocations.serve(offloader)
        budget, measures, trims = self._ask(workload)
        if trims:
            self._device.trim()
            budget, measures, _ = self._ask(workload)
        if budget != offloader.budget():
            self._change(workload, budget)
        self._workload, self._expected = workload, self._now()
        return measures

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Makes the step's call, in which allocations may ask for room."""
        if self.allocations is None or not _serves:
            return call(*args)
        with self._device.allocating():
            return call(*args)

    def after(self) -> None:
        """The step ended without an error."""
        if self._measures and self._workload is not None:
            self._measures = False
            self._know(self._workload, self._device.end())

    def failed(self, error: BaseException) -> None:
        """The step ended with an error. If memory ran out, it needs what was preloaded."""
        if isinstance(error, torch.cuda.OutOfMemoryError) and self._workload is not None:
            all_of_it = (one._runtime.offloader.preloaded() for one in (self, *self.beside))
            self._press(self._workload, sum(all_of_it))

    def release(self, wanted: int) -> int:
        """Gives back at least `wanted` bytes of what is preloaded, or all of it; how much that was. Also in the middle of a step
        of this thread, which goes on; nothing while another thread is in one."""
        runtime = self._runtime
        inside = bool(runtime.open)
        if any(user.open and user.thread != get_ident() for user in self._users()):
            return 0
        if not inside:
            runtime.target.synchronize()
        try:
            freed = runtime.offloader.release_preload(wanted)
        except (StateError, BudgetError) as error:
            log.debug("%s gives nothing back: %s", self._name, error)
            return 0
        finally:
            if not inside:
                self._settle()
        if (inside or any(user.open for user in self._users())) and freed and self._workload is not None:
            self._press(self._workload, freed)
        self._expected = self._now()
        return freed

    def held_beyond(self, other: Preloading) -> int:
        """What of the device that it shares with another it holds beyond its budget."""
        runtime = self._runtime
        same = runtime.target is other._runtime.target and runtime.offloader.is_here()
        return runtime.offloader.preloaded() if same else 0

    def _now(self) -> tuple[int, int]:
        return self._runtime.offloader.budget() or 0, self._runtime.offloader.preloaded()

    def _note_pressure(self) -> None:
        """What an allocation took of the preload in the last step is needed by its workload."""
        if self._expected is None or self._workload is None:
            return
        (budget, preloaded), (budget_now, preloaded_now) = self._expected, self._now()
        if budget_now - preloaded_now == budget - preloaded and preloaded_now < preloaded:
            self._press(self._workload, preloaded - preloaded_now)

    def _press(self, workload: str, bytes_: int) -> None:
        self._measures = False
        # What a step was left is known where that was looked at last.
        policy = self.beside[-1]._policy if self.beside else self._policy
        need = policy.pressed(workload, bytes_)
        self._know(workload, need)
        user = None if self._with is None else self._with()
        if user is not None:
            user._know(workload, need)

    def _know(self, workload: str, need: int) -> None:
        self._policy.learn(workload, need)
        self._known[workload] = need

    def _settle(self) -> None:
        if self._runtime.group is not None:
            self._runtime.group.settle()
        self._steps.adapt()

    def _ask(self, workload: str) -> tuple[int, bool, bool]:
        offloader = self._runtime.offloader
        free, cached = self._device.room()
        budget = offloader.budget() or 0
        held = budget if offloader.is_here() else 0
        least = budget - offloader.preloaded()
        allowed, measures, trims = self._policy.begin(workload, free, cached, held, least)
        return min(allowed, max(self._most - self._reserved(), least)), measures, trims

    def _change(self, workload: str, budget: int) -> None:
        runtime, before = self._runtime, self._runtime.offloader.budget() or 0
        try:
            runtime.offloader.preload(budget)
        except (BudgetError, StateError) as error:
            # Others are in the middle of a step on the same device: there is a next time.
            log.debug("%s keeps what it has on the device: %s", self._name, error)
        except DeviceError as error:
            if budget < before:
                raise
            # Somebody else was faster. All is as it was, and is not tried again at once.
            self._press(workload, budget - before)
            log.debug("%s: %.1f MB were not preloaded: %s", self._name, (budget - before) / (1 << 20), error)
        else:
            log.debug(
                "%s: %.1f MB of weights may be on the device, %.1f before",
                self._name,
                budget / (1 << 20),
                before / (1 << 20),
            )
        finally:
            self._settle()


def workload_of(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What tells workloads of a model apart: the method, and the shapes and types of the tensors it is given."""
    shapes: list[str] = []
    _collect(args, shapes)
    for name in sorted(kwargs):
        _collect(kwargs[name], shapes, f"{name}=")
    return f"{method}({', '.join(shapes)})"


def _collect(value: Any, shapes: list[str], prefix: str = "") -> None:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shapes.append(f"{prefix}{dtype}[{'x'.join(map(str, value.shape))}]")
    elif isinstance(value, Mapping):
        for name, part in value.items():
            _collect(part, shapes, f"{prefix}{name}=")
    elif isinstance(value, (list, tuple)):
        for part in value:
            _collect(part, shapes, prefix)
