"""Adapter tensors on the device of a model that streams: resident where its budget leaves room, else block by block with it.

    the model's budget    | its pages, fewer by what the adapters take |  adapters: all of them, or a ring of their own |

What does not fit is a model of its own beside the one that it adapts: a carrier for each block, whose turn is opened within the
block's. So adapter tensors have addresses, a ring, look-ahead and events as weights have. A block whose adapters are all at zero
opens no turn, and nothing of it is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Optional

from torch import nn

from ..attaching import Place, Prepared
from ..attachment import Attachment
from ..errors import BudgetError
from ..group import Group
from ..steps import streaming_blocks
from ..towers import find_towers
from .adapted import Inner
from .placing import Computed
from .strengths import is_recorded

__all__ = ["Company", "block_of", "refused"]

log = logging.getLogger("weightstream.offload")


class Carrier(nn.Module):
    """What adapts one block. Its forward is the block's."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, in which its adapters are present."""
        return inner(*args, **kwargs)


class Carriers(nn.Module):
    """All carriers of a model. Its forward is the model's."""

    def __init__(self, carriers: Sequence[Carrier]) -> None:
        super().__init__()
        self.carriers = nn.ModuleList(carriers)

    def forward(self, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward, a step of the carriers too."""
        return inner(*args, **kwargs)


class Turn:
    """What is computed in the forward of a block, or of the whole model, whose adapters stream."""

    def __init__(self, carrier: nn.Module, parts: Sequence[Any], within: Optional[Computed]) -> None:
        self._carrier = carrier
        self._parts = parts
        self._within = within

    def is_idle(self) -> bool:
        """Whether there is nothing to do in the forward now."""
        return all(part.is_idle() for part in self._parts) and (self._within is None or self._within.is_idle())

    def forward(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward within a turn, if any adapter in it is not at zero."""
        within = self._within
        if within is not None:
            beneath = inner

            def inner(*args: Any, **kwargs: Any) -> Any:
                return within.forward(module, beneath, args, kwargs)

        if not is_recorded() and all(
            part.is_idle() for part in self._parts
        ):  # only what is computed in the forward itself is not
            return inner(*args, **kwargs)
        return self._carrier.forward(inner, args, kwargs)


class Company:
    """The adapters of one attached model while they stream beside it."""

    def __init__(
        self,
        attachment: Attachment,
        blocks: dict[int, list[Any]],
        reserve: tuple[bool, Optional[int]],
        slots: int,
    ) -> None:
        """`blocks` are the parts that adapt each block of the model, by its number; the ring has room for so many of them: with
        two, one computes while the next is copied. Nothing is changed yet."""
        self._attachment = attachment
        self._slots = slots
        self._blocks = blocks
        self._carriers = {index: Carrier(parts) for index, parts in blocks.items()}
        self.model = Carriers([self._carriers[index] for index in sorted(blocks)])
        pinned, most = reserve
        lock = None if pinned and most is None else most if pinned else 0
        runtime = attachment._runtime
        nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        group = Group(runtime.target, nbytes, nbytes + (64 << 20))
        name = f"adapters of {type(attachment.model).__name__}"
        self._prepared = Prepared(
            self.model,
            runtime.target,
            find_towers(self.model, ["carriers"]),
            self._budget,
            None,
            lock,
            Place(group, name, []),
        )
        self._own: Optional[Attachment] = None

    nbytes = 0
    """Of device memory that they take while they stream."""
    sum = (0, 0, 0)
    """What that is made of: bytes of all of them, of the block that has most, and of a page."""

    def _budget(self, base: int, largest: int, page: int, total: int) -> int:
        """What they are given."""
        self.nbytes = min(base + self._slots * largest + page, -(-total // page + 1) * page)
        self.sum = (total, largest, page)
        return self.nbytes

    def start(self) -> None:
        """Makes them stream from now on."""
        self._own = self._prepared.start()
        self._attachment._runtime.companions.add(self)

    def come(self) -> None:
        """They come with the first turn."""

    def leave(self) -> None:
        """Gives their pages to whoever comes."""
        runtime = None if self._own is None else self._own._runtime
        if runtime is not None and runtime.group is not None and runtime.offloader.is_here() and not runtime.open:
            runtime.group.vacate(runtime)

    def stats(self) -> dict[str, Any]:
        """Counters, as those of an attachment."""
        return {} if self._own is None else self._own.stats()

    def turns(self, computed: Callable[[nn.Module], Optional[Computed]]) -> dict[int, tuple[nn.Module, Turn]]:
        """What is computed in the forwards of blocks and of the model, over what `computed` says of each; by the modules' ids."""
        ownership = self._attachment._ownership
        everything = [part for parts in self._blocks.values() for part in parts]
        modules = {index: ownership.blocks[index].module for index in self._blocks}
        turns = {
            id(module): (module, Turn(self._carriers[index], self._blocks[index], computed(module)))
            for index, module in modules.items()
        }
        model = self._attachment.model
        turns[id(model)] = (model, Turn(self.model, everything, computed(model)))
        return turns

    def close(self) -> None:
        """Ends it: the tensors are in host memory again."""
        if self._own is not None:
            self._attachment._runtime.companions.discard(self)
            self._own.detach()
            self._own = None


def block_of(attachment: Attachment) -> dict[int, int]:
    """The block that each module of an attached model lies in, by the module's id; not of those in several or in none."""
    found: dict[int, int] = {}
    several: set[int] = set()
    for block in streaming_blocks(attachment._ownership):
        for module in block.module.modules():
            if found.setdefault(id(module), block.index) != block.index:
                several.add(id(module))
    return {module: block for module, block in found.items() if module not in several}


def refused(attachment: Attachment, company: Company, outside: int, error: BudgetError) -> BudgetError:
    """What is said where not even a ring of adapters fits, with `outside` bytes of those that are in no block."""
    total, largest, page = company.sum
    return BudgetError(
        f"the adapters of {type(attachment.model).__name__} need {company.nbytes + outside} bytes of device memory at least, beside "
        f"the model: {company.nbytes} for a ring of one block's at a time (the largest block's are {largest}, of {total} in "
        f"all blocks, in pages of {page}), and {outside} for those of layers in no block, which stay. {error}. Attach it with a larger "
        f"budget, or give fewer LoRAs"
    )
