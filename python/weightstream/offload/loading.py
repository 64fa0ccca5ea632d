"""Loads weights: as a dictionary, into a model that has none yet, or into one built from the file's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn

from ..errors import LoadingCancelled, WeightsError
from ..startup.phases import phase
from .building import build
from .configuration import find_config
from .dtypes import DtypeRules
from .filling import Filling, fill
from .progress import progress_of
from .qtypes import QuantizationType, kind_of, qint8
from .renaming import Seen, filtered
from .sources import StateDict, as_list, merge, paths_of, read_sources

__all__ = ["fast_load_transformers_model", "load_model_data", "load_sd"]

Path = Union[str, "os.PathLike[str]"]
Map = Optional[dict[str, Any]]


@phase("offload.load_sd")
def load_sd(
    file_path: Any,
    filters: Union[str, Iterable[str], None] = None,
    keep_prefixes: bool = False,
    writable_tensors: bool = True,
    *,
    allow_trailing: bool = False,
) -> tuple[StateDict, Map, Map]:
    """Loads (weights, quantization map, map of tied weights); a map that the file does not have is None.

    file_path: a safetensors or GGUF file, an index of shards or one of the shards, a pickle, a folder, or a list of these.
    filters: prefixes of names; only these weights are kept, and without the prefix unless `keep_prefixes`.
    writable_tensors: False promises that the weights are not changed in place. Either way they show the file's pages and
        take no memory until they are written to, which never changes the file.
    allow_trailing: reads files with bytes behind their last tensor, which are an error otherwise. They are left unread, and a
        note counts them.

    Quantized blocks of GGUF files come as raw bytes, a row of blocks a row. `weights.report` says what was read and how
    many bytes had to be copied.
    """
    progress = progress_of(paths_of(as_list(file_path)))
    try:
        progress.phase("Reading Weights", 0, 3)
        sources = as_list(file_path)
        if not sources:
            raise WeightsError("no files were given to load weights from")
        filters = filters if isinstance(filters, (str, type(None))) else list(filters)
        names = Seen(filters)
        source = merge(read_sources(sources, progress, names.wanted, allow_trailing))
        sd = StateDict(filtered(source.sd, filters, keep_prefixes), source.report(), source.metadata)
        sd.report["notes"] += names.unmet(source.name, source.sd)
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
    *,
    allow_trailing: bool = False,
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
    allow_trailing: as for `load_sd`.
    """
    quantization = (kind_of(quantizationType), quantize_exclude) if do_quantize else None
    paths = paths_of([*as_list(file_path), *as_list(modules)])
    progress = progress_of(paths)
    try:
        fill(
            model,
            as_list(file_path),
            progress,
            Filling(
                preprocess_sd=preprocess_sd,
                fused_split_map=fused_split_map,
                modules=as_list(modules),
                shared=return_shared_modules,
                rules=DtypeRules(default_dtype, fp32_dtype),
                pin=_pin(pinToMemory, partialPinning),
                quantization=quantization,
                prefix=modelPrefix,
                postprocess_sd=postprocess_sd,
                writable=writable_tensors,
                ignore_unused=ignore_unused_weights,
                ignore_missing=ignore_missing_keys,
                pre_load_callback=pre_load_callback,
                allow_trailing=allow_trailing,
            ),
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
    *,
    allow_trailing: bool = False,
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
        config, where = find_config(paths_of(sources), forcedConfigPath, defaultConfigPath, allow_trailing)
        progress.phase("Building", 1, 2)
        model = build(config, where, modelClass, configKwargs, progress.poll)
        asked = Filling(
            preprocess_sd=preprocess_sd,
            fused_split_map=fused_split_map,
            modules=as_list(modules),
            shared=return_shared_modules,
            rules=DtypeRules(default_dtype, fp32_dtype),
            pin=_pin(pinToMemory, partialPinning),
            quantization=quantization,
            prefix=modelPrefix,
            writable=writable_tensors,
            ignore_unused=ignore_unused_weights,
            pre_load_callback=pre_load_callback,
            allow_trailing=allow_trailing,
        )
        fill(model, sources, progress, asked)
        model.requires_grad_(False)
        return model
    except LoadingCancelled as error:
        raise error.with_traceback(None) from None
    finally:
        progress.close()


def _pin(everything: bool, towers: bool) -> Optional[str]:
    return "towers" if towers and everything else "all" if everything else None
