"""The order in which a block's modules are expected to run: registration order, but for lists known to run in step.

Image U-Nets register a block's resnets and attentions as lists of their own and run them in turn. Laid out list by
list, no cut of such a block would be in order.

    registered   attentions.0  attentions.1  resnets.0  resnets.1
    run          resnets.0  attentions.0  resnets.1  attentions.1
"""

from __future__ import annotations

from torch import nn

_IN_STEP = ("resnets", "temp_convs", "attentions", "temp_attentions", "motion_modules")
"""Names of lists that diffusers' U-Net blocks run element by element, in the order of a round."""


def expected_order(block: nn.Module) -> dict[int, int]:
    """The position of each module under `block`, by its id."""
    order: dict[int, int] = {}
    todo = [block]
    while todo:
        module = todo.pop()
        if id(module) not in order:
            order[id(module)] = len(order)
            todo.extend(reversed(_children(module)))
    return order


def _children(module: nn.Module) -> list[nn.Module]:
    """A module's children, lists that run in step replaced by their elements in turn."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    lists = [children[name] for name in _IN_STEP if isinstance(children.get(name), nn.ModuleList)]
    if len(lists) < 2:
        return list(children.values())
    rounds = max(len(members) for members in lists)
    turns = [members[index] for index in range(rounds) for members in lists if index < len(members)]
    taken = {id(members) for members in lists}
    first = next(index for index, child in enumerate(children.values()) if id(child) in taken)
    others = [child for child in children.values() if id(child) not in taken]
    return [*others[:first], *turns, *others[first:]]
