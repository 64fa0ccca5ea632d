"""Questions about files: which weights are quantized, and how. No tensor data is read for the answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional

from torch import Tensor

from .. import _native
from .._native import Checkpoint, QuantWeight
from ..quant.finding import header_of, metadata_of, reader_of
from .calling import call
from .registry import registered, replaced

__all__ = ["detect", "detect_quantization_kind_for_file", "detect_quantization_label_from_filename"]


def detect(
    source: Any, metadata: Optional[Mapping[str, str]] = None, *, allow_trailing: bool = False
) -> dict[str, QuantWeight]:
    """The quantized weights of built-in formats in a file, or in a dictionary of tensors, by name.

    Of a file the header is read, and small tensors that describe others. QuantizationError, naming the layer, for what is
    not understood. `allow_trailing`: also of a file with bytes behind its last tensor.
    """
    if isinstance(source, Mapping):
        tensors: dict[str, Tensor] = dict(source)
        rows, read, texts = header_of(tensors), reader_of(tensors), metadata_of(metadata, None)
    else:
        opened = Checkpoint.open([os.fspath(source)], allow_trailing=allow_trailing)
        rows = [(name, kind, list(shape)) for name, kind, shape, *_ in opened.entries()]
        sizes = {name: nbytes for name, _, _, _, _, nbytes in opened.entries()}
        texts = dict(metadata or {})
        for one in opened.metadata():
            texts.update(one)

        def read(name: str) -> bytes:
            import torch

            target = torch.empty(sizes[name], dtype=torch.uint8, device="cpu")
            opened.read([(name, target.data_ptr(), target.nbytes)])
            return bytes(target.tolist())

    weights, _, _ = _native.quant_detect(rows, texts, read, replaced())
    return {weight.name: weight for weight, _ in weights}


def detect_quantization_kind_for_file(
    path: Any, verboseLevel: int = -1, *, allow_trailing: bool = False
) -> Optional[str]:
    """How a file is quantized, in a word: an application's handlers first, then the built-in ones. None if it is not.
    `allow_trailing`: also of a file with bytes behind its last tensor."""
    for one in registered():
        function = getattr(one.module, "detect_quantization_kind_for_file", None)
        kind = (
            call(one.name, function, [os.fspath(path)], {"verboseLevel": verboseLevel}) if callable(function) else None
        )
        if kind:
            return str(kind)
    opened = Checkpoint.open([os.fspath(path)], allow_trailing=allow_trailing)
    rows = [(name, kind, list(shape)) for name, kind, shape, *_ in opened.entries()]
    texts: dict[str, str] = {}
    for metadata in opened.metadata():
        texts.update(metadata)
    claims = _native.quant_claims(rows, texts, lambda name: b"", replaced())
    return min(claims.values(), key=lambda claim: claim[1])[0] if claims else None


def detect_quantization_label_from_filename(filename: Any) -> str:
    """What an application's handlers read out of a file's name; empty if nothing."""
    for one in registered():
        function = getattr(one.module, "detect_quantization_label_from_filename", None)
        label = call(one.name, function, [os.fspath(filename)], {}) if callable(function) else None
        if label:
            return str(label)
    return ""
