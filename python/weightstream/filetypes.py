"""How the file formats spell PyTorch's types."""

from __future__ import annotations

from typing import Optional

import torch

__all__ = ["NAMES", "dtype_of_name", "name_of_dtype"]

NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
"""How the file formats spell PyTorch's types."""
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in NAMES.items() if hasattr(torch, dtype)
}
_SPELLED = {dtype: name for name, dtype in _DTYPES.items()}


def name_of_dtype(dtype: torch.dtype) -> Optional[str]:
    """How files spell a type, or None if they cannot hold it."""
    return _SPELLED.get(dtype)


def dtype_of_name(kind: str) -> Optional[torch.dtype]:
    """The type that files spell so, or None if PyTorch has none."""
    return _DTYPES.get(kind)
