"""What happens around each step: is the model still what was bound, and how may its blocks be cut?

The first step runs whole blocks while a recorder watches which operator reads what. From that the blocks are cut into
segments, between steps. When the module tree, a forward or the active adapters change, the evidence is dropped: whole
blocks again, and the next step is watched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ._native import Hold
from .anchors import SegmentedBlock
from .binding import Binding
from .calls import runs_later
from .compiled import COMPILES, check_compiled, compiling, holds_compiled, refuse_freezing, uncompiled_step
from .division import Division
from .errors import DeviceError, ForwardError, ModelError, StateError, WeightstreamError
from .evidence import Evidence
from .net import Net, streaming_units
from .overrides import Overrides
from .ownership import Block, Ownership
from .pacing import Pacing
from .recorder import Recorder
from .running import ROOT, Runtime
from .segments import Segment, coarsen, plan_segments, small_tensors
from .trace import Trace
from .wrap import Forward, Guarded, wrap_unit

if TYPE_CHECKING:
    from .whole_graph import WholeGraph

__all__ = ["ModelSteps", "streaming_blocks"]

_LEAST_SEGMENT = 4 << 20
"""Bytes below which a copy is far from the link's rate (47 of 55 GB/s at 4 MiB, 31 at 1 MiB)."""
_LEAST_SHARE = 8
"""A segment need not be larger than its block's bytes divided by this: small models have small blocks."""

_WORTH_MORE_TURNS = 1.004
"""The finest cuts are taken if the planner predicts a step this much faster than with coarse ones, which take fewer turns
of Python. Measured on 24 blocks of 700 MB: 4 turns a block 1.038 and 1.045 of ideal, the finest cuts 1.026 and 1.038."""


def streaming_blocks(ownership: Ownership) -> list[Block]:
    """The blocks that own bytes, which are the native plan's blocks, in its order."""
    return [block for block in ownership.blocks if any(ownership.tensors[i].nbytes for i in block.tensors)]


class ModelSteps:
    """The wrapped forwards of a model's units, and the watching that cuts them."""

    everywhere = False
    """Whether blocks are cut wherever they can be, and not only where the planner finds that it pays. For tests."""

    def __init__(
        self, model: nn.Module, ownership: Ownership, binding: Binding, runtime: Runtime, turns: Overrides
    ) -> None:
        """Wraps every block as one unit. What is wrapped goes through `turns`, also if this is interrupted."""
        self.notes: list[str] = []
        """What was decided that a user may want to know, for the report."""
        self.segments: dict[str, int] = {}
        """Into how many segments each block is cut; empty while blocks are whole."""
        self._model = model
        self._ownership = ownership
        self._binding = binding
        self._runtime = runtime
        self._blocks = streaming_blocks(ownership)
        self._inner: dict[int, Forward] = {}
        self._overrides = turns
        self._net = Net(model, ownership, small_tensors(ownership))
        self._evidence: Evidence | None = None
        self._recorder: Recorder | None = None
        self._pacing: Pacing | None = None
        """What is still to be measured of the way the blocks are cut."""
        self._borrowed: list[Hold] = []
        check_compiled(model)
        self._compiled = holds_compiled(model) is not None
        """Whether anything of the model has been seen to be compiled: its blocks then stay whole, a graph each."""
        self._ways: list[tuple[Division, float]] = []
        """The ways to cut the blocks that were weighed, each with how much dearer its turns are."""
        self._cuts: tuple[dict[int, tuple[Segment, ...]], dict[int, int]] | None = None
        """What `_wrap_segments` was given last, if blocks are not whole."""
        self._streams: set[int] = set()
        """The units that streamed when they were wrapped."""
        self._settled = False
        """Whether the wrapped forwards are those of the engine's units: not while either changes, or was cut short."""
        self._whole: WholeGraph | None = None
        """What makes the model one graph, if that was asked for."""
        self.beneath_root: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """What is called in the place of the root's forward, with it and its arguments."""
        self._wrap_whole()

    def restore(self) -> None:
        """Takes the wrapped forwards off. Those that somebody has wrapped in turn stay there and do nothing."""
        self._runtime.retire_wrappers()
        self._overrides.restore()

    @contextmanager
    def rearranged(self, change: str = "a change of adapters") -> Iterator[None]:
        """Takes the wrapped forwards off, so that those beneath can be changed, and puts them on again as whole blocks: the next
        step is watched. StateError, with nothing changed, while the model runs or something of it is held."""
        runtime = self._runtime
        runtime.check_process(change)
        if runtime.closing:
            raise StateError(f"{change} was made while the model is being detached")
        runtime.closing = True
        try:
            runtime.check_idle(change)
            runtime.offloader.segment({}, None, False)
            self._settled = False
            self._evidence = self._pacing = None
            runtime.doors.set(False)
            self.restore()
            try:
                yield
            finally:
                runtime.doors.set(False)  # a budget that was changed meanwhile may have closed them
                self._wrap_whole()
                runtime.shut_doors()
        finally:
            runtime.closing = False

    def compile(self, whole: WholeGraph | None) -> None:
        """Makes the root one graph, once a step was watched with whole blocks; None undoes it."""
        with self.rearranged("compile()"):
            self._whole, self._compiled = whole, whole is not None or holds_compiled(self._model) is not None

    def before(self) -> None:
        """Raises StateError if a managed tensor was replaced; drops evidence that no longer holds."""
        moved = self._binding.moved()
        if moved is not None and not _in_functional_call():
            raise StateError(
                f"{moved} is not where attach put it: something replaced or moved it; detach() before changing weights"
            )
        within = compiling()
        if self._compiled:
            refuse_freezing(type(self._model).__name__)
        if self._evidence is not None:
            believed = self._evidence.holds() and (self._compiled or not within)
        else:
            believed = not self._overrides.changed()
        if not (believed and self._settled):
            self._settled = False
            self._runtime.offloader.segment({}, None, False)
            self._evidence = None
            self._pacing = None
            self.restore()
            self._wrap_whole()
        elif self._pacing is not None and not self._runtime.held and self._pacing.is_known():
            self._plan_again(self._pacing)

    def adapt(self) -> None:
        """The budget has changed: other units may stream, and other cuts may pay, which the next steps see to."""
        if not self._settled or (self._whole is not None and self._evidence is not None):
            return  # the next step starts over, or the graph has all turns whatever streams
        if streaming_units(self._runtime) != self._streams:
            self._settled = False
            # What is wrapped goes beneath the doors of a model that is away, never around them.
            self._runtime.doors.set(False)
            if self._cuts is not None:
                self._wrap_segments(*self._cuts)
            else:
                self.restore()
                self._wrap_whole()
            self._runtime.shut_doors()
        if self._evidence is not None and self._ways and not self.everywhere:
            self._pacing = Pacing(self._runtime.offloader, self._ways)

    def run(self, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the root's call, watched if there is no evidence yet."""
        if self._whole is not None and self._evidence is not None:
            inner = self._whole.graph_of(inner)
        if self.beneath_root is not None:
            inner, args, kwargs = self.beneath_root, (inner, args, kwargs), {}
        if self._evidence is not None:
            if COMPILES or not compiling():
                return inner(*args, **kwargs)
            with uncompiled_step():
                return inner(*args, **kwargs)
        self._recorder = None
        self._compiled = self._compiled or compiling() or holds_compiled(self._model) is not None
        recorder = _Lending(self)
        with uncompiled_step(), recorder.recording():
            result = inner(*args, **kwargs)
        self._recorder = recorder
        return result

    def after(self) -> None:
        """Cuts the blocks by what a watched step did."""
        if self._recorder is None:
            if self._pacing is not None:
                self._pacing.after()
            return
        trace, self._recorder = self._recorder.trace(), None
        # While something is held, units cannot change: the next step is watched again.
        if trace.complete and not self._runtime.held:
            self._cut(trace)

    def _cut(self, trace: Trace) -> None:
        """Puts segments in the place of whole blocks where the trace allows it."""
        tensors = self._ownership.tensors
        resident = small_tensors(self._ownership) | {tensor.index for tensor in tensors if not tensor.nbytes}
        largest = max((sum(tensors[i].nbytes for i in block.tensors) for block in self._blocks), default=0)
        least = min(_LEAST_SEGMENT, largest // _LEAST_SHARE)
        # Coarse cuts come first: they take fewer turns. The finest make the ring smaller, should two units not fit.
        coarse, fine = (
            coarsen(plan_segments(self._ownership, [trace], resident, coarse=coarse), self._ownership, least)
            for coarse in (True, False)
        )
        if fine.stray:
            # Only a watched operator can be served what it reads out of turn.
            names = ", ".join(tensors[i].name for i in fine.stray[:4])
            if self._whole is not None:
                raise ForwardError(
                    f"the model cannot be one graph, since weights are read outside their block's forward: {names}; give "
                    f"attach towers= without that block, or leave compile() out"
                )
            self._note(
                f"every step is watched, which is slow, since weights are read outside their block's forward: {names}; "
                f"give attach towers= without that block"
            )
            return
        if self._whole is not None:
            self._wrap_traced(self._whole)
            self._evidence = self._take_evidence()
            return
        if self._compiled:
            self._note("blocks stay whole, since the model is compiled: a cut inside a block would cut its graph")
            self._evidence = self._take_evidence()
            return
        numbers = self._binding.numbers
        ways = [
            (Division.of(coarse, self._blocks, numbers), 1.0),
            (Division.of(fine, self._blocks, numbers), _WORTH_MORE_TURNS),
        ]
        self._ways = ways
        self._use(min(ways, key=lambda way: self._cost(way[0]) * way[1])[0])
        if not self.everywhere:
            self._pacing = Pacing(self._runtime.offloader, ways)

    def _take_evidence(self) -> Evidence:
        """Of all forwards but the root's and those that others wrap."""
        strangers = self._ownership.strangers
        others = (module for module in self._model.modules() if id(module) in strangers)
        return Evidence(self._model, ignoring_forward_of=[self._model, *others])

    def _use(self, division: Division) -> None:
        """Puts the segments of a division in the place of the units there are; between steps."""
        self._settled = False
        try:
            units = self._runtime.offloader.segment(division.cuts, division.order, self.everywhere)
        except WeightstreamError as error:
            self._note(f"blocks stay as they are: {error}")
            # A driver that failed may have left the new units to be put in place by the next step.
            self._settled = not isinstance(error, DeviceError)
        else:
            self._wrap_segments(*division.joined(units))
        self._evidence = self._take_evidence()

    def _plan_again(self, pacing: Pacing) -> None:
        """Cuts the blocks anew, by what a step was measured to compute, if that pays."""
        self._pacing = None
        better = pacing.better()
        if better is not None:
            division, now, then = better
            self._use(division)
            self._note(
                f"planned again by what a step computes: {now * 1e3:.1f} ms a step predicted before, {then * 1e3:.1f} after"
            )

    def _cost(self, division: Division) -> float:
        """The predicted time of a step with these cuts."""
        try:
            return self._runtime.offloader.predict(division.cuts, division.order)
        except WeightstreamError:
            return math.inf

    def _wrap_whole(self) -> None:
        """Makes each block one unit, numbered as the blocks are."""
        self._cuts = None
        self.segments = {}
        self._inner = {block.index: block.module.forward for block in self._blocks}
        for block in self._blocks:
            if runs_later(self._inner[block.index]):
                raise ModelError(
                    f"{block.name}, a {type(block.module).__name__}, has a generator or coroutine as forward, whose body "
                    f"runs after its call; give attach towers= without it"
                )
        guarded: dict[int, Guarded] = {unit: [] for unit in range(len(self._blocks))}
        for unit, block in enumerate(self._blocks):
            self._runtime.unit_of.update(dict.fromkeys(block.tensors, unit))
            forward = wrap_unit(self._runtime, unit, block.name, self._inner[block.index], guarded[unit])
            self._overrides.set(block.module, "forward", forward)
        self._spread(guarded, ())

    def _wrap_segments(self, segments: dict[int, tuple[Segment, ...]], first: dict[int, int]) -> None:
        """Makes each block's segments its units, numbered block by block."""
        self._cuts = (segments, first)
        self.restore()
        names = {id(module): name for name, module in self._model.named_modules()}
        guarded: dict[int, Guarded] = {}
        """Of units whose turns are plain calls; the others leave the net on."""
        anchors: set[int] = set()
        for block in self._blocks:
            parts, unit, inner = segments[block.index], first[block.index], self._inner[block.index]
            self.segments[block.name] = max(1, len(parts))
            if len(parts) <= 1:
                self._runtime.unit_of.update(dict.fromkeys(block.tensors, unit))
                forward = wrap_unit(self._runtime, unit, block.name, inner, guarded.setdefault(unit, []))
                self._overrides.set(block.module, "forward", forward)
                continue
            # What no segment has is small and resident, but to say "absent" of it is safe and to say "present" is not.
            self._runtime.unit_of.update(dict.fromkeys(block.tensors, _NEVER))
            turn = SegmentedBlock(self._runtime, ROOT - 1 - block.index, parts)
            self._overrides.set(block.module, "forward", turn.wrap_block(block.name, inner))
            for number, segment in enumerate(parts):
                self._runtime.unit_of.update(dict.fromkeys(segment.tensors, unit + number))
                off = guarded.setdefault(unit + number, []) if turn.is_simple else None
                for anchor in segment.anchors:
                    calls = segment.last_calls if anchor is segment.last_anchor else None
                    name = names.get(id(anchor), block.name)
                    forward = turn.wrap_anchor(unit + number, calls, name, anchor.forward, off)
                    self._overrides.set(anchor, "forward", forward)
                    anchors.add(id(anchor))
        self._spread(guarded, anchors)

    def _wrap_traced(self, whole: WholeGraph) -> None:
        """Makes each block a turn that the compiler traces."""
        self._settled = False
        self.restore()
        whole.begin(self._blocks, self._ownership)
        wrap = partial(whole.wrap, self._runtime.retired)
        for unit, block in enumerate(self._blocks):
            inner = self._inner[block.index]
            uncompiled = wrap_unit(self._runtime, unit, block.name, inner)
            self._overrides.set(block.module, "forward", wrap(unit, inner, uncompiled))
        self._net.trace(self._runtime, self._overrides, wrap)
        self._settled = True

    def _spread(self, guarded: dict[int, Guarded], anchors: Collection[int]) -> None:
        """Puts the net below the turns, which are complete with it."""
        self._net.spread(self._runtime, self._overrides, guarded, anchors)
        self._streams = streaming_units(self._runtime)
        self._settled = True

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lend(self, tensor: int, block: int, operator: str) -> None:
        """Makes a tensor present that an operator is about to read outside its block's forward."""
        runtime = self._runtime
        self._borrowed.append(runtime.offloader.hold([self._binding.numbers[tensor]], runtime.stream()))

    def take_back(self) -> None:
        """Ends what was lent, once the operator that read it was submitted."""
        while self._borrowed:
            self._borrowed.pop().release(self._runtime.stream())


class _Lending(Recorder):
    """A recorder that serves reads out of turn: each for as long as its operator takes."""

    def __init__(self, steps: ModelSteps) -> None:
        super().__init__(steps._ownership, steps._binding.addresses(), steps.lend)
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            if self._steps._borrowed:
                self._steps.take_back()


_NEVER = -(1 << 62)
"""A unit that is never open."""


def _in_functional_call() -> bool:
    """Whether `torch.func.functional_call` runs the model with weights of its own."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_functional_call" and frame.f_code.co_filename.endswith("stateless.py"):
            return True
        frame = frame.f_back
    return False
