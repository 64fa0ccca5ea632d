"""Quantizes a model's layers on the fly, block by block: floats go as packed weights come.

Left out are: layers outside the towers, unless they are large (quality suffers most there, and little is gained); what
`_lock_dtype` marks; weights with more than one place; what `quantize_exclude` names. Biases, norms and buffers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .. import _native
from ..checks import MARK
from ..errors import QuantizationError, StateError
from ..filetypes import dtype_of_name, name_of_dtype
from ..quant.description import local
from ..quant.finding import Packed
from ..quant.module import QuantModule
from ..quant.replacing import put, quantized_like, takes
from ..spans import is_wrapper
from ..towers import find_towers
from .dtypes import empty
from .progress import Progress, progress_of
from .qtypes import QuantizationType, kind_of, qint8

__all__ = ["QuantizationPlan", "is_quantized", "plan_quantization", "quantize"]

_PIECE = 16 << 20
"""Bytes quantized between two looks at whether to stop."""
_SMALL = 2 << 30
"""Bytes, at two a parameter, up to which what lies outside the towers is left out."""
_SHARE = 0.2
"""Share of the model from which leaving so much out is taken for a mistake."""
_FLOATS = ("F32", "F16", "BF16")
_UNFINISHED = "_weightstream_quantizing"


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

    @property
    def map(self) -> dict[str, dict[str, str]]:
        """The map of quantized modules."""
        return {path: {"weights": self.kind, "activations": "none"} for block in self.blocks for path in block}


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has quantized layers already, ours or optimum-quanto's."""
    return bool(getattr(model, "_quanto_map", None)) or any(
        isinstance(module, QuantModule) or hasattr(module, "weight_qtype") for module in model.modules()
    )


def quantize(
    model: nn.Module,
    quantizationType: Union[QuantizationType, str, Any] = qint8,
    quantize_exclude: Union[str, Iterable[str], None] = None,
    model_id: str = "",
) -> Optional[dict[str, dict[str, str]]]:
    """Quantizes the linear layers and embeddings of a model in place; returns its map of quantized modules, which is also its
    `_quanto_map`. None, and nothing done, if it is quantized already.

    quantizationType: qint8, qint4, qint2, qfloat8, qfloat8_e5m2, the name of one, or optimum-quanto's object of that name.
    quantize_exclude: patterns of module or parameter names; what lies in a module that is named is left out too.

    Needs the memory of one layer beyond the model's. In `loading_context` it reports the phase "Quantization" and can be
    cancelled: the layers that were done then stay quantized, and the same call goes on with the others.
    """
    progress = progress_of([model_id or type(model).__name__])
    try:
        plan = plan_quantization(model, quantizationType, quantize_exclude)
        if plan is None:
            return None
        setattr(model, _UNFINISHED, plan.kind)
        carry_out(model, plan, progress, lambda module, weight: weight.dtype)
        delattr(model, _UNFINISHED)
        done = _map_of(model)
        model._quanto_map = done
        return done
    finally:
        progress.close()


def plan_quantization(
    model: nn.Module, quantizationType: Any, quantize_exclude: Union[str, Iterable[str], None] = None
) -> Optional[QuantizationPlan]:
    """Which layers are quantized, by structure alone: weights may be on the meta device. None if it is quantized already."""
    if any(MARK in module.__dict__ for module in model.modules()):
        raise StateError(f"this {type(model).__name__} is attached; detach it before quantizing it")
    kind = kind_of(quantizationType)
    unfinished = getattr(model, _UNFINISHED, None)
    if unfinished is not None and unfinished != kind:
        raise StateError(f"this {type(model).__name__} is quantized to {unfinished} in part; go on with that type")
    if unfinished is None and is_quantized(model):
        return None
    plan = QuantizationPlan(kind)
    candidates = _candidates(model, plan, _patterns(quantize_exclude))
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


def carry_out(
    model: nn.Module,
    plan: QuantizationPlan,
    progress: Progress,
    dtype: Callable[[nn.Module, nn.Parameter], torch.dtype],
) -> None:
    """Quantizes the layers of a plan, each from its weight in the type that `dtype` gives. Who wants to undo it keeps the modules."""
    reader = _Reader()
    for number, block in enumerate(plan.blocks):
        progress.phase("Quantization", number, len(plan.blocks))
        for position, path in enumerate(block):
            module = model.get_submodule(path)
            weight = module._parameters["weight"]
            target = dtype(module, weight)
            packed = _packed(path, weight, target, plan.kind, reader, lambda: progress.poll(position / len(block)))
            put(model, path, quantized_like(module, packed, target))
            del module, weight, packed
    progress.phase("Quantization", len(plan.blocks), max(len(plan.blocks), 1))


def _packed(
    path: str, weight: nn.Parameter, dtype: torch.dtype, kind: str, reader: _Reader, poll: Callable[[], None]
) -> Packed:
    """A weight as its packed parts. Reads and converts some rows at a time."""
    name = f"{path}.weight" if path else "weight"
    quantizer = _native.Quantizer(name, list(weight.shape), name_of_dtype(dtype) or str(dtype), kind)
    described = quantizer.weight
    parts = {
        tensor: empty(torch.Size(shape), dtype_of_name(form) or torch.uint8)
        for _, tensor, form, shape in described.parts
    }
    places = [(part.data_ptr(), part.nbytes) for part in parts.values()]
    places += [(0, 0)] * (3 - len(places))
    source = weight.detach()
    rows, row_bytes = source.shape[0], max(source[0].nbytes, 1)
    step = max(_PIECE // row_bytes, 1)
    for start in range(0, rows, step):
        poll()
        piece = reader.read(name, source[start : start + step]).to(dtype).contiguous()
        quantizer.quantize((piece.data_ptr(), piece.nbytes), (start, start + len(piece)), *places)
    own = local(described)
    return Packed(name, own, {renamed: part for (_, renamed, *_), part in zip(own.parts, parts.values())}, "quanto")


class _Reader:
    """Rows of weights; of those that still show a file's bytes, from the file and not through its mapping."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, rows: Tensor) -> Tensor:
        if not rows.is_contiguous():
            return rows
        if self._buffer.nbytes < rows.nbytes:
            self._buffer = torch.empty(rows.nbytes, dtype=torch.uint8)
        if _native.read_mapped(name, rows.data_ptr(), rows.nbytes, self._buffer.data_ptr()):
            return self._buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        return rows


def _candidates(model: nn.Module, plan: QuantizationPlan, patterns: list[str]) -> list[str]:
    """The layers whose weights can be quantized and may be."""
    places: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                places[id(parameter)] = places.get(id(parameter), 0) + 1
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


def _can_be(module: nn.Module, weight: nn.Parameter) -> bool:
    if isinstance(module, QuantModule) or not isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    # The projection of attention is read by a function of PyTorch's that knows no layer.
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear) or is_wrapper(weight):
        return False
    return takes(module, "weight") and name_of_dtype(weight.dtype) in _FLOATS


def _patterns(exclude: Union[str, Iterable[str], None]) -> list[str]:
    return [exclude] if isinstance(exclude, str) else list(exclude or ())


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


def _map_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """The map of quantized modules of a model that was quantized here."""
    from .packed_layers import described_layers

    return described_layers(model).quantization_map
