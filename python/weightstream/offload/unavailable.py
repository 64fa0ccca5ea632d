"""What of quantization has its names and parameters already and is refused when it is used."""

from __future__ import annotations

from typing import Any

from ..errors import NotAvailableError

__all__ = ["QuantizationType", "qint8", "refuse_quantizing"]


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
