"""Plans the models of a pipeline: on which device each is, with whom it shares it, what of its budget is whose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from ..attaching import Place, Prepared
from ..devices import DeviceArgument, Target, open_target
from ..errors import BudgetError, ModelError
from ..group import Group
from ..towers import Tower
from .amounts import MEGABYTE, budget_of
from .components import Component, to_device
from .managed import ManagedModel
from .parameters import Parameters
from .parts import SharedPart, plan_part
from .pinning import is_pinned
from .shared import find_shared

__all__ = ["Planned", "company_of", "open_targets", "plan_models"]

log = logging.getLogger("weightstream.offload")

_COMPANY: dict[str, list[str]] = {
    "text_encoder": ["text_encoder_2", "vae"],
    "text_encoder_2": ["text_encoder", "vae"],
}
"""Who accepts whom where no map is given."""


@dataclass(eq=False)
class Planned:
    """A model, or what several share, that is planned and not changed yet."""

    managed: ManagedModel
    """What it will be."""
    prepared: Prepared
    """Its plan."""
    pinned: bool
    """Whether it shall be kept in reserved RAM."""
    component: Optional[Component] = None
    """The model; None for what several share."""
    part: Optional[SharedPart] = None
    """What several share; None for a model that is in no other."""

    @property
    def whole(self) -> int:
        """Device memory in which all of it is resident, rounding included."""
        _, _, page, everything = self.prepared.plan.room()
        return everything + page * (len(self.prepared.ownership.towers) + 1)


def plan_models(
    components: list[Component], targets: Mapping[str, Target], parameters: Parameters, report: Callable[[str], Any]
) -> list[Planned]:
    """Every model planned, those of one device in one group, and before them what models share."""
    company = company_of(parameters, targets)
    look_ahead = 0 if not parameters.asyncTransfers else parameters.prefetchWindow
    coefficient = parameters.vram_safety_coefficient

    def budget(component: Component) -> int:
        total = targets[component.name].native.total_memory
        return budget_of(
            component.name, parameters.budgets, parameters.workingVRAM, total, coefficient, component.budget
        )

    planned = _plan_parts(components, targets, budget, look_ahead, parameters)
    parts = [one.part for one in planned if one.part is not None]
    whole = {part.shared.of.name for part in parts if part.shared.of is not None}
    groups: dict[int, Group] = {}
    for component in components:
        report(component.name)
        if component.name in whole:
            continue
        target = targets[component.name]
        # Parts have pages of their own, which nobody else may be promised.
        apart = sum(part.taken for part in parts if part.group.target is target)
        limit = int(target.native.total_memory * coefficient) - apart
        if id(target) not in groups:
            there = (other for other in components if targets[other.name] is target)
            largest = max(sum(tensor.nbytes for tensor in other.model.parameters()) for other in there)
            groups[id(target)] = Group(target, largest, max(limit, 1))
        mine = [part for part in parts if component.name in part.shared.names]
        strangers = frozenset(module for part in mine for module in part.shared.modules)
        elsewhere = frozenset(tensor for part in mine for tensor in part.shared.tensors)
        place = Place(
            groups[id(target)],
            component.name,
            company[component.name],
            tuple(component.hooked),
            to_device(target.device, component.dtype),
            (lambda tensor, elsewhere=elsewhere: id(tensor) not in elsewhere) if mine else None,
            strangers,
            tuple(module for part in mine for module in part.shared.loose.get(component.name, ())),
            tuple(mine),
        )
        shared = sum(part.taken for part in mine if part.shared.of is None)
        own = max(min(budget(component) - shared, limit), 1)
        towers = _without(component.towers, strangers)
        prepared = Prepared(component.model, target, towers, own, look_ahead, None, place)
        managed = ManagedModel(component.name, component.model, groups[id(target)])
        managed.apart = shared
        _tell_raised(component.name, prepared, shared, limit, target.native.total_memory)
        planned.append(Planned(managed, prepared, is_pinned(parameters, component.name), component))
    return planned


def open_targets(components: list[Component], device: DeviceArgument) -> dict[str, Target]:
    """The device of each model: the one that it is on, or `device` for models in CPU memory. One device is opened once."""
    opened: dict[str, Target] = {}
    return {component.name: _target(component, device, opened) for component in components}


def company_of(parameters: Parameters, names: Mapping[str, Any]) -> dict[str, Optional[list[str]]]:
    """For each model whom it accepts beside it; None for everyone."""
    given = _COMPANY if parameters.coTenantsMap is None else parameters.coTenantsMap
    company: dict[str, Optional[list[str]]] = {}
    for name in names:
        accepted = given.get(name, ())
        everyone = accepted == "*" or "*" in accepted
        company[name] = None if everyone else [one for one in accepted if one in names]
    return company


def _plan_parts(
    components: list[Component],
    targets: Mapping[str, Target],
    budget: Callable[[Component], int],
    look_ahead: Optional[int],
    parameters: Parameters,
) -> list[Planned]:
    """What models share, innermost first."""
    planned: list[Planned] = []
    for shared in sorted(find_shared(components), key=lambda one: -len(one.names)):
        users = [component for component in components if component.name in shared.names]
        target = targets[users[0].name]
        if any(targets[user.name] is not target for user in users):
            raise ModelError(
                f"{' and '.join(shared.names)} share weights and are on different devices: put them on one, or give one of them "
                f"weights of its own"
            )
        inner = [one.part for one in planned if one.part is not None and set(one.part.shared.names) > set(shared.names)]
        budgets = [budget(user) for user in users if shared.of in (None, user)]
        limit = int(target.native.total_memory * parameters.vram_safety_coefficient)
        part, prepared = plan_part(shared, target, limit, min(budgets), look_ahead, inner)
        if shared.of is not None:
            _tell_raised(shared.name, prepared, 0, limit, target.native.total_memory)
        managed = ManagedModel(shared.name, shared.model if shared.of is None else shared.of.model, part.group)
        managed.part = part
        pinned = any(is_pinned(parameters, user.name) for user in users)
        planned.append(Planned(managed, prepared, pinned, shared.of, part))
        log.info("%s share %.1f MB of weights, which are placed once", " and ".join(shared.names), _megabytes(prepared))
    return planned


def _megabytes(prepared: Prepared) -> float:
    return prepared.ownership.nbytes / MEGABYTE


def _without(towers: list[Tower], strangers: Collection[int]) -> list[Tower]:
    """The towers without blocks that are somebody else's."""
    left = (
        Tower(tower.name, tuple(block for block in tower.blocks if id(block[1]) not in strangers)) for tower in towers
    )
    return [tower for tower in left if tower.blocks]


def _tell_raised(name: str, prepared: Prepared, shared: int, limit: int, total: int) -> None:
    """The one notice of a budget that is below the model's minimum. BudgetError if the device has not even that for it."""
    raised = prepared.plan.raised()
    if raised is None:
        return
    asked, minimum, unit = raised
    if minimum > limit:
        raise BudgetError(
            f"{name} needs {minimum / MEGABYTE:.1f} MB of the device at least, for what is always resident"
            f"{f' and its largest block {unit}' if unit else ''}; of its {total / MEGABYTE:.1f} MB models may take "
            f"{max(limit, 0) / MEGABYTE:.1f}, by vram_safety_coefficient and what they share: raise that, or leave models out"
        )
    reasons = [f"its largest block {unit}"] if unit else []
    if shared:
        reasons.append("what it shares with other models")
    log.warning(
        "the budget of %s is raised from %.1f MB to %.1f MB, the smallest that works%s",
        name,
        (asked + shared) / MEGABYTE,
        (minimum + shared) / MEGABYTE,
        f": what is always resident, and {' and '.join(reasons)}" if reasons else "",
    )


def _target(component: Component, device: DeviceArgument, opened: dict[str, Target]) -> Target:
    places = {parameter.device for parameter in component.model.parameters()}
    on = [place for place in places if place.type == "cuda"]
    if len(on) > 1:
        raise ModelError(
            f"{component.name} is spread over {', '.join(map(str, on))}; put it on one device or on the CPU"
        )
    key = str(on[0]) if on else "given"
    if key not in opened:
        target = open_target(on[0] if on else device)
        same = (other for other in opened.values() if not other.emulated and other.device == target.device)
        opened[key] = next(same, target)
    return opened[key]
