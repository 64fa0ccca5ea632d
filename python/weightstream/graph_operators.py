"""The operators by which one graph of a whole model enters and leaves its units.

    weightstream::enter(turn, order!, weights!)               the weights may be read from here on
    weightstream::leave(turn, order!, weights!, crossing)     and no longer from here on

Neither writes a byte. What they are said to change is what keeps a compiler from moving reads of weights past them:

    weights    what an operator in between reads is what `enter` made, so it stays behind it; `leave` changes it again
    crossing   what the block was given, and what it computed that is used later, is computed before `leave`, which reads it
    order      one tensor a model that each of them changes: turns keep their order also where no activation joins them
    turn       the model's number and the unit's, in a tensor: as constants they would be baked into code that is cached

A compiler that passes copies of the weights, because it moved a read of them or makes no operator in-place, is found by
their addresses, before anything is computed with what the copies hold.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import ForwardError, StateError

if TYPE_CHECKING:
    from .running import Runtime

__all__ = ["GraphTurns", "enter", "leave"]

_numbers = itertools.count(1)
_models: weakref.WeakValueDictionary[int, GraphTurns] = weakref.WeakValueDictionary()
"""Those whose graphs may run, by number."""


class GraphTurns:
    """The turns of one model's units as its graphs take them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._number = next(_numbers)
        self._units: dict[int, tuple[str, list[int]]] = {}
        with torch.inference_mode(False):
            self.order = torch.zeros(1, dtype=torch.int64)
        """What every turn of the model is said to change."""
        _models[self._number] = self

    def turn_of(self, unit: int, name: str, weights: Sequence[Tensor]) -> Tensor:
        """Makes the unit known under its name and weights; gives the tensor that stands for it."""
        self._units[unit] = (name, [weight.data_ptr() for weight in weights])
        with torch.inference_mode(False):
            return torch.tensor([self._number, unit])

    def enter(self, unit: int, weights: Sequence[Tensor]) -> None:
        """Begins a turn of the unit, or a turn within its turn."""
        runtime = self._runtime
        self._check(unit, weights)
        again = unit in runtime.open
        # Noted before it is entered: what fails from here on has a turn to end, which the step does.
        runtime.open.append(unit)
        if not again:
            runtime.offloader.enter(unit, runtime.stream())

    def leave(self, unit: int, weights: Sequence[Tensor]) -> None:
        """Ends the unit's turn."""
        runtime = self._runtime
        self._check(unit, weights)
        if runtime.open[-1] != unit:
            raise ForwardError(
                f"the turn of {self._units[unit][0]} ends before one that began in it: the compiler did not keep the order "
                f"of turns; attach again without compile()"
            )
        runtime.open.pop()
        if unit not in runtime.open:
            runtime.offloader.leave(unit, runtime.stream())

    def _check(self, unit: int, weights: Sequence[Tensor]) -> None:
        runtime, (name, addresses) = self._runtime, self._units[unit]
        if not runtime.open or runtime.thread != get_ident():
            raise StateError(f"{name} was called in a graph of its model outside the model's forward; call the model")
        if [weight.data_ptr() for weight in weights] != addresses:
            raise ForwardError(
                f"the compiler copies weights of {name}, which stream: either the backend does not make operators "
                f"in-place again (inductor, aot_eager and eager do), or it moves a read of them out of their block's turn; "
                f"give compile() another backend, or attach again without compile()"
            )


def _of(turn: Tensor) -> tuple[GraphTurns, int]:
    number, unit = turn.tolist()
    turns = _models.get(number)
    if turns is None:
        raise StateError("a graph was called whose model is attached no longer; call the model")
    return turns, unit


def _enter(turn: Tensor, order: Tensor, weights: list[Tensor]) -> None:
    turns, unit = _of(turn)
    turns.enter(unit, weights)


def _leave(turn: Tensor, order: Tensor, weights: list[Tensor], crossing: list[Tensor]) -> None:
    turns, unit = _of(turn)
    turns.leave(unit, weights)


def define(
    namespace: str,
    enter: str = "(Tensor turn, Tensor(a!) order, Tensor(b!)[] weights) -> ()",
    leave: str = "(Tensor turn, Tensor(a!) order, Tensor(b!)[] weights, Tensor[] crossing) -> ()",
) -> tuple[torch.library.Library, Callable[..., None], Callable[..., None]]:
    """Registers both operators under a namespace; tests do it with schemas that promise less."""
    library = torch.library.Library(namespace, "FRAGMENT")
    operators: list[Callable[..., None]] = []
    for name, schema, kernel in (("enter", enter, _enter), ("leave", leave, _leave)):
        # Never in a CUDA graph: a replay would enter nothing.
        library.define(f"{name}{schema}", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", _nothing, lib=library)
        operators.append(getattr(getattr(torch.ops, namespace), name).default)
        _lower(operators[-1])
    return library, operators[0], operators[1]


def _lower(operator: Any) -> None:
    """Has Inductor compute what reads the weights, and what crosses, before the operator.

    It puts pointwise computations off until somebody needs them, and by itself settles those that read what an operator
    changes only behind the operator: they would read the weights out of turn.

    Inductor keeps code on disk by what a graph calls, not by how that is lowered: who changes this renames the operators.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    fallback = lowering.fallback_handler(operator, add_to_fallback_set=False)

    def lower(turn: Any, order: Any, weights: Sequence[Any], crossing: Sequence[Any] | None = None) -> Any:
        for weight in weights:
            V.graph.mark_buffer_mutated(weight.get_name())
        for value in crossing or ():
            value.realize()
        return fallback(turn, order, weights, *(() if crossing is None else (crossing,)))

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def _nothing(*_: object) -> None:
    """What they compute."""


_library, enter, leave = define("weightstream")
