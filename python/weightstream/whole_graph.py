"""An attached model as one graph: what `Attachment.compile` puts in the place of its forwards.

    step begins (plain Python)  ─►  the root's forward, one graph: enter · block · leave · enter · block · leave …  ─►  step ends

The step's beginning and end stay outside: they check, may wait, and clean up after errors. Inside, a unit's turn is a
pair of operators (`graph_operators`) that the compiler traces. Who has compiled the root by `torch.compile` himself has the graph cut at
the step, so it is asked for here instead, in place, as `nn.Module.compile` does it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import FunctionType
from typing import Any, Union

import torch
from torch import Tensor

from . import graph_operators
from .compiled import refuse_freezing
from .errors import ModelError, NotAvailableError, StateError
from .gradients import refuse_grad
from .graph_crossing import crossing_backend
from .graph_operators import GraphTurns
from .guard import graph_threads
from .ownership import Block, Ownership
from .running import Runtime
from .uncompiled import keep_package_uncompiled, uncompiled
from .wrap import Forward

__all__ = ["VERSION", "WholeGraph", "check_whole"]

VERSION = "2.11"
"""The one version whose compiler is known to keep the order of turns: that which the tests run on."""

Backend = Union[str, Callable[..., Any]]


def check_whole(name: str, ownership: Ownership, roots: bool, options: Mapping[str, Any] | None) -> None:
    """Refuses models and settings with which one graph would not compute right. `roots` is whether the model has a step."""
    if torch.__version__.split("+")[0].split(".")[:2] != VERSION.split("."):
        raise NotAvailableError(
            f"compile() makes one graph of a model with PyTorch {VERSION} only, the version it is tested with; this is "
            f"{torch.__version__}: torch.compile(model) compiles its blocks one by one"
        )
    if not (options is None or isinstance(options, Mapping)):
        raise StateError(f"compile() was given what torch.compile does not take: options={options!r} is no dictionary")
    if options is not None and options.get("freezing"):
        raise StateError(
            f"{name} cannot be compiled with the option freezing, which makes constants of weights that stream; leave it out"
        )
    refuse_freezing(name)
    if not roots:
        raise ModelError(
            f"{name} is itself a block that streams: attach the model it is a block of to compile that as one graph"
        )
    if ownership.strangers:
        raise NotAvailableError(
            f"{name} has modules that are managed with another model, whose turns cannot be in its graph: torch.compile(model) "
            f"compiles its blocks one by one"
        )
    for block in ownership.blocks:
        for index in block.tensors:
            for user in ownership.tensors[index].users:
                if user.inner or user.held:
                    raise NotAvailableError(
                        f"{user.path} is part of a tensor subclass or of a quantization's state, which one graph does not "
                        f"stream: torch.compile(model) compiles the blocks one by one"
                    )


class WholeGraph:
    """The compiled forwards of one model and the traced turns in them."""

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        backend: Backend,
        mode: str | None,
        dynamic: bool | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        """The settings are those of `torch.compile`; StateError for those that it refuses."""
        keep_package_uncompiled(__name__)
        self._name = name
        self._compiler, self._settings = _resolved(backend, mode, dynamic, dict(options or {}))
        self._turns = GraphTurns(runtime)
        self._running: list[bool] = []
        """Not empty while the model's graph is traced or runs: a block that somebody compiled alone is not part of it."""
        self._opened: list[int] = []
        """Units whose turn is open where the compiler is tracing; empty otherwise."""
        self._weights: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._graphs: dict[Forward, Forward] = {}

    def begin(self, units: Sequence[Block], ownership: Ownership) -> None:
        """The blocks are the units, by number; what was compiled before is forgotten."""
        self._graphs.clear()
        self._opened.clear()
        for unit, block in enumerate(units):
            users = [user for index in block.tensors for user in ownership.tensors[index].users]
            weights = list({id(user.tensor): user.tensor for user in users if user.tensor.numel()}.values())
            self._weights[unit] = (self._turns.turn_of(unit, block.name, weights), weights)

    def wrap(self, retired: list[bool], unit: int, inner: Forward, uncompiled: Forward) -> Forward:
        """The forward `inner` as a turn of `unit`, or within one that is open. The compiler traces into it, and calls that are
        not compiled, of a block or a method alone, go to `uncompiled`."""
        (turn, weights), order, opened, running = self._weights[unit], self._turns.order, self._opened, self._running
        enter, leave = graph_operators.enter, graph_operators.leave

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not running or not torch.compiler.is_compiling():
                return uncompiled(*args, **kwargs)
            if retired or unit in opened:
                return inner(*args, **kwargs)
            opened.append(unit)
            try:
                enter(turn, order, weights)
                try:
                    return inner(*args, **kwargs)
                finally:  # also where the caller catches what was raised
                    leave(turn, order, weights, [])  # what crosses is found in the graph
            finally:
                opened.pop()

        return forward

    def graph_of(self, inner: Forward) -> Forward:
        """The forward `inner` of the root as one graph."""
        graph = self._graphs.get(inner)
        if graph is None:
            graph = self._graphs[inner] = self._compile(inner)
        return graph

    def _compile(self, inner: Forward) -> Forward:
        name = self._name

        def traced(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        # The compiler counts how often it compiled a code object: another one for each model.
        own = FunctionType(traced.__code__.replace(), traced.__globals__, name, None, traced.__closure__)
        backend = crossing_backend(self._compiler, graph_operators.enter, graph_operators.leave)
        compiled = torch.compile(own, fullgraph=True, backend=backend, **self._settings)

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._opened.clear()  # a trace that failed may have left some
            if torch.is_grad_enabled():
                refuse_grad(name, "input", (args, kwargs))
            thread = get_ident()
            try:
                self._running.append(True)
                graph_threads.add(thread)
                return compiled(*args, **kwargs)
            finally:
                graph_threads.discard(thread)
                self._running.clear()

        # Who compiles what calls the model would have it in his graph, without what this one's backend adds.
        return uncompiled(forward)


def _resolved(
    backend: Backend, mode: str | None, dynamic: bool | None, options: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What compiles graphs by these settings, and what of them is left for `torch.compile`."""
    settings: dict[str, Any] = {"dynamic": dynamic}
    if "guard_filter_fn" in options:
        settings["options"] = {"guard_filter_fn": options.pop("guard_filter_fn")}
    try:
        if not (isinstance(backend, str) or callable(backend)):
            raise TypeError(f"backend={backend!r} is neither a name nor a function")
        if dynamic not in (None, True, False):
            raise TypeError(f"dynamic={dynamic!r} is none of None, True and False")
        if mode is not None and options:
            raise TypeError("it takes mode= or options=, not both")
        if backend == "inductor":
            compiler = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        else:
            backend = _in_place if backend == "aot_eager" else backend
            compiler = torch._TorchCompileWrapper(backend, mode, options, dynamic)
    except Exception as error:
        raise StateError(f"compile() was given what torch.compile does not take: {error}") from error
    return compiler, settings


def _in_place(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend aot_eager, with the operators in-place: it runs them on copies of all weights otherwise."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.virtualized import V

    def compile_graph(traced: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        # Writes to parts of a tensor are rewritten, which looks at shapes.
        with V.set_fake_mode(detect_fake_mode(given)):
            reinplace_inplaceable_ops(FakeTensorUpdater(traced.graph), traced.graph)
            decompose_auto_functionalized(traced.graph)
        traced.recompile()
        return make_boxed_func(traced.forward)

    return aot_autograd(fw_compiler=compile_graph, keep_inference_input_mutations=True)(graph, inputs)


_in_place.__name__ = "aot_eager"  # in the compiler's errors
