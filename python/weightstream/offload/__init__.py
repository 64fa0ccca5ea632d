"""Loading and saving models, and running whole pipelines in less device memory than they take.

    from weightstream import offload, profile_type

    model = offload.fast_load_transformers_model("model.safetensors")
    offloadobj = offload.profile(pipe, profile_type.LowRAM_LowVRAM)

Weights show the file's own pages. Nothing is patched, no default changes, and pickles run no code; see
`redirect_safetensors` for other libraries' loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import LoadingCancelled
from .extracting import extract_models
from .loading import fast_load_transformers_model, load_model_data, load_sd
from .profiles import profile_type
from .progress import LoadingCallback, loading_context
from .qtypes import QuantizationType, qfloat8, qfloat8_e4m3fn, qfloat8_e5m2, qint2, qint4, qint8
from .quantizing import quantize
from .redirect import redirect_safetensors
from .saving import save_model

if TYPE_CHECKING:
    from .loras import (
        activate_loras,
        load_loras_into_model,
        set_step_no_for_lora,
        sync_models_loras,
        unload_loras_from_model,
    )
    from .managed import OffloadObject
    from .pipeline import all, profile  # noqa: A004

__all__ = [
    "LoadingCallback",
    "LoadingCancelled",
    "OffloadObject",
    "QuantizationType",
    "activate_loras",
    "all",
    "extract_models",
    "fast_load_transformers_model",
    "load_loras_into_model",
    "load_model_data",
    "load_sd",
    "loading_context",
    "profile",
    "profile_type",
    "qfloat8",
    "qfloat8_e4m3fn",
    "qfloat8_e5m2",
    "qint2",
    "qint4",
    "qint8",
    "quantize",
    "redirect_safetensors",
    "save_model",
    "set_step_no_for_lora",
    "sync_models_loras",
    "unload_loras_from_model",
]

_LATER = {
    "OffloadObject": "managed",
    "activate_loras": "loras",
    "all": "pipeline",
    "load_loras_into_model": "loras",
    "profile": "pipeline",
    "set_step_no_for_lora": "loras",
    "sync_models_loras": "loras",
    "unload_loras_from_model": "loras",
}
"""Names, and the modules that they are imported from when they are first used: those attach models, which loading needs not."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found
    return found
