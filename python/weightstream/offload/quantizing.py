"""Quantizes a model's layers on the fly, block by block: floats go as packed weights come.

Biases, norms and buffers stay as they are, and so does what `choosing` leaves out.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .. import _native
from ..checks import MARK
from ..errors import ModelError, StateError
from ..filetypes import dtype_of_name, name_of_dtype
from ..overrides import is_adapted
from ..quant.description import local
from ..quant.finding import Packed
from ..quant.module import QuantModule
from ..quant.replacing import put, quantized_like
from .choosing import QuantizationPlan, choose_layers, is_quantized
from .dtypes import empty
from .packed_layers import described_layers
from .progress import Progress, progress_of
from .qtypes import QuantizationType, kind_of, qint8

__all__ = ["carry_out", "check_readable", "plan_quantization", "quantize"]

_PIECE = 16 << 20
"""Bytes quantized between two looks at whether to stop."""
_UNFINISHED = "_weightstream_quantizing"


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
        check_readable(model, plan)
        setattr(model, _UNFINISHED, plan)
        carry_out(model, plan, progress, lambda module, weight: weight.dtype)
        delattr(model, _UNFINISHED)
        done = described_layers(model).quantization_map
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
    refuse_adapted(model, type(model).__name__)
    kind = kind_of(quantizationType)
    unfinished = getattr(model, _UNFINISHED, None)
    if unfinished is not None:
        if unfinished.kind != kind:
            raise StateError(
                f"this {type(model).__name__} is quantized to {unfinished.kind} in part; go on with that type"
            )
        return unfinished.without({path for path, module in model.named_modules() if isinstance(module, QuantModule)})
    return None if is_quantized(model) else choose_layers(model, kind, quantize_exclude)


def refuse_adapted(model: nn.Module, name: str) -> None:
    """StateError for a model that has LoRAs: quantizing puts other layers in the place of those that they are on."""
    if any(is_adapted(module.__dict__.get("forward")) for module in model.modules()):
        raise StateError(
            f"{name} has LoRAs, which are on the layers that quantizing replaces; load them after it, or call "
            f"unload_loras_from_model first"
        )


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
        _give_back()
    progress.phase("Quantization", len(plan.blocks), max(len(plan.blocks), 1))


def check_readable(model: nn.Module, plan: QuantizationPlan) -> None:
    """ModelError for a weight without numbers, before any layer is replaced."""
    for path in sorted(plan.layers):
        weight = model.get_submodule(path)._parameters["weight"]
        if weight.is_meta:
            name = f"{path}.weight" if path else "weight"
            raise ModelError(f"{name} is on the meta device: load the model's weights before quantizing it")


def _give_back() -> None:
    """Has the heap return what it keeps of weights that went: packed ones lie elsewhere, and would come on top of it."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Optional[Callable[[int], int]]:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _packed(
    path: str, weight: nn.Parameter, dtype: torch.dtype, kind: str, reader: _Reader, poll: Callable[[], None]
) -> Packed:
    """A weight as its packed parts, on its device. Reads and converts some rows at a time, in CPU memory."""
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
        piece = reader.read(name, source[start : start + step]).to("cpu", dtype).contiguous()
        quantizer.quantize((piece.data_ptr(), piece.nbytes), (start, start + len(piece)), *places)
    own = local(described)
    parts = {tensor: part.to(weight.device) for tensor, part in parts.items()}
    return Packed(name, own, {renamed: part for (_, renamed, *_), part in zip(own.parts, parts.values())}, "quanto")


class _Reader:
    """Rows of weights; of those that still show a file's bytes, from the file and not through its mapping."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, name: str, rows: Tensor) -> Tensor:
        if not rows.is_contiguous() or rows.device.type != "cpu":
            return rows
        if self._buffer.nbytes < rows.nbytes:
            self._buffer = torch.empty(rows.nbytes, dtype=torch.uint8, device="cpu")
        if _native.read_mapped(name, rows.data_ptr(), rows.nbytes, self._buffer.data_ptr()):
            return self._buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        return rows
