"""Watches one step and writes down which operator read which managed tensor, and in which module call.

A TorchDispatchMode, never a TorchFunctionMode: it sees each operator after PyTorch has chosen it, so that fused paths
stay on and the numbers are those of the unwatched run. Tensors are recognized by address, so reads through views count
and making a view does not. Kernels that are launched without the dispatcher are invisible; what was never seen read is
for the segments to distrust. A write to a managed parameter is refused before it happens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .calls import wrapped_forwards
from .errors import ForwardError
from .ownership import Ownership
from .spans import Span, inner_tensors, is_wrapper, span_of
from .trace import Call, Read, Trace, Visit

OnStray = Callable[[int, int, str], None]
"""Called with tensor, block and operator before a block's tensor is read outside the block's forward."""

# Neither reads the bytes of its argument: the first two make views without saying so in their schema.
_NOT_READS = frozenset(
    "_unsafe_view _reshape_alias empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_empty_strided new_zeros new_ones new_full is_same_size record_stream".split()
)


class _Kind(NamedTuple):
    """What an operator's schema says."""

    is_view: bool
    written: tuple[int, ...]
    written_names: frozenset[str]


class Recorder(TorchDispatchMode):
    """Records one step of a model into a `Trace`.

    Active on the thread that enters it, until it is left. `push` and `pop` tell it which module calls run.
    """

    supports_higher_order_operators = True

    def __init__(
        self, ownership: Ownership, addresses: Sequence[int] | None = None, on_stray: OnStray | None = None
    ) -> None:
        """Prepares to recognize the tensors of `ownership` at `addresses`, one each; None for where they lie now."""
        super().__init__()
        self._ownership = ownership
        self._blocks = {id(block.module): block.index for block in ownership.blocks}
        self._on_stray = on_stray
        self._kinds: dict[Any, _Kind] = {}
        self._trace = Trace()
        self._tick = 0
        self._top: Call | None = None
        self._open: dict[int, list[Visit]] = {}
        self._place(addresses)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: wrapping the handler would import the compiler, for seconds, and under a mode nothing is compiled."""
        return False

    def _place(self, addresses: Sequence[int] | None) -> None:
        """Builds the sorted table of intervals."""
        entries = []
        for tensor in self._ownership.tensors:
            if tensor.nbytes:
                address = tensor.span.address if addresses is None else addresses[tensor.index]
                entries.append((address, address + tensor.nbytes, tensor.index))
        entries.sort()
        self._starts = [entry[0] for entry in entries]
        self._entries = entries

    def trace(self) -> Trace:
        """What has been recorded; incomplete while a module call is open."""
        if self._top is not None:
            self._trace.complete = False
        return self._trace

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Watches, with the forwards of all modules inside blocks wrapped so that they push and pop."""
        with wrapped_forwards(self._ownership, self.push, self.pop), self:
            yield self

    def push(self, module: nn.Module) -> Call:
        """Notes that a module's forward begins."""
        parent = self._top
        call = Call(module, self._next(), parent, parent.visit if parent is not None else None)
        block = self._blocks.get(id(module))
        if block is not None:
            visit = Visit(block, call, nested=call.visit is not None)
            if call.visit is not None:
                call.visit.nested = True
            call.visit = visit
            self._open.setdefault(block, []).append(visit)
            self._trace.visits.append(visit)
        if call.visit is not None:
            call.visit.calls.append(call)
        self._top = call
        return call

    def pop(self, call: Call, failed: bool = False) -> None:
        """Notes that it ends, and with it every call inside it that was left open."""
        if failed:
            self._trace.complete = False
        while self._top is not None:
            ended = self._top
            ended.end = self._next()
            self._top = ended.parent
            block = self._blocks.get(id(ended.module))
            if block is not None:
                self._open[block].pop()
            if ended is call:
                return
            self._trace.complete = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Notes what the operator reads, refuses what it must not write, and runs it."""
        kwargs = kwargs or {}
        # A parameter class with a __torch_function__ of its own must not see the questions asked here.
        with torch._C.DisableTorchFunctionSubclass():
            self._watch(func, args, kwargs)
        return func(*args, **kwargs)

    def _watch(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Looks through all tensor arguments."""
        kind = self._kind(func)
        for position, value in enumerate(args):
            self._watch_value(func, kind, value, position in kind.written)
        for name, value in kwargs.items():
            self._watch_value(func, kind, value, name in kind.written_names)

    def _watch_value(self, func: Any, kind: _Kind, value: Any, is_written: bool) -> None:
        """Looks through one argument: a tensor, a list of them, or anything in a higher-order operator."""
        if isinstance(value, Tensor):
            leaves: Sequence[Any] = (value,)
        elif isinstance(value, (list, tuple, dict)):
            leaves = tree_leaves(value)
        else:
            return
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                for number in self._managed(leaf):
                    self._note(func, kind, number, is_written)

    def _managed(self, tensor: Tensor) -> list[int]:
        """The managed tensors that a tensor's bytes overlap."""
        if is_wrapper(tensor):
            return [number for _, leaf in inner_tensors(tensor) for number in self._managed(leaf)]
        try:
            span = span_of(tensor)
        except (RuntimeError, NotImplementedError):
            return []  # no storage: a functorch, sparse or fake tensor, which no managed one is
        return self._overlapping(span)

    def _overlapping(self, span: Span) -> list[int]:
        """The managed tensors in an interval."""
        position = bisect_right(self._starts, span.address) - 1
        found = []
        if position >= 0 and span.nbytes and self._entries[position][1] > span.address:
            found.append(self._entries[position][2])
        position += 1
        while position < len(self._starts) and self._starts[position] < span.end:
            found.append(self._entries[position][2])
            position += 1
        return found

    def _note(self, func: Any, kind: _Kind, number: int, is_written: bool) -> None:
        """Records one operator on one managed tensor."""
        tensor = self._ownership.tensors[number]
        operator = str(func)
        if is_written:
            if tensor.is_parameter:
                raise ForwardError(
                    f"{operator} writes to {tensor.name} in a forward: the change would be lost when its bytes are "
                    "streamed again. Apply it before attaching"
                )
            return
        if kind.is_view or tensor.block is None:
            return
        visits = self._open.get(tensor.block)
        read = Read(self._next(), number, operator, self._top)
        self._trace.seen.add(number)
        if visits:
            visits[-1].reads.append(read)
            return
        self._trace.stray.append(read)
        if self._on_stray is not None:
            self._on_stray(number, tensor.block, operator)

    def _kind(self, func: Any) -> _Kind:
        """What the operator's schema says of its arguments; a higher-order operator has none and only reads."""
        kind = self._kinds.get(func)
        if kind is None:
            schema = getattr(func, "_schema", None)
            aliased = (
                []
                if schema is None
                else [
                    (position, argument)
                    for position, argument in enumerate(schema.arguments)
                    if argument.alias_info is not None
                ]
            )
            written = [(position, argument) for position, argument in aliased if argument.alias_info.is_write]
            name = schema.name.rpartition("::")[2] if schema is not None else ""
            kind = _Kind(
                (bool(aliased) and not written) or name in _NOT_READS,
                tuple(position for position, _ in written),
                frozenset(argument.name for _, argument in written),
            )
            self._kinds[func] = kind
        return kind

    def _next(self) -> int:
        """The next tick."""
        self._tick += 1
        return self._tick
