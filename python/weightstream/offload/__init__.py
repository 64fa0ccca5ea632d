"""Loading and saving models, and running whole pipelines in less device memory than they take.

    from weightstream import offload, profile_type

    model = offload.fast_load_transformers_model("model.safetensors")
    offloadobj = offload.profile(pipe, profile_type.LowRAM_LowVRAM)

Weights show the file's own pages. Nothing is patched, no default changes, and pickles run no code; see
`redirect_safetensors` for other libraries' loads.
"""

from __future__ import annotations

from ..errors import LoadingCancelled
from .extracting import extract_models
from .loading import fast_load_transformers_model, load_model_data, load_sd
from .managed import OffloadObject
from .pipeline import all, profile  # noqa: A004
from .profiles import profile_type
from .progress import LoadingCallback, loading_context
from .redirect import redirect_safetensors
from .saving import save_model
from .unavailable import QuantizationType, qint8

__all__ = [
    "LoadingCallback",
    "LoadingCancelled",
    "OffloadObject",
    "QuantizationType",
    "all",
    "extract_models",
    "fast_load_transformers_model",
    "load_model_data",
    "load_sd",
    "loading_context",
    "profile",
    "profile_type",
    "qint8",
    "redirect_safetensors",
    "save_model",
]
