"""Which models are quantized when a pipeline is set up, and the quantizer that does it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Callable

from torch import nn

from ..errors import NotAvailableError
from .parameters import Parameters

__all__ = ["models_to_quantize", "quantize_models"]


def models_to_quantize(parameters: Parameters, ids: Collection[str]) -> list[str]:
    """The ids of the models that are to be quantized, in the pipeline's order."""
    extra = parameters.extraModelsToQuantize or ()
    extra = [extra] if isinstance(extra, str) else extra
    return [name for name in ids if name in extra or (name == "transformer" and parameters.quantizeTransformer)]


def quantize_models(
    models: Mapping[str, nn.Module], names: Collection[str], parameters: Parameters, report: Callable[[str], Any]
) -> None:
    """Quantizes them where they are. NotAvailableError if this build has no quantizer."""
    if not names:
        return
    first = next(iter(names))
    what = (
        "quantizeTransformer" if first == "transformer" and parameters.quantizeTransformer else "extraModelsToQuantize"
    )
    raise NotAvailableError(
        f"{what}: {first} cannot be quantized on the fly yet; load it quantized, or give quantizeTransformer=False and no "
        f"extraModelsToQuantize"
    )
