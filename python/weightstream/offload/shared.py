"""What models of one pipeline share: a text encoder in two of them, a model inside another, an embedding that is another's head.

    transformer ─┬─ its own                            what several models have is a *part*: placed once, by an engine of its
                 └─ part transformer+text_encoder      own, for all of them; the same bytes have one address whoever reads them
    text_encoder ┬─┘
                 └─ its own

Found by overlapping bytes, as ownership is. Modules that are in all of a part's models belong to it as they are, so that its
towers stream; tensors that modules of different models hold are its base. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from torch import Tensor, nn

from ..errors import ModelError
from ..ownership import User, is_quantized, overlapping, users_of
from ..spans import inner_tensors
from ..towers import Tower, find_towers, has_forward
from .components import Component

__all__ = ["Shared", "find_shared"]


@dataclass(eq=False)
class Shared:
    """The weights that exactly these models have."""

    names: tuple[str, ...]
    """The models' ids, in the pipeline's order."""
    model: nn.Module
    """What holds them: a model of the pipeline, or a root made for them."""
    of: Optional[Component]
    """The model that it is, if it is one whole model that lies in others."""
    tensors: frozenset[int]
    """The registered tensors, by id."""
    modules: frozenset[int]
    """The pipeline's modules that belong to it, by id."""
    towers: list[Tower] = field(default_factory=list)
    """Its blocks."""
    entries: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Methods in which it runs."""
    loose: dict[str, list[nn.Module]] = field(default_factory=dict)
    """Modules by model that hold some of its tensors and do not belong to it."""

    @property
    def name(self) -> str:
        """What it is called."""
        return "+".join(self.names) if self.of is None else self.of.name


@dataclass(frozen=True)
class _Use:
    """A registered tensor in one of the models."""

    component: Component
    user: User

    @property
    def tensor(self) -> Tensor:
        """As it is registered, wrapper and all."""
        kind = self.user.module._buffers if self.user.is_buffer else self.user.module._parameters
        return kind[self.user.name]


def find_shared(components: Sequence[Component]) -> list[Shared]:
    """The parts of these models, none of most pipelines. ModelError for what cannot be placed once for several models."""
    uses = [_Use(component, user) for component in components for user in users_of(component.model, inner_tensors)]
    groups: dict[tuple[str, ...], list[_Use]] = {}
    alone: set[str] = set()
    order = {component.name: number for number, component in enumerate(components)}
    for _, members in overlapping([use.user for use in uses]):
        group = [uses[i] for i in members]
        names = tuple(sorted({use.component.name for use in group}, key=order.__getitem__))
        if all(use.user.is_buffer and not is_quantized(use.user) for use in group):
            continue  # buffers stay with whoever writes them
        if len(names) == 1:
            alone.add(names[0])
        else:
            groups.setdefault(names, []).extend(group)
    found = [_part([one for one in components if one.name in names], group) for names, group in groups.items()]
    whole = {part.of.name for part in found if part.of is not None}
    for component in components:
        if component.name not in alone | whole:
            other = next(part for part in found if component.name in part.names)
            apart = next(name for name in other.names if name != component.name)
            raise ModelError(
                f"all weights of {component.name} are those of other models, among them {apart}, and its modules are its own: give one "
                f"of the two, or {component.name} weights of its own"
            )
    return found


def _part(components: list[Component], group: list[_Use]) -> Shared:
    """The part of these models that has these tensors."""
    tensors = frozenset(id(use.tensor) for use in group)
    modules = _common(components, tensors)
    covered = frozenset(id(sub) for _, module in modules for sub in module.modules())
    loose = [use for use in group if id(use.user.module) not in covered]
    for use in loose:
        _check_loose(use, group)
    of = next((one for one in components if any(module is one.model for _, module in modules)), None)
    if of is not None and not loose:
        root = of.model
    else:
        root = nn.Module()
        for path, module in modules:
            root._modules[path] = module
        for use in loose:
            _hold(root, use)
    part = Shared(tuple(one.name for one in components), root, of, tensors, covered)
    for use in loose:
        part.loose.setdefault(use.component.name, []).append(use.user.module)
    part.towers = find_towers(root) if of is None or root is not of.model else of.towers
    part.entries = _entries(part, components, [module for _, module in modules])
    return part


def _common(components: list[Component], tensors: frozenset[int]) -> list[tuple[str, nn.Module]]:
    """The outermost modules that are in all of the models and hold any of the tensors, with the paths in the first."""
    everywhere = set.intersection(*({id(module) for module in one.model.modules()} for one in components))
    found: dict[int, tuple[str, nn.Module]] = {}

    def walk(path: str, module: nn.Module) -> None:
        if id(module) in everywhere:
            if id(module) not in found and tensors.intersection(_registered(module)):
                found[id(module)] = (path, module)
            return
        for name, child in module.named_children():
            walk(f"{path}.{name}", child)

    # In one of them it may be the model itself; another tells where it lies.
    first = max(components, key=lambda one: id(one.model) not in everywhere)
    walk(first.name, first.model)
    return list(found.values())


def _registered(module: nn.Module) -> Iterable[int]:
    for sub in module.modules():
        yield from (id(tensor) for tensor in (*sub._parameters.values(), *sub._buffers.values()) if tensor is not None)


def _check_loose(use: _Use, group: list[_Use]) -> None:
    """Refuses what cannot be given an address where modules of several models hold it."""
    if type(use.tensor) not in (Tensor, nn.Parameter):
        other = next(one for one in group if one.component is not use.component)
        raise ModelError(
            f"{use.component.name}.{use.user.path}, a {type(use.tensor).__name__}, has the weights of "
            f"{other.component.name}.{other.user.path}: between modules of different models only plain parameters are shared; "
            f"give one of them weights of its own, or both the same module"
        )


def _hold(root: nn.Module, use: _Use) -> None:
    """Registers a tensor under its path in a module that only holds it."""
    path, name = f"{use.component.name}.{use.user.path}".rsplit(".", 1)
    holder = root._modules.setdefault(path, nn.Module())
    (holder._buffers if use.user.is_buffer else holder._parameters)[name] = use.tensor


def _entries(part: Shared, components: list[Component], modules: list[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The methods that are its steps: the forward of the module that all its blocks are in. Where several have blocks, or none has
    them all, a step is a model's, so that one order is learned for all of them."""
    if part.of is not None:
        entries = list(part.of.hooked)
        return entries if part.model is part.of.model else [(part.of.model, "forward"), *entries]
    blocks = {id(block) for tower in part.towers for _, block in tower.blocks}
    entries = [(module, "forward") for module in modules if has_forward(module) and id(module) not in blocks]
    if blocks and not any(blocks <= {id(sub) for sub in module.modules()} for module, _ in entries):
        entries.extend((one.model, "forward") for one in components if has_forward(one.model))
    return entries
