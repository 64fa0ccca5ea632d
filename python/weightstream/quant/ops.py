"""The operators of quantized layers, which PyTorch's compiler and exporters see as any other.

    weightstream::dequantize(Tensor[] parts, str weight, ScalarType dtype) -> Tensor              all numbers
    weightstream::dequantize_rows(Tensor[] parts, str weight, Tensor rows, ScalarType dtype) -> Tensor    some rows
    weightstream::rotate(Tensor input, int group) -> Tensor                                       of ConvRot

`weight` is a description as text. On the CPU numbers are written by the native module, on a GPU by `devices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._native import QuantWeight
from ..errors import QuantizationError
from .description import Description, as_bytes, described
from .devices import on_device
from .rotation import rotated
from .selecting import selected

__all__ = ["dequantize", "dequantize_parts", "dequantize_rows", "rotate"]

_WRITTEN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PT2 = (torch.Tag.pt2_compliant_tag,)

_library = torch.library.Library("weightstream", "DEF")
_library.define("dequantize(Tensor[] parts, str weight, ScalarType dtype) -> Tensor", tags=_PT2)
_library.define("dequantize_rows(Tensor[] parts, str weight, Tensor rows, ScalarType dtype) -> Tensor", tags=_PT2)
_library.define("rotate(Tensor input, int group) -> Tensor", tags=_PT2)


def dequantize(weight: QuantWeight, parts: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of a weight whose parts, in the order of `weight.parts`, are on one device."""
    return dequantize_parts([as_bytes(part) for part in parts], weight.to_json(), dtype)


def dequantize_parts(parts: Sequence[Tensor], weight: str, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight."""
    return torch.ops.weightstream.dequantize.default(list(parts), weight, dtype)


def dequantize_rows(parts: Sequence[Tensor], weight: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a weight by their numbers, in the shape of `rows` with one dimension more."""
    return torch.ops.weightstream.dequantize_rows.default(list(parts), weight, rows, dtype)


def rotate(input: Tensor, group: int) -> Tensor:
    """Inputs as rotated weights meet them."""
    return torch.ops.weightstream.rotate.default(input, group)


def _written(
    known: Description, parts: Sequence[Tensor], ranges: list[tuple[int, int]], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise QuantizationError(f"{known.weight.name} cannot be dequantized to {dtype}")
    kept = [part.contiguous() for part in parts]
    wide = dtype if dtype in _WRITTEN else torch.float32
    out = torch.empty(shape, dtype=wide, device="cpu")
    known.weight.dequantize(known.addresses(kept), ranges, out.data_ptr(), out.nbytes, _WRITTEN[wide])
    return out if wide == dtype else out.to(dtype)


def _dequantize_cpu(parts: Sequence[Tensor], weight: str, dtype: torch.dtype) -> Tensor:
    known = described(weight)
    return _written(known, parts, [(0, known.rows)], known.shape, dtype)


def _dequantize_cuda(parts: Sequence[Tensor], weight: str, dtype: torch.dtype) -> Tensor:
    known = described(weight)
    return on_device(known, parts, (0, known.rows), dtype).view(known.shape)


def _rows_cpu(parts: Sequence[Tensor], weight: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    known = described(weight)
    wanted = rows.reshape(-1).tolist()
    _check_rows(known, wanted)
    return _written(known, parts, _ranges(wanted), [*rows.shape, known.columns], dtype)


def _rows_cuda(parts: Sequence[Tensor], weight: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    # Which rows is known to the device alone; asking would make the host wait.
    known = described(weight)
    picked = selected(known, parts, rows.reshape(-1))
    if picked is not None:
        some, packed = picked
        return on_device(some, packed, (0, some.rows), dtype).view(*rows.shape, known.columns)
    whole = on_device(known, parts, (0, known.rows), dtype).view(known.rows, known.columns)
    return torch.nn.functional.embedding(rows, whole)


def _check_rows(known: Description, wanted: list[int]) -> None:
    for row in wanted:
        if not 0 <= row < known.rows:
            raise IndexError(f"row {row} of a weight that has {known.rows}")


def _ranges(rows: list[int]) -> list[tuple[int, int]]:
    """Rows as ranges, those that follow each other as one."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges


def _dequantize_fake(parts: Sequence[Tensor], weight: str, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(described(weight).shape, dtype=dtype)


def _rows_fake(parts: Sequence[Tensor], weight: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty([*rows.shape, described(weight).columns], dtype=dtype)


def _rotate_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    # The matrix is symmetric: what goes back is turned the same way.
    return rotate(gradient, ctx.group), None


def _keep_group(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.group = inputs[1]


_library.impl("dequantize", _dequantize_cpu, "CPU")
_library.impl("dequantize", _dequantize_cuda, "CUDA")
_library.impl("dequantize_rows", _rows_cpu, "CPU")
_library.impl("dequantize_rows", _rows_cuda, "CUDA")
_library.impl("rotate", rotated, "CompositeExplicitAutograd")
torch.library.register_fake("weightstream::dequantize", _dequantize_fake, lib=_library)
torch.library.register_fake("weightstream::dequantize_rows", _rows_fake, lib=_library)
torch.library.register_fake("weightstream::rotate", lambda input, group: torch.empty_like(input), lib=_library)
torch.library.register_autograd("weightstream::rotate", _rotate_backward, setup_context=_keep_group, lib=_library)
