"""A model that is attached: what can be asked of it, and how to get the plain model back."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from types import TracebackType
from typing import Any, Optional, Union

import torch
from torch import nn

from ._native import parse_bytes
from .binding import Binding
from .errors import BudgetError, ModelError, StateError, WeightstreamError
from .overrides import Overrides
from .ownership import Ownership
from .report import Report
from .running import Runtime, close
from .startup.reports import Report as TimingReport
from .steps import ModelSteps, streaming_blocks

__all__ = ["Attachment", "undo"]


def undo(binding: Binding, turns: Overrides, overrides: Overrides, runtime: Runtime) -> None:
    """Makes an attached model plain again, however far attaching or an earlier call of this came.

    Weights come first: until they are plain, the wrapped forwards keep other threads out.
    """
    binding.unbind()
    runtime.detached = True
    runtime.doors.set(False)
    runtime.retire_wrappers()
    turns.restore()
    overrides.restore()
    runtime.offloader.close()


class Attachment:
    """What `attach` returns. As a context manager it detaches at the end.

    It lives as long as the model, so it need not be kept: an attached model keeps working without it, and has it as
    `model._weightstream`.
    """

    def __init__(
        self,
        model: nn.Module,
        ownership: Ownership,
        binding: Binding,
        runtime: Runtime,
        steps: ModelSteps,
        turns: Overrides,
        overrides: Overrides,
        facts: dict[str, Any],
    ) -> None:
        """Made by `attach` only."""
        self._model = model
        self._ownership = ownership
        self._binding = binding
        self._runtime = runtime
        self._steps = steps
        self._turns = turns
        self._overrides = overrides
        self._facts = facts
        self._lock = threading.RLock()
        self._leaving = False
        """Whether detaching has begun to change things: it can then only be completed."""
        self._detached = False
        self._reserved = 0
        """Bytes of the budget that are kept for what is on the device beside the weights."""
        self.apart = 0
        """Bytes of the budget that weights take which the model shares with others, and which are managed apart."""
        self.after_detach: list[Callable[[], None]] = []
        """What is done once the model is plain again, last first."""
        # A model that is dropped with copies under way would leak its device memory. At exit nothing is worth a wait. What
        # closes it is told of nothing that has the model: it would live as long.
        self._finalizer = weakref.finalize(model, close, runtime.offloader, os.getpid())
        self._finalizer.atexit = False
        self._last: tuple[dict[str, Any], Report] = ({}, Report())

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._model

    @property
    def device(self) -> torch.device:
        """Where the model computes: give it inputs there. The CPU for the emulator."""
        return self._runtime.target.device

    @property
    def attached(self) -> bool:
        """Whether the model is attached still."""
        return not self._detached

    @property
    def failed_steps(self) -> int:
        """How many of the model's steps ended with an error; `stats()["steps"]` counts all that began."""
        return self._runtime.failed_steps

    def detach(self) -> nn.Module:
        """Gives the plain CPU model back: same objects, same bits, ties and requires_grad as before. Blocks.

        Works after errors too, and a second call does nothing, unless the first was interrupted: then it completes it.
        StateError, with nothing changed, while any thread is in a forward of the model.
        """
        with self._lock:
            if not self._detached:
                self._prepare()
                undo(self._binding, self._turns, self._overrides, self._runtime)
                while self.after_detach:
                    self.after_detach[-1]()
                    self.after_detach.pop()
                self._finalizer.detach()
                self._detached = True
            # What is held here would keep the model's old storages alive into a next attach.
            for held in ("_binding", "_ownership", "_steps"):
                self.__dict__.pop(held, None)
        return self._model

    def _prepare(self) -> None:
        """Waits for all work and keeps others out from then on; StateError, and nothing changed, if the model runs."""
        runtime = self._runtime
        runtime.check_process("detach")
        if self._leaving:
            return
        try:
            runtime.closing = True
            runtime.check_idle()
            runtime.target.synchronize()
            with suppress(WeightstreamError):  # a device that fails must not keep the model
                self._last = (self.stats(), self.report())
            self._leaving = True
        finally:
            runtime.closing = self._leaving

    @property
    def budget(self) -> Optional[int]:
        """The device memory that the weights may take, those of adapters included, in bytes; without what `autoPreload` adds."""
        budget = None if self._leaving else self._own_budget()
        return None if budget is None else budget + self._reserved + self.apart

    def set_budget(self, budget: Union[int, str, None]) -> None:
        """Changes it, in the spellings of `attach`, between the model's forwards. Blocks until the model's work has run.

        Addresses and bits stay. A higher budget copies what becomes resident, a lower one copies nothing. None counts what the
        model has on the device as free. BudgetError below the model's minimum, which it names, and StateError in a
        forward or `with resident(...)`: nothing was changed. After a DeviceError a higher budget is as if it had not been
        asked for, and a lower one is made true by the next forward.
        """
        runtime = self._runtime
        runtime.check_process("set_budget")
        with self._lock:
            if self._leaving:
                raise StateError("the model is detached; it takes no device memory")
            runtime.check_idle("set_budget")
            beside = self._reserved + self.apart
            if beside and isinstance(budget, (int, str)) and "%" not in str(budget):
                self._limit(self._less(parse_bytes(budget), beside))
                return
            before = self._own_budget()
            self._limit(budget)
            resolved = self._own_budget()
            if beside and resolved is not None:
                try:
                    self._limit(self._less(resolved, beside))
                except BudgetError:
                    self._limit(before)
                    raise

    def reserve(self, nbytes: int) -> None:
        """Keeps so much of the budget for what is on the device beside the model's weights; 0 gives it back. BudgetError, with
        nothing changed, if the model cannot do with the rest. What has no budget needs none."""
        runtime = self._runtime
        runtime.check_process("reserve")
        with self._lock:
            if self._leaving:
                return  # there is no budget any more
            runtime.check_idle("reserve")
            whole = self.budget
            if whole is not None and nbytes != self._reserved:
                self._limit(self._less(whole, nbytes + self.apart))
                self._reserved = nbytes

    def _own_budget(self) -> Optional[int]:
        """What the weights alone may take."""
        budget = self._runtime.offloader.budget()
        return None if budget is None else budget - self._runtime.offloader.preloaded()

    @staticmethod
    def _less(budget: int, nbytes: int) -> int:
        """What is left of a budget for the weights. BudgetError if that is nothing."""
        if budget <= nbytes:
            raise BudgetError(
                f"a budget of {budget} bytes is too small: {nbytes} are kept for adapters and what other models share alone"
            )
        return budget - nbytes

    def _limit(self, budget: Union[int, str, None]) -> None:
        """Changes what the weights alone may take."""
        runtime = self._runtime
        if runtime.group is not None:
            runtime.target.synchronize()  # what is resident of those that leave may be in use on any stream
        try:
            runtime.offloader.set_budget(budget)
        finally:
            if runtime.group is not None:
                runtime.group.settle()
            self._steps.adapt()

    def compile(
        self,
        *,
        backend: Union[str, Callable[..., Any]] = "inductor",
        mode: Optional[str] = None,
        dynamic: Optional[bool] = None,
        options: Optional[dict[str, Any]] = None,
        disable: bool = False,
    ) -> None:
        """Compiles the model in place as one graph, `torch.compile(..., fullgraph=True)` with its weights streaming.

        The arguments are those of `torch.compile`. The next step is watched and runs uncompiled, with whole blocks; the
        one after it compiles. Forward only. With PyTorch 2.11, NotAvailableError elsewhere and for
        blocks of tensor subclasses; StateError for arguments that `torch.compile` does not take, with Inductor's `freezing`, and in a
        forward: nothing was changed. ForwardError from a step whose graph would read weights out of turn. Calling it again takes the
        new arguments; `disable=True`, or detaching, undoes it.
        """
        name = type(self._model).__name__
        self._runtime.check_process("compile")
        with self._lock:
            if self._leaving:
                raise StateError("the model is detached; compile the plain model by torch.compile")
            if disable:
                self._steps.compile(None)
                return
            from .whole_graph import WholeGraph, check_whole  # needs what this version of PyTorch has

            blocks = {id(block.module) for block in streaming_blocks(self._ownership)}
            check_whole(name, self._ownership, id(self._model) not in blocks, options)
            self._steps.compile(WholeGraph(name, self._runtime, backend, mode, dynamic, options))

    def stats(self) -> dict[str, Any]:
        """Counters since attach: steps, visits, copies, their bytes and their cost. The last ones if detached."""
        return dict(self._last[0]) if self._leaving else json.loads(self._runtime.offloader.stats())

    def trace_next_step(self) -> None:
        """Measures on the device when the next whole step visits and copies what; `step_trace` gives it afterwards.

        Costs two events a visit and a copy in that step. Copies through the staging ring are not among them.
        """
        if self._leaving:
            raise StateError("the model is detached; there are no steps to trace")
        self._runtime.offloader.trace_next_step()

    def step_trace(self) -> Optional[TimingReport]:
        """The step that was traced, as a report like those of `weightstream.startup`, once; None if there is none yet.

        `step_trace().save("step.json", "chrome")` is for ui.perfetto.dev. Waits for the device.
        """
        if self._leaving:
            return None
        self._runtime.target.synchronize()
        native = self._runtime.offloader.take_step_trace()
        return None if native is None else TimingReport(native)

    def report(self) -> Report:
        """The plan, the memory it takes, and what was noticed about the model: a dictionary that prints as a summary.

        The last one if detached.
        """
        if self._leaving:
            return Report(self._last[1])
        native = json.loads(self._runtime.offloader.report())
        notes = [*self._facts["notes"], *self._steps.notes, *native.pop("notes", ())]
        if self._runtime.copied:
            names = ", ".join(self._ownership.tensors[number].name for number in sorted(self._runtime.copied)[:4])
            notes.append(
                f"read in a forward outside their block's turn, each time through a copy of the host's bytes, which is "
                f"slow: {names}; give attach towers= without that block"
            )
        resident = native["engine"]["own_pages"] * native["engine"]["page_bytes"]
        segments = dict(self._steps.segments)
        return Report(native, **{**self._facts, "resident_bytes": resident, "segments": segments, "notes": notes})

    @contextmanager
    def resident(self, module: nn.Module) -> Iterator[nn.Module]:
        """Keeps the weights of `module` on the device, to compute with them outside their turn.

        They take ring memory meanwhile: other units that share it cannot run until the end of the block.
        """
        if self._leaving:
            raise StateError("the model is detached; its weights are plain CPU tensors")
        if not isinstance(module, nn.Module):
            raise ModelError(f"resident takes a module of the attached model, not a {type(module).__name__}")
        within = {id(part) for part in module.modules()}
        tensors = [
            owned.index
            for owned in self._ownership.tensors
            if owned.nbytes and any(id(user.module) in within for user in owned.users)
        ]
        if id(module) not in {id(part) for part in self._model.modules()}:
            raise ModelError(f"this {type(module).__name__} is not part of the attached model")
        runtime = self._runtime
        runtime.check_process("resident")
        runtime.bring()
        hold = runtime.offloader.hold([self._binding.numbers[tensor] for tensor in tensors], runtime.stream())
        thread = get_ident()
        runtime.holders.append(thread)
        for tensor in tensors:
            runtime.held[tensor] = runtime.held.get(tensor, 0) + 1
        try:
            yield module
        finally:
            runtime.holders.remove(thread)
            for tensor in tensors:
                runtime.held[tensor] -= 1
                if not runtime.held[tensor]:
                    del runtime.held[tensor]
            hold.release(runtime.stream())

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "detached" if self._detached else f"attached to {self._facts['device']}"
        return f"<Attachment of {type(self._model).__name__}, {state}>"
