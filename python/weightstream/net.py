"""The net below the turns: a module inside a block that is called while its block's turn is not open gets a turn.

    model.layers[2].mlp.up(x)         called alone, from a method of the model, or later in a forward than recorded

Every module inside a block that owns streamed weights has a wrapped forward for that. While its unit's turn is open the
wrapper is not there: the turn takes it off when it begins and puts it back when it ends, which costs less than a tenth
of a microsecond a module, breaks no compiled graph, and leaves the module's calls as they are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from .calls import LEAVES
from .overrides import Overrides
from .ownership import Ownership
from .running import Runtime
from .towers import has_forward
from .uncompiled import uncompiled
from .wrap import Forward, Guarded, wrap_unit

__all__ = ["Net", "streaming_units"]


class Net:
    """The wrapped forwards of a model's modules that own streamed weights."""

    def __init__(self, model: nn.Module, ownership: Ownership, resident: Collection[int]) -> None:
        """Finds them; tensors in `resident` are always there."""
        self._owners: list[tuple[str, nn.Module, tuple[int, ...]]] = []
        """Name, module and the streamed tensors it needs, for each."""
        own: dict[int, list[int]] = {}
        for tensor in ownership.tensors:
            if tensor.block is not None and tensor.index not in resident:
                for user in tensor.users:
                    own.setdefault(id(user.module), []).append(tensor.index)
        blocks = {id(block.module) for block in ownership.blocks}
        for name, module in model.named_modules():
            if id(module) not in blocks and has_forward(module):
                # A leaf hands its children's weights to one operator, past their forwards.
                parts = module.modules() if isinstance(module, LEAVES) else (module,)
                needs = tuple(dict.fromkeys(index for part in parts for index in own.get(id(part), ())))
                if needs and _in_one_block(needs, ownership):
                    self._owners.append((name, module, needs))

    def spread(
        self,
        runtime: Runtime,
        overrides: Overrides,
        guarded: dict[int, Guarded],
        taken: Collection[int],
    ) -> None:
        """Wraps the owners of what lies in units that stream, but for modules whose id is in `taken`.

        Turns of the units in `guarded` take the wrappers off while they run: the lists there are filled.
        """
        streaming = streaming_units(runtime)
        for name, module, needs in self._owners:
            units = {runtime.unit_of.get(index) for index in needs}.intersection(streaming)
            if id(module) in taken or not units:
                continue
            own, inner = "forward" in module.__dict__, module.forward
            for unit in units:
                off = guarded.get(unit, [])
                inner = _wrap_owner(runtime, unit, name, inner, off)
            overrides.set(module, "forward", inner)
            # What has a forward of its own on the instance cannot be found again behind a missing one.
            if len(units) == 1 and not own and next(iter(units)) in guarded:
                guarded[next(iter(units))].append((module.__dict__, inner))

    def trace(self, runtime: Runtime, overrides: Overrides, wrap: Callable[[int, Forward, Forward], Forward]) -> None:
        """Wraps all of them with turns that the compiler traces, whatever streams."""
        for name, module, needs in self._owners:
            inner = module.forward
            for unit in {runtime.unit_of[index] for index in needs}:
                inner = wrap(unit, inner, _wrap_owner(runtime, unit, name, inner, []))
            overrides.set(module, "forward", inner)


def streaming_units(runtime: Runtime) -> set[int]:
    """The units of which not everything is always there."""
    engine = json.loads(runtime.offloader.report())["engine"]
    # What is reported is the plan before one that is pending, and what is preloaded may go in the middle of a step.
    if engine["replan_pending"] or runtime.preloading is not None:
        return {unit for unit in runtime.unit_of.values() if unit >= 0}
    return {number for number, unit in enumerate(engine["units"]) if unit["streamed_bytes"]}


def _in_one_block(needs: tuple[int, ...], ownership: Ownership) -> bool:
    return len({ownership.tensors[index].block for index in needs}) == 1


def _wrap_owner(runtime: Runtime, unit: int, name: str, inner: Forward, guarded: Guarded) -> Forward:
    """The forward `inner`, with a turn of its own unless one is open."""
    alone, turns = wrap_unit(runtime, unit, name, inner, guarded), runtime.open

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if unit in turns:
            return inner(*args, **kwargs)
        return alone(*args, **kwargs)

    # Not made known to the runtime: this frame on a stack does not say that a turn is open.
    return uncompiled(forward)
