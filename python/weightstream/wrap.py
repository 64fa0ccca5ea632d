"""The wrapped forwards: a step around the root's, a turn around each unit's.

They are set on the instance and use no nn hooks, which would miss direct calls of `.forward` and interrupts, and would
turn fused paths off. A turn costs two calls of the engine and about half a microsecond of Python.

The locals `runtime` and `unit` of these functions are read by `Runtime` to find its own frames on a stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch

from .gradients import refuse_grad
from .runtime import ROOT, Runtime
from .tracing import refuse_fakes

__all__ = ["Forward", "Guarded", "Steps", "refuse_grad", "wrap_root", "wrap_unit"]

Forward = Callable[..., Any]

Guarded = list[tuple[dict[str, Any], Forward]]
"""Attributes of modules and the wrapped forwards that a turn takes off them while it runs: see `net`."""


class Steps(Protocol):
    """What happens around a step."""

    def before(self) -> None:
        """Checks that the model is what was bound; raises otherwise."""

    def run(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the root's call, and may watch it."""

    def after(self) -> None:
        """Called when the step ended without an error."""


_grad_enabled = torch.is_grad_enabled


def wrap_unit(runtime: Runtime, unit: int, name: str, inner: Forward, guarded: Guarded | None = None) -> Forward:
    """The forward `inner` as one turn of `unit`, which takes off what is `guarded`: the list may be filled later."""
    guarded = [] if guarded is None else guarded
    enter, leave, stream, turns = runtime.offloader.enter, runtime.offloader.leave, runtime.stream, runtime.open
    retired, root, at_root, thread, is_graded = runtime.retired, ROOT, [ROOT], get_ident, _grad_enabled

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if retired:
            return inner(*args, **kwargs)
        # The first comparison spares nearly every turn the others.
        if turns != at_root or runtime.thread != thread():
            if not turns or turns[0] != root or runtime.thread != thread() or unit in turns:
                if runtime.arrive(unit, name):
                    return inner(*args, **kwargs)
        graded = is_graded()
        if graded:
            refuse_grad(name, "input", args)
            refuse_grad(name, "input", kwargs.values())
        # Noted before it is entered: what an interrupt leaves open is then known. An interrupt is raised as soon as
        # `enter` returns, so entering belongs inside the try.
        turns.append(unit)
        try:
            enter(unit, stream())
            for state, net in guarded:
                if state.get("forward") is net:
                    del state["forward"]
            result = inner(*args, **kwargs)
        except BaseException:
            turns.pop()
            for state, net in guarded:
                state.setdefault("forward", net)
            runtime.abandon(unit)
            raise
        turns.pop()
        for state, net in guarded:
            state.setdefault("forward", net)
        leave(unit, stream())
        if graded:
            refuse_grad(name, "output", (result,))
        return result

    return runtime.wrapper(forward)


def wrap_root(runtime: Runtime, name: str, inner: Forward, steps: Steps) -> Forward:
    """The forward `inner` as one step."""
    begin, end, stream, turns = runtime.offloader.begin_step, runtime.offloader.end_step, runtime.stream, runtime.open
    unit = ROOT

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if runtime.detached:
            return inner(*args, **kwargs)
        if runtime.arrive(unit, name):
            return inner(*args, **kwargs)
        steps.before()
        turns.append(unit)
        try:
            begin(stream())
            result = steps.run(inner, args, kwargs)
        except BaseException as error:
            runtime.recover()
            if isinstance(error, TypeError):
                refuse_fakes(name, (args, kwargs))
            raise
        turns.clear()
        end(stream())
        steps.after()
        return result

    return runtime.wrapper(forward)
