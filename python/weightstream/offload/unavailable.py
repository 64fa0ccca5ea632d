"""What of quantization has its names and parameters already and is refused when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from ..errors import NotAvailableError

__all__ = ["QuantizationType", "qint8", "refuse_quantized", "refuse_quantizing"]

_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)
_ENDINGS = (
    "._data",
    ".scale_weight",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".comfy_quant",
    ".qweight",
    ".wscales",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight_s_rel",
)
"""What the names of quantized weights and of their scales end in, format by format."""


class QuantizationType:
    """Names a way to quantize weights."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


qint8 = QuantizationType("qint8")
"""Eight-bit integers with a scale a row."""


def refuse_quantizing(do_quantize: Any) -> None:
    """NotAvailableError if weights shall be quantized."""
    if do_quantize:
        raise NotAvailableError(
            "do_quantize=True: weights cannot be quantized yet; load or save them as they are, with do_quantize=False"
        )


def refuse_quantized(
    source: str,
    sd: Mapping[str, Tensor],
    quantization_map: Optional[Mapping[str, Any]],
    expected: Mapping[str, Tensor],
) -> None:
    """NotAvailableError if the weights are quantized: as plain numbers they would be wrong and raise nothing.

    What the model itself calls so, and has in that type, is `expected`: its own code knows what it means.
    """
    if quantization_map:
        module, kind = next(iter(quantization_map.items()))
        kind = kind.get("weights", kind) if isinstance(kind, Mapping) else kind
        raise _unavailable(source, f"its map says that {module} is {kind}, of {len(quantization_map)} modules")
    for name, tensor in sd.items():
        named = name.endswith(_ENDINGS) or name.rpartition(".")[2] == "scaled_fp8"
        typed = tensor.dtype in _FLOAT8
        if (named and name not in expected) or (
            typed and (name not in expected or expected[name].dtype != tensor.dtype)
        ):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise _unavailable(source, f"{name} is {dtype} with shape {list(tensor.shape)}")


def _unavailable(source: str, why: str) -> NotAvailableError:
    return NotAvailableError(
        f"{source} is quantized and quantized weights cannot be loaded into models yet: {why}; load_sd gives the raw tensors"
    )
