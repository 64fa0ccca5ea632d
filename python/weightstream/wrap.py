"""The wrapped forwards: a step around the root's, a turn around each unit's.

They are set on the instance and use no nn hooks, which would miss direct calls of `.forward` and interrupts, and would
turn fused paths off. A turn is one call of `Turns.take`, which makes two calls of the engine.

The locals `runtime` and `unit` of these functions are read by `Runtime` to find its own frames on a stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from .running import ROOT, Runtime
from .tracing import refuse_fakes

__all__ = ["Forward", "Guarded", "Steps", "wrap_root", "wrap_unit"]

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


def wrap_unit(runtime: Runtime, unit: int, name: str, inner: Forward, guarded: Guarded | None = None) -> Forward:
    """The forward `inner` as one turn of `unit`, which takes off what is `guarded`: the list may be filled later."""
    guarded = [] if guarded is None else guarded
    take, retired = runtime.turns.take, runtime.retired

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if retired:
            return inner(*args, **kwargs)
        return take(runtime, unit, name, inner, guarded, args, kwargs)

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
        if runtime.adapt is not None:
            args, kwargs = runtime.adapt((args, kwargs))
        preloading = runtime.preloading
        if preloading is not None:
            preloading.before(name, args, kwargs)
        steps.before()
        turns.append(unit)
        try:
            begin(stream())
            if preloading is not None:
                result = preloading.run(steps.run, inner, args, kwargs)
            else:
                result = steps.run(inner, args, kwargs)
        except BaseException as error:
            runtime.failed_steps += 1
            runtime.recover()
            if preloading is not None:
                preloading.failed(error)
            if isinstance(error, TypeError):
                refuse_fakes(name, (args, kwargs))
            raise
        turns.clear()
        end(stream())
        if preloading is not None:
            preloading.after()
        steps.after()
        return result

    return runtime.wrapper(forward)
