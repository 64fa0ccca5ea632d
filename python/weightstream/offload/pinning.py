"""Which weights are kept in reserved RAM: what is wanted of each model, and what there is room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._native import share_reserved
from ..attaching import Prepared
from ..errors import WeightstreamError
from ..ownership import Owned
from .parameters import Parameters

if TYPE_CHECKING:
    from .planning import Planned

__all__ = ["check_share", "is_pinned", "share_reserve"]

_BLOCKS_IN_RING = 3
"""Of the largest blocks, as mmgp has it. The staging ring is one a device; this is what the plan leaves of the limit for it."""


def check_share(parameters: Parameters) -> None:
    """An error if the share of RAM that may be locked, given or in the environment, is none."""
    try:
        share_reserved([], float(parameters.perc_reserved_mem_max), 0)
    except WeightstreamError as error:
        where = "the parameter" if parameters.perc_reserved_mem_max else "the environment variable"
        raise type(error)(f"{where} perc_reserved_mem_max: {error}") from None


def is_pinned(parameters: Parameters, name: str) -> bool:
    """Whether a model shall be kept in reserved RAM."""
    pinned = parameters.pinnedMemory
    return pinned if isinstance(pinned, bool) else name in ([pinned] if isinstance(pinned, str) else pinned)


def share_reserve(
    planned: Sequence[Planned], parameters: Parameters
) -> tuple[dict[str, Callable[[Owned], bool]], dict]:
    """For each model, and each part of several, which of its tensors are page-locked, and the shares in numbers."""
    prepared = {one.managed.name: one.prepared for one in planned}
    pinned = {one.managed.name for one in planned if one.pinned}
    models = []
    ring = 0
    for name, model in prepared.items():
        blocks = model.plan.blocks()
        rest = model.ownership.nbytes - sum(size for size, _ in blocks)
        if name in pinned:
            wanted: tuple[str, int] = ("blocks" if parameters.partialPinning else "whole", 0)
        elif parameters.smartPinning:
            wanted = ("one in", parameters.smartPinning)
        else:
            wanted = ("ring", 0)
        ring = max(ring, _BLOCKS_IN_RING * max((size for size, _ in blocks), default=0))
        models.append((*wanted, blocks, max(rest, 0)))
    shares, ring, reserved, most = share_reserved(models, float(parameters.perc_reserved_mem_max), ring)
    locks = {
        name: _locks(model, blocks, rest, parameters.pinnedPEFTLora)
        for (name, model), (blocks, rest) in zip(prepared.items(), shares)
    }
    facts: dict[str, Any] = {"ring": ring, "reserved": reserved, "most": most}
    for (name, _), (blocks, rest) in zip(prepared.items(), shares):
        facts[name] = {"blocks": sum(blocks), "of": len(blocks), "rest": rest}
    return locks, facts


def _locks(model: Prepared, blocks: list[bool], rest: bool, adapters: bool) -> Callable[[Owned], bool]:
    # The native plan numbers the blocks that own bytes, in the order of all blocks.
    owning = [
        block.index for block in model.ownership.blocks if any(model.ownership.tensors[i].nbytes for i in block.tensors)
    ]
    locked = {index for index, is_locked in zip(owning, blocks) if is_locked}

    def lock(owned: Owned) -> bool:
        if not adapters and any(".lora_" in user.path for user in owned.users):
            return False
        return rest if owned.block is None else owned.block in locked

    return lock
