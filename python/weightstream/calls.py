"""Wraps the forwards of all modules inside blocks for one recorded step, and takes the wrappers off again.

The instance's `forward` is wrapped in try/finally; nn hooks would miss direct calls and turn fused paths off. Modules
that read their children's weights themselves are leaves: what lies under them is not wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from torch import nn

from .errors import ModelError
from .ownership import Ownership
from .towers import has_forward


class WholeModule(nn.Module):
    """The base of modules of ours that read their children's parameters themselves."""


LEAVES = (
    WholeModule,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
    nn.RNNCellBase,
)
"""Modules that are one anchor with all they contain: they hand their children's weights to one fused operator."""

_MISSING = object()

_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType)
"""What a call returns whose body runs later."""


def anchors_of(ownership: Ownership) -> list[nn.Module]:
    """Every module whose calls can tell segments apart: blocks and what they call, each in one block only. Not strangers."""
    owners: dict[int, set[int]] = {}
    modules: dict[int, nn.Module] = {}
    roots = {id(block.module) for block in ownership.blocks}
    for block in ownership.blocks:
        todo = [block.module]
        while todo:
            module = todo.pop()
            labels = owners.setdefault(id(module), set())
            if block.index in labels or id(module) in ownership.strangers:
                continue
            labels.add(block.index)
            modules[id(module)] = module
            if not isinstance(module, LEAVES):
                todo.extend(child for child in module.children() if id(child) not in roots)
    # A module that several blocks call says nothing of which of them runs.
    return [
        modules[key]
        for key, labels in owners.items()
        if len(labels) == 1 and has_forward(modules[key]) and not runs_later(modules[key].forward)
    ]


def runs_later(forward: Callable) -> bool:
    """Whether a call only makes a generator or coroutine, whose body runs when the call is over."""
    function = inspect.unwrap(forward)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    )


@contextmanager
def wrapped_forwards(
    ownership: Ownership, push: Callable[[nn.Module], Any], pop: Callable[[Any, bool], None]
) -> Iterator[None]:
    """Calls `push(module)` before and `pop(what push gave, failed)` after each forward of a module inside a block."""
    restored: list[tuple[nn.Module, Any]] = []
    blocks = {id(block.module) for block in ownership.blocks}
    try:
        for module in anchors_of(ownership):
            restored.append((module, module.__dict__.get("forward", _MISSING)))
            module.__dict__["forward"] = _wrap(module, module.forward, push, pop, id(module) in blocks)
        yield
    finally:
        for module, forward in reversed(restored):
            if forward is _MISSING:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def _wrap(
    module: nn.Module,
    forward: Callable,
    push: Callable[[nn.Module], Any],
    pop: Callable[[Any, bool], None],
    whole: bool = False,
) -> Callable:
    """The forward between push and pop. `whole` says that it is a block's."""

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = push(module)
        failed = True
        try:
            result = forward(*args, **kwargs)
            if whole and isinstance(result, _LATER):
                raise ModelError(
                    f"a {type(module).__name__} is a block and returns a {type(result).__name__}, whose body runs after "
                    f"the block's turn; give attach towers= without it"
                )
            failed = False
            return result
        finally:
            pop(call, failed)

    return recorded
