"""Loading and saving models: from one file into a model in the time it takes to map it.

    from weightstream import offload

    model = offload.fast_load_transformers_model("model.safetensors")

Weights show the file's own pages. Nothing is patched, no default changes, and pickles run no code; see
`redirect_safetensors` for other libraries' loads.
"""

from __future__ import annotations

from ..errors import LoadingCancelled
from .extracting import extract_models
from .loading import fast_load_transformers_model, load_model_data, load_sd
from .progress import LoadingCallback, loading_context
from .qtypes import QuantizationType, qfloat8, qfloat8_e4m3fn, qfloat8_e5m2, qint2, qint4, qint8
from .quantizing import quantize
from .redirect import redirect_safetensors
from .saving import save_model

__all__ = [
    "LoadingCallback",
    "LoadingCancelled",
    "QuantizationType",
    "extract_models",
    "fast_load_transformers_model",
    "load_model_data",
    "load_sd",
    "loading_context",
    "qfloat8",
    "qfloat8_e4m3fn",
    "qfloat8_e5m2",
    "qint2",
    "qint4",
    "qint8",
    "quantize",
    "redirect_safetensors",
    "save_model",
]
