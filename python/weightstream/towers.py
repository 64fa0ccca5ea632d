"""Finds a model's towers: the lists of repeated blocks that are worth streaming.

A tower is a ModuleList or ModuleDict of at least two blocks, a Sequential of at least five, or at least five numbered
siblings of one class, that holds 5 % of the model's bytes or more. The outermost wins, and each of its blocks must have
a forward of its own, for a block that is never called can be neither entered nor left. Looks at structure only: what a
forward really reads is the recorder's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Union

from torch import nn

from .errors import ModelError
from .spans import tensor_bytes

LEAST_LIST = 2
"""Children a ModuleList or ModuleDict needs to be a tower."""
LEAST_SEQUENTIAL = 5
"""Children a Sequential needs: shorter ones are mostly small heads and stems."""
LEAST_SIBLINGS = 5
"""Numbered siblings of one class that are needed."""
LEAST_SHARE = 0.05
"""Share of the model's bytes below which a list stays in the base."""

TowersArgument = Union[None, str, nn.Module, Sequence[Union[str, nn.Module, Sequence[Union[str, nn.Module]]]]]
"""``towers=`` of attach: container names or modules, or lists of the blocks themselves."""

_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)$")


@dataclass(frozen=True)
class Tower:
    """A list of repeated blocks, in the order in which they are expected to run."""

    name: str
    """Its dotted name in the model; ``""`` if the model itself is the list, ``a.block_*`` for numbered siblings."""
    blocks: tuple[tuple[str, nn.Module], ...]
    """Dotted name and module of each block. A module that is listed twice is here once: its visits repeat."""


def find_towers(model: nn.Module, towers: TowersArgument = None) -> list[Tower]:
    """The towers of `model` in registration order, or those that `towers` names.

    Raises ModelError if `towers` names something that is not in the model, has no forward or holds nothing.
    """
    if towers is not None:
        return _given(model, towers)
    least = LEAST_SHARE * tensor_bytes(model)
    found: list[Tower] = []
    _search("", model, least, found, set(), set())
    return _outermost(found)


def _search(name: str, module: nn.Module, least: float, found: list[Tower], walked: set[int], taken: set[int]) -> None:
    """Adds the outermost towers at and under `module`; `walked` and `taken` keep aliases from counting twice."""
    if id(module) in walked or id(module) in taken:
        return
    walked.add(id(module))
    children = [(child, _join(name, child), sub) for child, sub in module._modules.items() if sub is not None]
    if _is_container(module):
        if _accept(name, [(path, sub) for _, path, sub in children], least, found, taken):
            return
    else:
        for stem, members in _siblings(children):
            _accept(_join(name, stem + "*"), members, least, found, taken)
    for _, path, sub in children:
        _search(path, sub, least, found, walked, taken)


def _outermost(towers: list[Tower]) -> list[Tower]:
    """The towers without those inside another's blocks, which an alias registered first can show to the search."""
    inside = [{id(sub) for _, block in tower.blocks for sub in block.modules() if sub is not block} for tower in towers]

    def holds(outer: int, inner: int) -> bool:
        return any(id(block) in inside[outer] for _, block in towers[inner].blocks)

    numbers = range(len(towers))
    # Two towers that hold each other are modules that refer back to their model: both stay.
    hidden = {i for i in numbers for o in numbers if o != i and holds(o, i) and not holds(i, o)}
    return [towers[number] for number in numbers if number not in hidden]


def _is_container(module: nn.Module) -> bool:
    """Whether the module is a list that may be a tower by its kind and length."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module) >= LEAST_LIST
    return isinstance(module, nn.Sequential) and len(module) >= LEAST_SEQUENTIAL


def _accept(
    name: str, members: Iterable[tuple[str, nn.Module]], least: float, found: list[Tower], taken: set[int]
) -> bool:
    """Takes the list as a tower if its blocks can be entered and hold enough."""
    blocks = [(path, sub) for path, sub in _unique(members) if id(sub) not in taken]
    if not all(has_forward(sub) for _, sub in blocks):
        return False
    sizes = [tensor_bytes(sub) for _, sub in blocks]
    holding = [block for block, size in zip(blocks, sizes) if size > 0]
    if len(holding) < LEAST_LIST or tensor_bytes(nn.ModuleList([sub for _, sub in holding])) < least:
        return False
    taken.update(id(sub) for _, sub in holding)
    found.append(Tower(name, tuple(holding)))
    return True


def _siblings(children: list[tuple[str, str, nn.Module]]) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Groups of children named stem + number, of one class, long enough to be a tower, in numeric order."""
    groups: dict[tuple[str, type], list[tuple[int, str, nn.Module]]] = {}
    for child, path, sub in children:
        match = _NUMBERED.match(child)
        if match is not None:
            groups.setdefault((match["stem"], type(sub)), []).append((int(match["number"]), path, sub))
    for (stem, _), members in groups.items():
        if len({id(sub) for _, _, sub in members}) >= LEAST_SIBLINGS:
            members.sort(key=lambda member: member[0])
            yield stem, [(path, sub) for _, path, sub in members]


def _given(model: nn.Module, towers: TowersArgument) -> list[Tower]:
    """The towers that the caller named."""
    items: list = list(towers) if isinstance(towers, (list, tuple)) else [towers]
    names = {id(module): name for name, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))

    def resolve(item: object) -> tuple[str, nn.Module]:
        if isinstance(item, nn.Module) and id(item) in names:
            return names[id(item)], item
        if isinstance(item, str) and item in modules:
            return item, modules[item]
        said = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
        raise ModelError(f"towers= names {said}, which is not a module of the model")

    def is_list(item: object) -> bool:
        if isinstance(item, (list, tuple)):
            if not item:
                raise ModelError("towers= holds an empty list of blocks; list the blocks, or leave it out")
            return True
        module = resolve(item)[1]
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            return True
        if module is model:
            raise ModelError(
                f"towers= names the model itself, a {type(model).__name__}, which is no list of blocks; name the lists "
                f"inside it, such as {_example(model)}"
            )
        return False

    # A flat list of blocks is one tower: nobody means a tower a block by it.
    if items and not any(is_list(item) for item in items):
        items = [items]
    found: list[Tower] = []
    taken: set[int] = set()
    for item in items:
        if not isinstance(item, (list, tuple)):
            name, container = resolve(item)
            if not is_list(item):
                raise ModelError(f"towers= names {name!r}, a {type(container).__name__}: not a list of blocks")
            members = [(_join(name, child), sub) for child, sub in container.named_children()]
        else:
            members = [resolve(block) for block in item]
            name = _common([path for path, _ in members])
        found.append(Tower(name, _checked(name, members, taken)))
    return found


def _example(model: nn.Module) -> str:
    """The name of a list in the model, or a usual one."""
    lists = (
        name
        for name, module in model.named_modules()
        if name and isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    )
    return repr(next(lists, "layers"))


def _checked(name: str, members: list[tuple[str, nn.Module]], taken: set[int]) -> tuple[tuple[str, nn.Module], ...]:
    """The blocks of a tower the caller named, refused if one cannot be entered or is in two towers."""
    blocks = [(path, sub) for path, sub in _unique(members) if tensor_bytes(sub) > 0]
    if not blocks:
        raise ModelError(f"towers= names {name!r}, which holds no parameters")
    for path, sub in blocks:
        if not has_forward(sub):
            raise ModelError(f"towers= names block {path!r}, a {type(sub).__name__}, which has no forward")
        if id(sub) in taken:
            raise ModelError(f"towers= names block {path!r} in two towers")
    taken.update(id(sub) for _, sub in blocks)
    return tuple(blocks)


def _unique(members: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The members without repeats of one module."""
    first: dict[int, tuple[str, nn.Module]] = {}
    for path, sub in members:
        first.setdefault(id(sub), (path, sub))
    return list(first.values())


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: plain lists and bare nn.Module namespaces cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _common(paths: list[str]) -> str:
    """The longest dotted prefix of the names."""
    parts = [path.split(".") for path in paths]
    prefix: list[str] = []
    for column in zip(*parts):
        if len(set(column)) > 1:
            break
        prefix.append(column[0])
    return ".".join(prefix)


def _join(parent: str, child: str) -> str:
    """A child's dotted name."""
    return f"{parent}.{child}" if parent else child
