"""The types that weights can be quantized to, by the names that optimum-quanto gives them."""

from __future__ import annotations

from typing import Any

from ..errors import NotAvailableError

__all__ = ["QuantizationType", "kind_of", "qfloat8", "qfloat8_e4m3fn", "qfloat8_e5m2", "qint2", "qint4", "qint8"]


class QuantizationType:
    """Names a way to quantize weights."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


qint8 = QuantizationType("qint8")
"""Bytes with a sign, and a scale a row."""
qfloat8_e4m3fn = QuantizationType("qfloat8_e4m3fn")
"""FP8 with four bits of exponent, and a scale a row."""
qfloat8 = qfloat8_e4m3fn
"""The same."""
qfloat8_e5m2 = QuantizationType("qfloat8_e5m2")
"""FP8 with five bits of exponent, and a scale a row."""
qint4 = QuantizationType("qint4")
"""Numbers of 4 bits in groups of up to 128, each with a scale and a shift."""
qint2 = QuantizationType("qint2")
"""Numbers of 2 bits, likewise."""

_KNOWN = {kind.name: kind.name for kind in (qint8, qfloat8_e4m3fn, qfloat8_e5m2, qint4, qint2)}
_KNOWN["qfloat8"] = qfloat8.name


def kind_of(given: Any) -> str:
    """The name of a type: of one of these, of its name, or of any object that has one (optimum-quanto's do)."""
    name = given if isinstance(given, str) else getattr(given, "name", None)
    if isinstance(name, str) and name in _KNOWN:
        return _KNOWN[name]
    known = ", ".join(_KNOWN)
    raise NotAvailableError(f"quantizationType is {given!r}, and weights are quantized to {known}")
