"""`autoPreload`: which models of a pipeline fill what their workloads leave free, and how much each may take at most."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Optional

from ..preloading import Preloading
from .amounts import budget_of
from .components import Component
from .managed import OffloadObject
from .parameters import Parameters

__all__ = ["set_preloading"]

log = logging.getLogger("weightstream.offload")


def set_preloading(
    components: list[Component],
    parameters: Parameters,
    company: Mapping[str, Optional[list[str]]],
    sizes: Mapping[str, int],
    compiled: Collection[str],
    done: OffloadObject,
) -> None:
    """Switches preloading on for the models that stream, except compiled ones and what lies in several. `sizes` are bytes with
    which all of the others is resident.

    Models that may be on the device together keep room for each other's budgets, so that taking turns loads nothing again.
    """
    if parameters.autoPreload is False or not parameters.asyncTransfers:
        return
    measured = parameters.autoPreload if isinstance(parameters.autoPreload, dict) else None
    attachments = {component.name: done.models[component.name].attachment for component in components}
    budgets = {
        name: (attachment.budget or sizes[name] + attachment.apart) - attachment.apart
        for name, attachment in attachments.items()
        if attachment and name in sizes
    }
    parts = [managed.part for managed in (*done.models.values(), *done.shared.values()) if managed.part is not None]
    for component in components:
        name, attachment = component.name, attachments[component.name]
        if name not in budgets or attachment is None or name in compiled or not component.towers:
            continue
        runtime = attachment._runtime
        total = runtime.target.native.total_memory
        most = budget_of(name, 0, parameters.workingVRAM, total, parameters.vram_safety_coefficient)
        most -= sum(part.taken for part in parts if part.group.target is runtime.target)
        for other in budgets:
            same = done.models[other].group is done.models[name].group
            if other != name and same and _together(name, other, company):
                most -= min(budgets[other], sizes[other])
        most = min(most, sizes[name])
        if most <= budgets[name]:
            continue
        # Another pipeline may have another model of this id.
        identity = f"{name}/{type(component.model).__name__}/{sizes[name]}"
        runtime.preloading = Preloading(
            identity, runtime, attachment._steps, most, measured, partial(getattr, attachment, "_reserved")
        )
        attachment.after_detach.append(runtime.stop_preloading)
        attachment._steps.adapt()
        log.debug("%s: up to %.1f MB of its weights are preloaded", name, most / (1 << 20))


def _together(one: str, other: str, company: Mapping[str, Optional[list[str]]]) -> bool:
    """Whether either accepts the other beside it; None accepts everyone, and is accepted by everyone."""
    lists = company[one], company[other]
    if lists[0] is None or lists[1] is None:
        return True
    return other in lists[0] or one in lists[1]
