"""Which layers of a model are quantized on the fly: by structure alone, block by block.

Left out are: layers outside the towers, unless they are large (quality suffers most there, and little is gained); what
`_lock_dtype` marks; weights with more than one place; what `quantize_exclude` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Union

from torch import nn

from .. import _native
from ..errors import QuantizationError
from ..filetypes import name_of_dtype
from ..quant.module import QuantModule
from ..quant.replacing import takes
from ..spans import is_wrapper
from ..towers import find_towers

__all__ = ["QuantizationPlan", "choose_layers", "is_quantized"]

_SMALL = 2 << 30
"""Bytes, at two a parameter, up to which what lies outside the towers is left out."""
_SHARE = 0.2
"""Share of the model from which leaving so much out is taken for a mistake."""
_FLOATS = ("F32", "F16", "BF16")


@dataclass(eq=False)
class QuantizationPlan:
    """Which layers of a model are quantized, to what, and in which order."""

    kind: str
    """The type, as maps of quantized modules name it."""
    blocks: list[list[str]] = field(default_factory=list)
    """The paths of the layers, those of a block together."""
    notes: list[str] = field(default_factory=list)
    """What a user may want to know."""

    @property
    def layers(self) -> set[str]:
        """All of them."""
        return {path for block in self.blocks for path in block}

    def without(self, done: set[str]) -> QuantizationPlan:
        """The same for the layers that are not done."""
        blocks = [[path for path in block if path not in done] for block in self.blocks]
        return QuantizationPlan(self.kind, [block for block in blocks if block], self.notes)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has quantized layers already, ours or optimum-quanto's."""
    return bool(getattr(model, "_quanto_map", None)) or any(
        isinstance(module, QuantModule) or hasattr(module, "weight_qtype") for module in model.modules()
    )


def choose_layers(model: nn.Module, kind: str, exclude: Union[str, Iterable[str], None] = None) -> QuantizationPlan:
    """The layers of a model that are quantized to a type. Weights may be on the meta device."""
    plan = QuantizationPlan(kind)
    candidates = _candidates(model, plan, _patterns(exclude))
    blocks = [path for tower in find_towers(model) for path, _ in tower.blocks]
    inside: dict[str, list[str]] = {block: [] for block in blocks}
    outside: dict[str, list[str]] = {}
    for path in candidates:
        block = next((outer for outer in _outer(path) if outer in inside), None)
        (outside.setdefault(path.partition(".")[0], []) if block is None else inside[block]).append(path)
    sizes, total = _sizes_outside(model, inside)
    small = {group for group in outside if sizes[group] * 2 <= _SMALL}
    left_out = sum(sizes[group] for group in small) / max(total, 1)
    if left_out < _SHARE:
        outside = {group: paths for group, paths in outside.items() if group not in small}
    elif blocks:
        plan.notes.append(f"{left_out:.0%} of the model lie outside its towers and are quantized, too")
    plan.blocks = [block for block in (*inside.values(), *outside.values()) if block]
    return plan


def _candidates(model: nn.Module, plan: QuantizationPlan, patterns: list[str]) -> list[str]:
    """The layers whose weights can be quantized and may be."""
    places = _places(model)
    used: set[str] = set()
    found: list[str] = []
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        matched = [pattern for pattern in patterns if _matches(path, pattern)]
        used.update(matched)
        if matched or weight is None or not _can_be(module, weight):
            continue
        locked = getattr(module, "_lock_dtype", None) or getattr(weight, "_lock_dtype", None)
        if locked or places[id(weight)] > 1:
            continue
        try:
            _native.Quantizer(path, list(weight.shape), "BF16", plan.kind)
        except QuantizationError as error:
            plan.notes.append(str(error))
            continue
        found.append(path)
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        plan.notes.append(f"quantize_exclude names nothing of the model with {', '.join(map(repr, unused))}")
    return found


def _places(model: nn.Module) -> dict[int, int]:
    """In how many places each parameter is: under the names of layers, and with its layer in the parents that share that."""
    modules = list(model.modules())
    parents: dict[int, int] = {}
    for module in modules:
        for child in module._modules.values():
            parents[id(child)] = parents.get(id(child), 0) + 1
    places: dict[int, int] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                places[id(parameter)] = places.get(id(parameter), 0) + max(parents.get(id(module), 1), 1)
    return places


def _can_be(module: nn.Module, weight: nn.Parameter) -> bool:
    if isinstance(module, QuantModule) or not isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    # The projection of attention is read by a function of PyTorch's that knows no layer.
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear) or is_wrapper(weight):
        return False
    return takes(module, "weight") and name_of_dtype(weight.dtype) in _FLOATS


def _patterns(exclude: Union[str, Iterable[str], None]) -> list[str]:
    given = [exclude] if isinstance(exclude, str) or not isinstance(exclude or (), Iterable) else list(exclude or ())
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"quantize_exclude has {pattern!r}; give a pattern of names, or a list of them")
    return given


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern names a layer, its weight, or a module that it lies in."""
    return any(fnmatchcase(name, pattern) for name in (*_outer(path), f"{path}.weight" if path else "weight"))


def _outer(path: str) -> list[str]:
    """A module and those that it lies in, the model itself first."""
    names = path.split(".") if path else []
    return [".".join(names[:length]) for length in range(len(names) + 1)]


def _sizes_outside(model: nn.Module, blocks: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Parameters outside all blocks by the model's children, and those of the whole model. Each counts once."""
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    total = 0
    for path, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        size = sum(parameter.numel() for parameter in own if id(parameter) not in seen)
        seen.update(map(id, own))
        total += size
        group = path.partition(".")[0]
        sizes[group] = sizes.get(group, 0) + (0 if any(outer in blocks for outer in _outer(path)) else size)
    return sizes, total
