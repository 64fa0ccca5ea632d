"""Writes a model as one safetensors file that needs nothing beside it: weights, ties and configuration.

Weights that share bytes are stored once; the metadata says under which other names they are known. The official library
reads the file, and so does everything built on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .. import _native
from ..errors import CheckpointError, LoadingCancelled, ModelError, NotAvailableError, WeightsError
from ..quant.module import QuantModule
from ..spans import is_wrapper
from .metadata import encoded, read_json
from .nearest import nearest
from .packed_layers import described_layers
from .progress import progress_of
from ..filetypes import name_of_dtype
from .qtypes import QuantizationType, qint8
from .quantizing import quantize

__all__ = ["save_model"]


def save_model(
    model: nn.Module,
    file_path: Union[str, os.PathLike[str]],
    do_quantize: bool = False,
    quantizationType: Union[QuantizationType, str, Any] = qint8,
    verboseLevel: int = -1,
    config_file_path: Union[str, os.PathLike[str], None] = None,
    filter_sd: Union[str, Iterable[str], None] = None,
    quantize_exclude: Optional[Iterable[str]] = None,
) -> None:
    """Saves a model's parameters and persistent buffers in one safetensors file.

    do_quantize: quantizes the model first, in place, to `quantizationType`, but for what `quantize_exclude` names: see `quantize`.

    config_file_path: a JSON file with the configuration to put into the file. Without it, that of a model loaded here, the
        model's own `config`, or config.json beside the file.
    filter_sd: names of weights or modules; only the weights of these modules are saved. WeightsError, with the model as it was, for a
        name that the model has not, and if none of them has weights.

    The file appears whole or not at all, under this very name: what was there is replaced, a symbolic link too, and what a
    link led to is left as it is. An attached model is saved from its host bytes.
    """
    path = os.fsdecode(file_path)
    chosen = None if filter_sd is None else _chosen(model, filter_sd)
    if do_quantize:
        quantize(model, quantizationType, quantize_exclude, path)
    progress = progress_of([path])
    try:
        progress.alone("Saving")
        described = described_layers(model)
        kept, ties = _weights({**model.state_dict(), **described.markers}, chosen)
        config = _config(model, path, config_file_path)
        maps = encoded(config=config, tied_weights_map=ties, quantization_map=described.quantization_map)
        metadata = {"format": "pt", **described.metadata, **maps}
        described.check(kept, ties, metadata)
        if chosen is not None and not kept:
            raise WeightsError(f"{type(model).__name__} has no weights of the modules that filter_sd names")
        total = sum(tensor.nbytes for tensor in kept.values())
        rows = [_row(name, tensor) for name, tensor in kept.items()]
        # Of an attached model too: its host bytes may lie in the file it was loaded from.
        _native.check_mapped([(name, address, size) for name, _, _, address, size in rows])
        _native.save(path, rows, metadata, lambda done: progress.poll(done / max(total, 1)))
    except LoadingCancelled as error:
        raise error.with_traceback(None) from None
    finally:
        progress.close()


def _row(name: str, tensor: Tensor) -> tuple[str, str, list[int], int, int]:
    kind = name_of_dtype(tensor.dtype)
    if kind is None:
        raise CheckpointError(f"{name} is {tensor.dtype}, a type that safetensors files cannot hold")
    shape = list(tensor.shape)
    if kind == "F4":
        shape[-1] *= 2
    return name, kind, shape, tensor.data_ptr(), tensor.nbytes


def _chosen(model: nn.Module, filter_sd: Union[str, Iterable[str]]) -> tuple[str, ...]:
    """The modules whose weights shall be saved. WeightsError for a name that is neither a module's nor a weight's."""
    names = [filter_sd] if isinstance(filter_sd, str) else list(filter_sd)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    weights = {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights.update(name for name, _ in model.named_parameters(remove_duplicate=False))
    weights.update(f"{module}.weight" for module in modules if isinstance(model.get_submodule(module), QuantModule))
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise WeightsError(f"filter_sd has {odd!r}, which is no text: give names of modules or weights")
    unknown = [name for name in names if name not in weights and name.rstrip(".") not in modules]
    if unknown:
        known = weights | modules - {""}
        asked = "; ".join(f"{name!r}{nearest(name, known).replace(';', ',')}" for name in unknown)
        raise WeightsError(
            f"filter_sd names {len(unknown)} of {len(names)} that {type(model).__name__} has neither as a module nor as a weight: {asked}"
        )
    return tuple({(name.rpartition(".")[0] if name in weights else name.rstrip(".")) for name in names})


def _weights(
    state: Mapping[str, Any], chosen: Optional[tuple[str, ...]]
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """What to store, contiguous and in CPU memory, and the other names of what is stored once."""
    kept: dict[str, Tensor] = {}
    ties: dict[str, list[str]] = {}
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue  # extra state that a module keeps beside its tensors
        module = name.rpartition(".")[0]
        if chosen is not None and not any(module == base or module.startswith(base + ".") for base in chosen):
            continue
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device: load its weights before saving")
        if is_wrapper(tensor) or tensor.is_quantized or tensor.layout != torch.strided:
            raise NotAvailableError(f"{name} is a {type(tensor).__name__}; only plain tensors can be saved yet")
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            ties.setdefault(first[key], []).append(name)
            continue
        first[key] = name
        kept[name] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        blocks = getattr(tensor, "_weightstream_blocks", None)
        if blocks is not None:
            kept[name]._weightstream_blocks = blocks
    return kept, ties


def _config(model: nn.Module, path: str, given: Union[str, os.PathLike[str], None]) -> Optional[dict[str, Any]]:
    if given is not None:
        return read_json(os.fspath(given))
    config = getattr(model, "_config", None)
    if isinstance(config, Mapping) and config:
        return dict(config)
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):  # transformers
        found = dict(config.to_dict())
        found["architectures"] = found.get("architectures") or [type(model).__name__]
        return found
    if isinstance(config, Mapping) and config and getattr(model, "config_name", None):  # diffusers
        return {"_class_name": type(model).__name__, **config}
    beside = os.path.join(os.path.dirname(path), "config.json")
    return read_json(beside) if os.path.isfile(beside) else None
