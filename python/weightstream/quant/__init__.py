"""Layers whose weights stay packed as their file has them, and are dequantized in each forward.

    from weightstream import offload
    from weightstream.quant import QuantLinear

    model = offload.fast_load_transformers_model("model-Q4_K_M.gguf")   # its layers are QuantLinear and QuantEmbedding

`attach` streams the packed bytes. `layer.weight` gives the numbers to code that looks at them.
"""

from __future__ import annotations

from .._native import QuantWeight
from .layers import QuantConv1d, QuantConv2d, QuantConv3d, QuantEmbedding, QuantLinear
from .module import QuantModule
from .notes import QuantizationNote
from .ops import dequantize

__all__ = [
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantEmbedding",
    "QuantLinear",
    "QuantModule",
    "QuantWeight",
    "QuantizationNote",
    "dequantize",
]
