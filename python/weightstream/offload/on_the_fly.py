"""Which models are quantized when a pipeline is set up, and doing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from .choosing import is_quantized
from .parameters import Parameters
from .qtypes import kind_of
from .quantizing import quantize, refuse_adapted

__all__ = ["check_quantizing", "models_to_quantize", "quantize_models"]


def models_to_quantize(parameters: Parameters, ids: Collection[str]) -> list[str]:
    """The ids of the models that are to be quantized, in the pipeline's order."""
    extra = parameters.extraModelsToQuantize or ()
    extra = [extra] if isinstance(extra, str) else extra
    return [name for name in ids if name in extra or (name == "transformer" and parameters.quantizeTransformer)]


def check_quantizing(names: Collection[str], parameters: Parameters, models: Mapping[str, nn.Module]) -> None:
    """NotAvailableError if there is something to quantize, to a type that there is not; StateError if it has LoRAs."""
    if names:
        kind_of(parameters.quantizationType)
    for name in names:
        if not is_quantized(models[name]):
            refuse_adapted(models[name], name)


def quantize_models(
    models: Mapping[str, nn.Module],
    names: Collection[str],
    parameters: Parameters,
    left_out: Mapping[str, list[str]],
    report: Callable[[str], Any],
) -> None:
    """Quantizes them where they are, without the modules `left_out`. What is quantized already is left alone."""
    for name in names:
        report(name)
        quantize(models[name], parameters.quantizationType, left_out[name] or None, model_id=name)
