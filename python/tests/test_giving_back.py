"""Attach and detach are whole or not at all: under errors, interrupts at any line, real signals, and other threads."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attach_models import (
    DIM,
    MlpBlock,
    Towered,
    assert_same_state,
    attached,
    host,
    inputs,
    mlp,
    run,
    same_bits,
    snapshot,
)
from interrupts import interrupted_at
from torch import nn

import weightstream
from weightstream import StateError

FILES = ("attaching.py", "attachment.py", "binding.py", "overrides.py", "runtime.py", "steps.py", "refusals.py")


class Counting(MlpBlock):
    """A block with a buffer that its forward writes, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        return super().forward(x)


def _model() -> Towered:
    torch.manual_seed(0)
    model = Towered([Counting() for _ in range(3)])
    model.blocks[2].up.weight = model.blocks[0].up.weight  # a tie
    model.blocks[1].down.bias.requires_grad_(False)
    return model


class Before:
    """What a model was, and whether it is that again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = {name: (id(p), type(p), p.requires_grad) for name, p in model.named_parameters()}
        self.attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        self.state = snapshot(model)

    def check(self) -> None:
        """Same objects, classes, attributes and bits."""
        now = {name: (id(p), type(p), p.requires_grad) for name, p in self.model.named_parameters()}
        assert now == self.tensors
        assert not any(vars(p) for p in self.model.parameters())
        assert {name: set(vars(module)) for name, module in self.model.named_modules()} == self.attributes
        assert_same_state(self.model, self.state)
        assert self.model.blocks[0].up.weight is self.model.blocks[2].up.weight


def _lines(work: Callable[[], object], functions: tuple[str, ...]) -> int:
    with interrupted_at(-1, FILES, functions) as seen:
        work()
    return seen[0]


def _places(lines: int, samples: int) -> list[int]:
    """Line numbers spread over all of them, the first and last ones densely."""
    ends = {*range(1, 15), *range(lines - 25, lines + 1)}
    return sorted(number for number in ends | {lines * n // samples for n in range(1, samples)} if number > 0)


def test_detach_can_be_interrupted_at_any_line_and_completed() -> None:
    model = _model()
    attachment = weightstream.attach(model, device=host(), budget=int(250e3))
    run(model, inputs())
    lines = _lines(attachment.detach, ("detach",))
    assert lines > 200
    places, hits = _places(lines, 50), 0
    for line in places:
        model = _model()
        twin = _model()
        before = Before(model)
        attachment = weightstream.attach(model, device=host(), budget=int(250e3))
        assert same_bits(run(model, inputs()), run(twin, inputs()))
        try:
            with interrupted_at(line, FILES, ("detach",)):
                attachment.detach()
        except KeyboardInterrupt:
            hits += 1
        if attachment.attached and not attachment._leaving:
            assert same_bits(run(model, inputs()), run(twin, inputs())), line  # nothing was changed yet
        else:
            # Refused while weights are half plain, and right once all of them are.
            with contextlib.suppress(StateError):
                assert same_bits(run(model, inputs()), run(twin, inputs())), line
        assert attachment.detach() is model and not attachment.attached
        before.state = snapshot(twin)
        before.check()
        assert attachment.stats()["steps"] >= 1
        assert same_bits(run(model, inputs()), run(twin, inputs())), line
        with attached(model, 0.7):
            assert same_bits(run(model, inputs()), run(twin, inputs())), line
    # One that lands in a destructor or the last lines does not come out; the count of lines varies a little.
    assert hits > 0.8 * len(places)


def test_attach_interrupted_at_any_line_changes_nothing() -> None:
    model = _model()
    before = Before(model)

    def attach() -> None:
        weightstream.attach(model, device=host(), budget=int(250e3))

    lines = _lines(attach, ("attach",))
    model._weightstream.detach()
    before.check()
    assert lines > 500
    places, hits = _places(lines, 70), 0
    for line in places:
        try:
            with interrupted_at(line, FILES, ("attach",)):
                attach()
            model._weightstream.detach()
        except KeyboardInterrupt:
            hits += 1
        before.check()
    assert hits > 0.8 * len(places)
    twin = _model()
    with attached(model, 0.7):
        assert same_bits(run(model, inputs()), run(twin, inputs()))


@pytest.mark.parametrize(
    "place",
    [
        "attaching.keep_package_uncompiled", "attaching.ModelSteps", "attaching.wrap_root", "attaching.refuse_changes",
        "attaching.StorageWatch.survivors", "binding.Binding.shared_in_place", "attaching._facts", "attaching.Attachment",
        "binding.Binding._note_slots", "overrides.Overrides.set",
    ],
)  # fmt: skip
@pytest.mark.parametrize("error", [ValueError("injected"), KeyboardInterrupt(), MemoryError()])
def test_an_error_at_any_stage_of_attach_changes_nothing(
    place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    before = Before(model)

    def fail(*_: object, **__: object) -> None:
        raise error

    module, *names = place.split(".")
    holder: Any = importlib.import_module(f"weightstream.{module}")
    for name in names[:-1]:
        holder = getattr(holder, name)
    monkeypatch.setattr(holder, names[-1], fail)
    with pytest.raises(type(error)) as raised:
        weightstream.attach(model, device=host(), budget=int(250e3))
    assert raised.value is error
    monkeypatch.undo()
    before.check()
    with attached(model, 0.7):
        assert same_bits(run(model, inputs()), run(_model(), inputs()))


def test_interrupts_while_a_failed_attach_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    before = Before(model)
    binding = importlib.import_module("weightstream.binding").Binding
    unbind, left = binding.unbind, [5]

    def interrupted(self: object) -> None:
        left[0] -= 1
        if left[0] > 0:
            raise KeyboardInterrupt
        unbind(self)

    def fail(*_: object) -> None:
        raise ValueError("injected")

    monkeypatch.setattr(binding, "unbind", interrupted)
    monkeypatch.setattr(importlib.import_module("weightstream.attaching"), "refuse_changes", fail)
    with pytest.raises(ValueError, match="injected"):
        weightstream.attach(model, device=host(), budget=int(250e3))
    before.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_real_interrupts_of_attach_and_detach() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = _model()
    before = Before(model)
    old = signal.signal(signal.SIGALRM, interrupt)
    hits = 0
    try:
        for number in range(120):
            attachment = None
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + number * 1e-4)
                attachment = weightstream.attach(model, device=host(), budget=int(250e3))
                attachment.detach()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
                if attachment is None:  # the interrupt may come behind the last line of attach
                    attachment = model.__dict__.get("_weightstream")
                if attachment is not None:
                    attachment.detach()
            before.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert hits > 10


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_detach_from_another_thread_in_a_forward_is_refused(steps: int, whole: bool) -> None:
    inside, go = threading.Event(), threading.Event()

    class Waiting(MlpBlock):
        wait = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.wait:
                inside.set()
                assert go.wait(30)
            return super().forward(x)

    torch.manual_seed(0)
    model = Towered([Waiting() for _ in range(5)])
    call = (model, inputs()) if whole else (model.blocks[2], torch.ones(2, DIM))
    expected, alone = run(model, inputs()), run(*call)
    got: list[torch.Tensor] = []
    with attached(model) as attachment:
        for _ in range(steps):
            run(model, inputs())
        model.blocks[2].wait = True
        thread = threading.Thread(target=lambda: got.append(run(*call)))
        thread.start()
        assert inside.wait(30)
        with pytest.raises(StateError, match="another thread"):
            attachment.detach()
        assert attachment.attached
        go.set()
        thread.join()
        model.blocks[2].wait = False
        assert same_bits(got[0], alone)
        assert same_bits(run(model, inputs()), expected)
    assert same_bits(run(model, inputs()), expected)


def test_detach_while_another_thread_keeps_weights_resident() -> None:
    inside, go = threading.Event(), threading.Event()
    model = mlp()
    with attached(model) as attachment:

        def hold() -> None:
            with attachment.resident(model.blocks[1]):
                inside.set()
                assert go.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(30)
        with pytest.raises(StateError, match="another thread"):
            attachment.detach()
        go.set()
        thread.join()


def test_a_stack_that_lost_its_end_while_it_was_looked_at_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()

    class Waiting(MlpBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go.wait(30)
            return super().forward(x)

    model = Towered([Waiting() for _ in range(5)])
    suspended = (number for number in range(3))
    next(suspended)
    true_frames, looks = sys._current_frames, [0]
    with attached(model) as attachment:
        thread = threading.Thread(target=run, args=(model, inputs()))
        thread.start()
        assert inside.wait(30)

        def frames() -> dict:
            found = true_frames()
            looks[0] += 1
            if looks[0] <= 4:  # a generator that ran on top of the forward has been suspended since
                found[thread.ident] = suspended.gi_frame
            return found

        monkeypatch.setattr(sys, "_current_frames", frames)
        with pytest.raises(StateError, match="another thread runs the model"):
            attachment.detach()
        monkeypatch.undo()
        assert looks[0] > 4
        go.set()
        thread.join()


def test_detach_against_a_thread_that_keeps_calling() -> None:
    model = mlp(8)
    expected = run(model, inputs())
    wrong: list[object] = []
    for _ in range(10):
        attachment = weightstream.attach(model, device=host(), budget=int(400e3))
        stop = threading.Event()

        def call(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                try:
                    if not same_bits(run(model, inputs()), expected):
                        wrong.append("bits")
                except StateError:
                    pass
                except BaseException as error:  # noqa: BLE001
                    wrong.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while attachment.attached:
            with contextlib.suppress(StateError):
                attachment.detach()
        stop.set()
        thread.join()
        assert not wrong
        assert same_bits(run(model, inputs()), expected)


@pytest.mark.parametrize("share", [0.6, 2.0])
def test_shared_memory_is_ordinary_memory_afterwards(share: float) -> None:
    model, twin = mlp(), mlp()
    model.blocks.share_memory()
    before = snapshot(model)
    with attached(model, share) as attachment:
        (note,) = (note for note in attachment.report()["notes"] if "shared memory" in note)
        assert "blocks.0" in note and "head" not in note
        assert same_bits(run(model, inputs()), run(twin, inputs()))
    assert_same_state(model, before)
    assert not any(parameter.is_shared() for parameter in model.parameters())
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert same_bits(run(model, inputs()), run(twin, inputs()))
