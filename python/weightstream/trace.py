"""What one recorded step did: visits of blocks, the module calls in them, and the reads of managed tensors.

Plain data between the recorder, which writes it, and the segments, which are cut from it. Ticks count module entries,
module exits and reads; they order events and have no unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn


@dataclass(eq=False)
class Call:
    """One call of a module's forward."""

    module: nn.Module
    """The module."""
    begin: int
    """Tick of its entry."""
    parent: Call | None
    """The call it was made in."""
    visit: Visit | None = None
    """The block visit it belongs to; None outside blocks."""
    end: int = -1
    """Tick of its exit; -1 while it runs."""


class Read(NamedTuple):
    """An operator that read a managed tensor, itself or through a view."""

    tick: int
    """When."""
    tensor: int
    """Which, by its number in the ownership."""
    operator: str
    """By what: ``aten.addmm``."""
    call: Call | None
    """The innermost module call that was active, its anchor; None outside all recorded modules."""


@dataclass(eq=False)
class Visit:
    """One call of a block's forward with all that it read of the block's own tensors."""

    block: int
    """The block."""
    call: Call
    """The call of the block itself."""
    nested: bool = False
    """Whether another block's visit lies in it, or it lies in one."""
    calls: list[Call] = field(default_factory=list)
    """Every module call in it, its own first, by entry."""
    reads: list[Read] = field(default_factory=list)
    """In order."""


@dataclass(eq=False)
class Trace:
    """One recorded step."""

    visits: list[Visit] = field(default_factory=list)
    """In order of entry."""
    stray: list[Read] = field(default_factory=list)
    """Reads of a block's tensors while that block's forward did not run."""
    seen: set[int] = field(default_factory=set)
    """Tensors of blocks that were read."""
    complete: bool = True
    """False if a forward failed: such a trace is no evidence."""
