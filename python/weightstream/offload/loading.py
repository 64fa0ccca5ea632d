"""Loads weights: as a dictionary, into a model that has none yet, or into one built from the file's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..checks import MARK
from ..errors import LoadingCancelled, StateError, WeightsError
from ..quant_router.foreign import split_foreign
from ..quant_router.merging import Foreign
from ..startup.phases import phase
from .applying import apply, expected_names
from .building import build
from .configuration import find_config
from .dtypes import DtypeRules
from .fused import split_fused
from .gguf_names import fitted, transformers_names
from .packed_layers import described_layers
from .progress import Progress, progress_of
from .qtypes import QuantizationType, kind_of, qint8
from .quantized import Entry, gather, leftover, recognise
from .renaming import chosen, filtered, guessed_prefix, preprocess, without_prefix
from .sources import Source, StateDict, as_list, merge, paths_of, read_source, read_sources

__all__ = ["fast_load_transformers_model", "load_model_data", "load_sd"]

Path = Union[str, "os.PathLike[str]"]
Map = Optional[dict[str, Any]]


@phase("offload.load_sd")
def load_sd(
    file_path: Any,
    filters: Union[str, Iterable[str], None] = None,
    keep_prefixes: bool = False,
    writable_tensors: bool = True,
) -> tuple[StateDict, Map, Map]:
    """Loads (weights, quantization map, map of tied weights); a map that the file does not have is None.

    file_path: a safetensors or GGUF file, an index of shards or one of the shards, a pickle, a folder, or a list of these.
    filters: prefixes of names; only these weights are kept, and without the prefix unless `keep_prefixes`.
    writable_tensors: False promises that the weights are not changed in place. Either way they show the file's pages and
        take no memory until they are written to, which never changes the file.

    Quantized blocks of GGUF files come as raw bytes, a row of blocks a row. `weights.report` says what was read and how
    many bytes had to be copied.
    """
    progress = progress_of(paths_of(as_list(file_path)))
    try:
        source = _read(as_list(file_path), progress, chosen(filters))
        sd = StateDict(filtered(source.sd, filters, keep_prefixes), source.report(), source.metadata)
        if filters is not None and not sd:
            sd.report["notes"].append(f"{source.name} has no weight whose name begins with {filters!r}")
        progress.phase("Weights Loaded", 3, 3)
        return sd, source.quantization_map, source.tied_map
    except LoadingCancelled as error:
        raise error.with_traceback(None) from None
    finally:
        progress.close()


@phase("offload.load_model_data")
def load_model_data(
    model: nn.Module,
    file_path: Any,
    do_quantize: bool = False,
    quantizationType: Union[QuantizationType, str, Any] = qint8,
    pinToMemory: bool = False,
    partialPinning: bool = False,
    modelPrefix: Optional[str] = None,
    writable_tensors: bool = True,
    preprocess_sd: Union[Callable[..., Any], Mapping[str, Optional[str]], None] = None,
    postprocess_sd: Optional[Callable[..., Any]] = None,
    fused_split_map: Optional[Mapping[str, Any]] = None,
    modules: Any = None,
    return_shared_modules: Optional[dict[str, Any]] = None,
    default_dtype: Optional[torch.dtype] = torch.bfloat16,
    ignore_unused_weights: bool = False,
    verboseLevel: int = -1,
    ignore_missing_keys: bool = False,
    quantize_exclude: Optional[Iterable[str]] = None,
    pre_load_callback: Optional[Callable[[nn.Module], Any]] = None,
    fp32_dtype: Optional[torch.dtype] = None,
) -> None:
    """Puts the weights of files into `model`, whose parameters may be on the meta device. All of it happens or none.

    file_path: what `load_sd` takes, or a dictionary of tensors, or a tuple (weights, quantization map, tied map).
    modelPrefix: keep only the weights of this submodule of the checkpoint, by their names in it.
    preprocess_sd: rules {"old prefix": "new prefix"; "" strips, None drops}, or a function of the weights, of them and the
        quantization map, or of both and the tied map, which returns what it takes. Called for each source.
    postprocess_sd: the same as a function, of all weights together.
    fused_split_map: {"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": [n, n, n]}}.
    modules: more sources. `return_shared_modules` is filled with what came from them; given as `modules` of another load,
        that model gets the same parameters.
    default_dtype: of floating-point parameters; None keeps the file's, and `fp32_dtype` then converts only float32 ones.
        `_lock_dtype` on a module or parameter counts before both. Buffers keep their types.
    do_quantize: quantizes linear layers and embeddings to `quantizationType` as they are loaded, but for what `quantize_exclude`
        names: see `quantize`. A model that is quantized already stays as it is.
    pinToMemory, partialPinning: that the weights (with partialPinning: the towers') shall be page-locked. They are when
        the model is attached; nothing is locked before.
    pre_load_callback: called with the model before the weights are assigned.
    """
    quantization = (kind_of(quantizationType), quantize_exclude) if do_quantize else None
    paths = paths_of([*as_list(file_path), *as_list(modules)])
    progress = progress_of(paths)
    try:
        _load(
            model,
            as_list(file_path),
            progress,
            prefix=modelPrefix,
            writable=writable_tensors,
            preprocess_sd=preprocess_sd,
            postprocess_sd=postprocess_sd,
            fused_split_map=fused_split_map,
            modules=modules,
            shared=return_shared_modules,
            rules=DtypeRules(default_dtype, fp32_dtype),
            ignore_unused=ignore_unused_weights,
            ignore_missing=ignore_missing_keys,
            pre_load_callback=pre_load_callback,
            pin=_pin(pinToMemory, partialPinning),
            quantization=quantization,
        )
    except LoadingCancelled as error:
        # Without its traceback, whose frames would hold what was read for as long as the exception is kept.
        raise error.with_traceback(None) from None
    finally:
        progress.close()


@phase("offload.fast_load")
def fast_load_transformers_model(
    model_path: Any,
    do_quantize: bool = False,
    quantizationType: Union[QuantizationType, str, Any] = qint8,
    pinToMemory: bool = False,
    partialPinning: bool = False,
    forcedConfigPath: Any = None,
    defaultConfigPath: Any = None,
    modelClass: Any = None,
    modelPrefix: Optional[str] = None,
    writable_tensors: bool = True,
    verboseLevel: int = -1,
    preprocess_sd: Union[Callable[..., Any], Mapping[str, Optional[str]], None] = None,
    fused_split_map: Optional[Mapping[str, Any]] = None,
    modules: Any = None,
    return_shared_modules: Optional[dict[str, Any]] = None,
    default_dtype: Optional[torch.dtype] = torch.bfloat16,
    ignore_unused_weights: bool = False,
    configKwargs: Mapping[str, Any] = {},
    quantize_exclude: Optional[Iterable[str]] = None,
    pre_load_callback: Optional[Callable[[nn.Module], Any]] = None,
    fp32_dtype: Optional[torch.dtype] = None,
) -> nn.Module:
    """Builds a model of transformers or diffusers with no data and puts the weights of its files into it.

    The configuration is that in the files' metadata, else `forcedConfigPath`, else `defaultConfigPath`, else config.json
    beside the last file; `configKwargs` replaces entries of it. `modelClass` forces the class. The model is in eval mode
    and its parameters do not require grad. Everything else is as for `load_model_data`.
    """
    quantization = (kind_of(quantizationType), quantize_exclude) if do_quantize else None
    sources = as_list(model_path)
    progress = progress_of(paths_of([*sources, *as_list(modules)]))
    try:
        progress.phase("Reading Configuration", 0, 2)
        config, where = find_config(paths_of(sources), forcedConfigPath, defaultConfigPath)
        progress.phase("Building", 1, 2)
        model = build(config, where, modelClass, configKwargs, progress.poll)
        _load(
            model,
            sources,
            progress,
            prefix=modelPrefix,
            writable=writable_tensors,
            preprocess_sd=preprocess_sd,
            postprocess_sd=None,
            fused_split_map=fused_split_map,
            modules=modules,
            shared=return_shared_modules,
            rules=DtypeRules(default_dtype, fp32_dtype),
            ignore_unused=ignore_unused_weights,
            ignore_missing=False,
            pre_load_callback=pre_load_callback,
            pin=_pin(pinToMemory, partialPinning),
            quantization=quantization,
        )
        model.requires_grad_(False)
        return model
    except LoadingCancelled as error:
        raise error.with_traceback(None) from None
    finally:
        progress.close()


def _read(sources: list[Any], progress: Progress, wanted: Optional[Callable[[str], bool]]) -> Source:
    progress.phase("Reading Weights", 0, 3)
    if not sources:
        raise WeightsError("no files were given to load weights from")
    return merge(read_sources(sources, progress, wanted))


def _load(
    model: nn.Module,
    sources: list[Any],
    progress: Progress,
    *,
    prefix: Optional[str],
    writable: bool,
    preprocess_sd: Any,
    postprocess_sd: Any,
    fused_split_map: Optional[Mapping[str, Any]],
    modules: Any,
    shared: Optional[dict[str, Any]],
    rules: DtypeRules,
    ignore_unused: bool,
    ignore_missing: bool,
    pre_load_callback: Optional[Callable[[nn.Module], Any]],
    pin: Optional[str],
    quantization: Optional[tuple[Any, Any]],
) -> None:
    """What both loading functions do once there is a model."""
    if any(MARK in module.__dict__ for module in model.modules()):
        raise StateError(f"this {type(model).__name__} is attached; detach it before loading other weights into it")
    progress.phase("Reading Weights", 0, 3)
    main = read_sources(sources, progress)
    extra = [
        _shared_source(source) if _is_shared(source) else read_source(source, progress) for source in as_list(modules)
    ]
    if not main and not extra:
        raise WeightsError("no files were given to load weights from")
    progress.phase("Preparing Weights", 1, 3)
    for source in [*main, *extra]:
        progress.poll()
        recognise(source, rules.default)
    for source in [*main, *(one for one, given in zip(extra, as_list(modules)) if not _is_shared(given))]:
        progress.poll()
        source.sd, source.quantization_map, source.tied_map = preprocess(
            preprocess_sd, source.sd, source.quantization_map, source.tied_map
        )
    storages = {tensor.untyped_storage().data_ptr() for source in extra for tensor in source.sd.values()} - {0}
    merged = merge([*main, *extra])
    sd, foreign = _prepared(model, merged, prefix, postprocess_sd, fused_split_map)
    report = merged.report()
    from_extra = [name for name, entry in sd.items() if _storage_of(entry) in storages]
    for source in [*main, *extra, merged]:
        source.sd, source.packed, source.foreign = {}, [], {}
    progress.phase("Applying Weights", 2, 3)
    if pre_load_callback is not None:
        pre_load_callback(model)
    report["notes"] += apply(
        model,
        merged.name,
        sd,
        rules,
        foreign=foreign,
        ignore_unused=ignore_unused,
        ignore_missing=ignore_missing,
        progress=progress,
        quantization=quantization,
    )
    quantization_map = described_layers(model).quantization_map
    if quantization_map:
        model._quanto_map = quantization_map
    if shared is not None:
        _share(model, from_extra, shared)
    model._weightstream_load = {**report, "writable_tensors": writable, "pin": pin}


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


def _prepared(
    model: nn.Module,
    source: Source,
    prefix: Optional[str],
    postprocess_sd: Optional[Callable[..., Any]],
    fused_split_map: Optional[Mapping[str, Any]],
) -> tuple[dict[str, Entry], dict[str, Foreign]]:
    """The weights under the model's names, and the modules of an application's own formats."""
    sd = dict(source.sd)
    for kept, aliases in (source.tied_map or {}).items():
        if kept in sd:
            for alias in aliases:
                sd.setdefault(alias, sd[kept])
    sd, quantization_map, _ = preprocess(postprocess_sd, sd, source.quantization_map, None, "postprocess_sd")
    entries, foreign = gather(sd, source)
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
        entries = split_fused(entries, fused_split_map, shapes)
    foreign = split_foreign(foreign, fused_split_map, {name for name, _ in model.named_modules()})
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


def _pin(everything: bool, towers: bool) -> Optional[str]:
    return "towers" if towers and everything else "all" if everything else None
