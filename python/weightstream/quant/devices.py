"""Numbers of a weight on a GPU: by our kernels, by PyTorch's own operators where there is none, at last by way of the CPU.

The last is said once a format, since packed bytes then go to the CPU in each forward, and numbers back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import _native
from ..errors import DeviceError, NotAvailableError
from .description import Description, described
from .expressions import expression
from .notes import note_once

__all__ = ["on_device", "prepare"]

_WRITTEN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@lru_cache(maxsize=None)
def _kernels(index: int) -> Any:
    """The kernels of one GPU, or None where it cannot be opened or this build has none."""
    kernels = getattr(_native, "DeviceKernels", None)
    if kernels is None:
        return None
    try:
        return kernels(index)
    except DeviceError as error:
        note_once(
            f"no kernels for the GPU {index}: {error}; PyTorch's operators and the CPU dequantize weights, more slowly"
        )
        return None


def prepare(weights: Iterable[tuple[str, torch.dtype]], device: torch.device) -> None:
    """Loads the kernels of weights, by description and type of numbers, which takes tenths of a second where the driver
    compiles them. What cannot be loaded is said by the forward that needs it."""
    wanted = sorted({(text, name) for text, dtype in weights if (name := _WRITTEN.get(dtype)) is not None})
    kernels = _kernels(device.index or 0) if wanted else None
    for text, name in wanted if kernels is not None else ():
        with contextlib.suppress(NotAvailableError, DeviceError):
            kernels.prepare(described(text).weight, name)


def on_device(known: Description, parts: Sequence[Tensor], rows: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows of a weight whose parts are on a GPU, as a flat tensor there."""
    parts = [part.contiguous() for part in parts]
    device = parts[0].device
    count = (rows[1] - rows[0]) * known.columns
    kernels = _kernels(device.index or 0) if dtype in _WRITTEN else None
    if kernels is not None:
        out = torch.empty(count, dtype=dtype, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
        try:
            kernels.dequantize(known.weight, known.addresses(parts), rows, out.data_ptr(), _WRITTEN[dtype], stream)
            return out
        except NotAvailableError:
            pass  # no kernel for this format
    numbers = expression(known, parts)
    if numbers is not None:
        columns = known.columns
        return numbers.reshape(-1)[rows[0] * columns : rows[1] * columns].to(dtype)
    note_once(
        f"{known.weight.format}: no kernel dequantizes this format on {device}; the CPU does it in each forward, which is slow"
    )
    host = [part.cpu() for part in parts]
    out = torch.empty(count, dtype=dtype if dtype in _WRITTEN else torch.float32, device="cpu")
    known.weight.dequantize(known.addresses(host), [rows], out.data_ptr(), out.nbytes, _WRITTEN[out.dtype])
    return out.to(device=device, dtype=dtype)
