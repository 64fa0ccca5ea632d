"""Products with INT8 and FP8 weights as they are: `torch._int_mm` and `torch._scaled_mm`.

They need inputs of the same type, so inputs are quantized first, each row by its largest number: the product then differs
from that with dequantized weights by up to half a step of the inputs. That is why `QuantLinear.native_products` is off
unless somebody sets it. Where shapes, types or the device do not allow it, None is given and weights are dequantized.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Optional

import torch
from torch import Tensor

from .description import described

__all__ = ["product"]

_FP8_MAX = 448.0


def product(layer: Any, input: Tensor, bias: Optional[Tensor]) -> Optional[Tensor]:
    """The layer's output for inputs in the type to compute in, or None."""
    known = described(layer.quant_text)
    scaled = known.scaled
    if scaled is None or scaled["scales"] not in ("Tensor", "Row") or scaled["zero_point"]:
        return None
    if scaled["global"] not in ("None", "Per127") or input.shape[-1] % 16 or layer.out_features % 16:
        return None
    if scaled["codes"] == "Int8":
        multiply = _int8
    elif scaled["codes"] == "E4m3" and _has_fp8(input.device):
        multiply = _fp8
    else:
        return None
    parts = known.typed(layer._quant_parts())
    flat = input.reshape(-1, input.shape[-1])
    if multiply is _int8 and not _has_int8(flat):
        return None
    scale = parts["Scale"].reshape(-1).float()
    if scaled["global"] == "Per127":
        scale = scale * (1.0 / 127.0)
    output = multiply(flat, parts["Data"], scale)
    if bias is not None:
        output = output + bias
    return output.to(input.dtype).view(*input.shape[:-1], layer.out_features)


def _has_int8(flat: Tensor) -> bool:
    if flat.is_cuda:
        return flat.shape[0] > 16  # cuBLAS takes no fewer rows
    return flat.device.type == "cpu" and _cpu_has_int8()


@lru_cache(maxsize=1)
def _cpu_has_int8() -> bool:
    """Whether this PyTorch multiplies INT8 on the CPU: not all that we run on do."""
    try:
        torch._int_mm(
            torch.zeros(32, 32, dtype=torch.int8, device="cpu"), torch.zeros(32, 32, dtype=torch.int8, device="cpu")
        )
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _rows_scaled(flat: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Rows divided by their steps, and the steps, in f32."""
    wide = flat.float()
    step = wide.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * most) / most
    return wide / step, step


def _int8(flat: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    numbers, step = _rows_scaled(flat, 127.0)
    sums = torch._int_mm(numbers.round().to(torch.int8), data.t())
    return sums.float() * step * scale


def _fp8(flat: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    numbers, step = _rows_scaled(flat, _FP8_MAX)
    one = torch.ones((), device=flat.device)
    sums = torch._scaled_mm(
        numbers.to(torch.float8_e4m3fn),
        data.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.float32,
        use_fast_accum=False,
    )
    return sums.float() * step * scale
