"""Fills a model with weights: everything that happens between their sources and `applying`, for all loading functions alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..checks import MARK
from ..errors import StateError, WeightsError
from ..quant_router.foreign import split_foreign
from ..quant_router.merging import Foreign
from .applying import apply, expected_names
from .dtypes import DtypeRules
from .fused import split_fused
from .gguf_names import fitted, transformers_names
from .packed_layers import described_layers
from .progress import Progress
from .quantized import Entry, gather, leftover, recognise
from .renaming import guessed_prefix, preprocess, without_prefix
from .sources import Source, merge, read_source, read_sources

__all__ = ["Filling", "fill"]


@dataclass(frozen=True)
class Filling:
    """How weights are put into a model: what the loading functions were asked."""

    preprocess_sd: Any
    fused_split_map: Optional[Mapping[str, Any]]
    modules: list[Any]
    """More sources."""
    shared: Optional[dict[str, Any]]
    """Filled with what comes from `modules`."""
    rules: DtypeRules
    pin: Optional[str]
    """What shall be page-locked: "towers", "all" or nothing."""
    quantization: Optional[tuple[Any, Any]]
    """The type that layers are quantized to, and what is left out."""
    prefix: Optional[str] = None
    postprocess_sd: Optional[Callable[..., Any]] = None
    writable: bool = True
    ignore_unused: bool = False
    ignore_missing: bool = False
    pre_load_callback: Optional[Callable[[nn.Module], Any]] = None
    allow_trailing: bool = False


def fill(model: nn.Module, sources: list[Any], progress: Progress, asked: Filling) -> None:
    """What both loading functions do once there is a model."""
    if any(MARK in module.__dict__ for module in model.modules()):
        raise StateError(f"this {type(model).__name__} is attached; detach it before loading other weights into it")
    progress.phase("Reading Weights", 0, 3)
    main = read_sources(sources, progress, None, asked.allow_trailing)
    extra = [
        _shared_source(source)
        if _is_shared(source)
        else read_source(source, progress, allow_trailing=asked.allow_trailing)
        for source in asked.modules
    ]
    if not main and not extra:
        raise WeightsError("no files were given to load weights from")
    _check_layouts([*main, *extra])
    progress.phase("Preparing Weights", 1, 3)
    for source in [*main, *extra]:
        progress.poll()
        recognise(source, asked.rules.default)
    for source in [*main, *(one for one, given in zip(extra, asked.modules) if not _is_shared(given))]:
        progress.poll()
        source.sd, source.quantization_map, source.tied_map = preprocess(
            asked.preprocess_sd, source.sd, source.quantization_map, source.tied_map
        )
    storages = {tensor.untyped_storage().data_ptr() for source in extra for tensor in source.sd.values()} - {0}
    merged = merge([*main, *extra])
    sd, foreign = _prepared(model, merged, asked)
    report = merged.report()
    from_extra = [name for name, entry in sd.items() if _storage_of(entry) in storages]
    for source in [*main, *extra, merged]:
        source.sd, source.packed, source.foreign = {}, [], {}
    progress.phase("Applying Weights", 2, 3)
    if asked.pre_load_callback is not None:
        asked.pre_load_callback(model)
    report["notes"] += apply(
        model,
        merged.name,
        sd,
        asked.rules,
        foreign=foreign,
        ignore_unused=asked.ignore_unused,
        ignore_missing=asked.ignore_missing,
        progress=progress,
        quantization=asked.quantization,
    )
    quantization_map = described_layers(model).quantization_map
    if quantization_map:
        model._quanto_map = quantization_map
    if asked.shared is not None:
        _share(model, from_extra, asked.shared)
    model._weightstream_load = {**report, "writable_tensors": asked.writable, "pin": asked.pin}


def _check_layouts(sources: list[Source]) -> None:
    """Refuses tensors whose bytes no parameter could show."""
    for source in sources:
        for name, tensor in source.sd.items():
            if tensor.layout != torch.strided or tensor.is_quantized:
                what = "one of PyTorch's own quantized types" if tensor.is_quantized else str(tensor.layout)
                raise WeightsError(f"{name} of {source.name} is {what}, and models are filled with dense tensors only")


def _share(model: nn.Module, names: list[str], shared: dict[str, Any]) -> None:
    """Fills `shared` with what came from `modules`, for another model: parameters, and packed tensors with their types."""
    layers = described_layers(model)
    present = expected_names(model)
    state: dict[str, Tensor] = {}
    kinds: dict[str, Any] = {}
    parameters: dict[str, Tensor] = {}
    for name in names:
        module = name.rpartition(".")[0]
        if module in layers.layers and name == f"{module}.weight":
            state.update({f"{module}.{part}": tensor for part, tensor in layers.layers[module].quant_parts().items()})
            state.update({f"{module}.{hint}": tensor for hint, tensor in layers.layers[module].quant_hints.items()})
            kinds.update({key: kind for key, kind in layers.quantization_map.items() if key == module})
        elif name in present:
            state[name], parameters[name] = present[name].detach(), present[name]
    shared.update(state_dict=state, quantization_map=kinds, parameters=parameters)


def _prepared(model: nn.Module, source: Source, asked: Filling) -> tuple[dict[str, Entry], dict[str, Foreign]]:
    """The weights under the model's names, and the modules of an application's own formats."""
    sd = dict(source.sd)
    for kept, aliases in (source.tied_map or {}).items():
        if kept in sd:
            for alias in aliases:
                sd.setdefault(alias, sd[kept])
    sd, quantization_map, _ = preprocess(asked.postprocess_sd, sd, source.quantization_map, None, "postprocess_sd")
    entries, foreign = gather(sd, source)
    prefix, fused = asked.prefix, asked.fused_split_map
    if prefix:
        entries, foreign = without_prefix(entries, prefix), without_prefix(foreign, prefix)
        quantization_map = without_prefix(quantization_map or {}, prefix)
        if not entries and not foreign:
            raise WeightsError(f"{source.name} has no weights below {prefix!r}, the modelPrefix")
    expected = expected_names(model)
    entries = transformers_names(entries, source.metadata, expected)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for _ in range(2):  # before fused weights are split, and behind
        guess = guessed_prefix({*entries, *(f"{name}.weight" for name in foreign)}, expected)
        if guess is not None:
            entries, foreign = without_prefix(entries, guess), without_prefix(foreign, guess)
            quantization_map = without_prefix(quantization_map or {}, guess)
        entries = leftover(entries, expected, quantization_map, source.metadata if source.unclear else None)
        entries = split_fused(entries, fused, shapes)
    foreign = split_foreign(foreign, fused, {name for name, _ in model.named_modules()})
    fitted(entries, source.metadata, expected, source.notes)
    return entries, foreign


def _storage_of(entry: Entry) -> int:
    tensor = entry if isinstance(entry, Tensor) else next(iter(entry.parts.values()))
    return tensor.untyped_storage().data_ptr()


def _is_shared(source: Any) -> bool:
    """Whether it is what another load filled `return_shared_modules` with."""
    return isinstance(source, Mapping) and set(source) == {"state_dict", "quantization_map", "parameters"}


def _shared_source(source: Mapping[str, Any]) -> Source:
    weights = {**source["state_dict"], **source["parameters"]}
    return Source("the shared modules", weights, source["quantization_map"] or None)
