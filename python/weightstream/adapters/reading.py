"""Reads an adapter file against a model's layers: all of it fits, or the file is refused with every reason."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from torch import Tensor

from .. import _native
from ..errors import CheckpointError, WeightsError
from ..filetypes import name_of_dtype
from ..offload.renaming import preprocess
from ..offload.sources import read_source
from .layers import AdaptedLayer
from .pieces import Piece, read_pieces
from .state import LoadedAdapter

__all__ = ["ModelLayers", "read_adapter"]

_LARGEST_CONFIG = 1 << 20
"""Bytes of a configuration beside a file that are read."""
_AT_ONCE = 256 << 20
"""Bytes of factors that are looked at between two looks at whether loading is cancelled."""
_NAMED = 8
"""Reasons that an error lists."""
_ANOTHERS = re.compile(r"((second |third )?(transformer|text encoder)|autoencoder): \d+ keys not in this model")
"""How a plan sums up keys that are for another model of the pipeline: one file may have them all."""


class ModelLayers:
    """A model's layers as the native plan takes them."""

    def __init__(self, layers: Sequence[AdaptedLayer]) -> None:
        self.by_name = {layer.name: layer for layer in layers}
        self.described = [(layer.name, layer.described_kind, list(layer.shape), layer.has_bias) for layer in layers]


def read_adapter(
    source: Any,
    model: ModelLayers,
    *,
    component: Optional[str] = None,
    split: Optional[Mapping[str, Any]] = None,
    preprocess_sd: Any = None,
    ignore_variations: bool = False,
    progress: Any = None,
    poll: Callable[[], None] = lambda: None,
) -> LoadedAdapter:
    """One file's adapters for a model. WeightsError, with the keys and reasons, for a file that does not fit whole."""
    read = read_source(source, progress)
    tensors, _, _ = preprocess(preprocess_sd, read.sd, None, None)
    poll()
    described, scalars = _described(tensors)
    if not described:
        raise WeightsError("there are no tensors in it")
    plan = _native.AdapterPlan(
        model.described,
        described,
        scalars,
        read.metadata,
        config=_config_beside(read.files),
        split=None if split is None else json.dumps(split),
        component=component,
        ignore_variations=ignore_variations,
    )
    _check(plan, ignore_variations)
    _check_numbers(plan.applied(), tensors, poll)
    pieces: dict[str, list[Piece]] = {}
    for target in plan.targets():
        poll()
        layer = model.by_name[target.layer]
        refusal = layer.refusal(target.kind, target.axis)
        if refusal is not None:
            raise WeightsError(f"{layer.name}: {refusal}")
        pieces.setdefault(target.layer, []).extend(read_pieces(target, tensors, layer))
    absent = {key for _, keys in plan.absent() for key in keys}
    skipped = [(key, reason) for key, reason in plan.skipped() if key not in absent]
    left = [*(summary for summary, _ in plan.absent()), *_reasons(skipped)]
    return LoadedAdapter(read.name, pieces, [f"left out: {reason}" for reason in left], list(plan.notes()))


def _described(tensors: Mapping[str, Tensor]) -> tuple[list[tuple[str, str, list[int]]], dict[str, float]]:
    """Every tensor's type and shape, and the values of single numbers."""
    described = []
    scalars = {}
    for key, tensor in tensors.items():
        kind = name_of_dtype(tensor.dtype)
        if kind is None:
            raise WeightsError(f"{key} is {tensor.dtype}, which no adapter is made of")
        described.append((key, kind, list(tensor.shape)))
        if tensor.numel() == 1 and not tensor.is_complex():
            scalars[key] = float(tensor.reshape(()).double())
    return described, scalars


def _check_numbers(keys: Sequence[str], tensors: Mapping[str, Tensor], poll: Callable[[], None]) -> None:
    """WeightsError for what is NaN or infinite: one such factor makes all outputs of its layer so."""
    bad: list[str] = []
    batch: list[tuple[str, Tensor]] = []
    for number, key in enumerate(keys, 1):
        batch.append((key, tensors[key]))
        if number == len(keys) or sum(tensor.nbytes for _, tensor in batch) >= _AT_ONCE:
            poll()
            bad += _not_finite(batch)
            batch = []
    if bad:
        more = f"; and {len(bad) - _NAMED} more tensors" if len(bad) > _NAMED else ""
        raise WeightsError("; ".join(bad[:_NAMED]) + more + ". The file is damaged, or its training diverged")


def _not_finite(batch: Sequence[tuple[str, Tensor]]) -> list[str]:
    # What lies on a device or is a view is brought here first: only a caller's own tensors are.
    plain = [(key, tensor.detach().cpu().contiguous()) for key, tensor in batch]
    described = [(name_of_dtype(tensor.dtype) or "", tensor.data_ptr(), tensor.nbytes) for _, tensor in plain]
    return [
        f"{plain[number][0]}: element {element} of it is {'infinite' if infinite else 'NaN'}, and its layer's outputs would be"
        for number, element, infinite in _native.not_finite(described)
    ]


def _check(plan: Any, ignore_variations: bool) -> None:
    sentence = plan.checkpoint()
    if sentence is not None:
        raise WeightsError(sentence)
    refused = plan.refused()
    absent = [summary for summary, _ in plan.absent() if not ignore_variations and not _ANOTHERS.fullmatch(summary)]
    if refused or absent:
        reasons = [*_reasons(refused), *absent]
        more = f"; and {len(reasons) - _NAMED} more reasons" if len(reasons) > _NAMED else ""
        hint = "" if refused else ". ignore_model_variations=True leaves out what the model does not have"
        raise WeightsError("; ".join(reasons[:_NAMED]) + more + hint)
    if not plan.targets():
        raise WeightsError(f"nothing in it is for this model: {plan.report()}")


def _reasons(refused: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{key}: {reason}" for key, reason in refused]


def _config_beside(files: Sequence[str]) -> Optional[str]:
    """The text of PEFT's configuration beside a file, if it has one."""
    for file in files:
        path = os.path.join(os.path.dirname(os.path.abspath(file)), "adapter_config.json")
        try:
            with open(path, "rb") as opened:
                text = opened.read(_LARGEST_CONFIG + 1)
        except OSError:
            continue
        if len(text) > _LARGEST_CONFIG:
            raise CheckpointError(f"{path} is larger than {_LARGEST_CONFIG} bytes, which no adapter's configuration is")
        return text.decode("utf-8", "replace")
    return None
