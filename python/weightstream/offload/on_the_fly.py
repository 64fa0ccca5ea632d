"""Which models are quantized when a pipeline is set up, and doing it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from ..errors import NotAvailableError
from .parameters import Parameters

__all__ = ["check_quantizing", "models_to_quantize", "quantize_models"]


def models_to_quantize(parameters: Parameters, ids: Collection[str]) -> list[str]:
    """The ids of the models that are to be quantized, in the pipeline's order."""
    extra = parameters.extraModelsToQuantize or ()
    extra = [extra] if isinstance(extra, str) else extra
    return [name for name in ids if name in extra or (name == "transformer" and parameters.quantizeTransformer)]


def check_quantizing(names: Collection[str], parameters: Parameters) -> None:
    """NotAvailableError, naming the parameter that asks for it, if this build cannot quantize so."""
    if not names:
        return
    quantizer = _quantizer()
    if quantizer is not None:
        quantizer.kind_of(parameters.quantizationType)
        return
    first = next(iter(names))
    by_default = first == "transformer" and parameters.quantizeTransformer
    raise NotAvailableError(
        f"{'quantizeTransformer' if by_default else 'extraModelsToQuantize'}: {first} cannot be quantized on the fly yet; load it "
        f"quantized, or give quantizeTransformer=False and no extraModelsToQuantize"
    )


def quantize_models(
    models: Mapping[str, nn.Module], names: Collection[str], parameters: Parameters, report: Callable[[str], Any]
) -> None:
    """Quantizes them where they are. What is quantized already is left alone."""
    quantizer = _quantizer()
    for name in names:
        report(name)
        if quantizer is not None:
            quantizer.quantize(models[name], parameters.quantizationType, model_id=name)


def _quantizer() -> Any | None:
    try:
        return importlib.import_module(f"{__package__}.quantizing")
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.quantizing":
            raise
        return None
