"""Weights in pickles (.pt, .pth, .bin, …), through PyTorch's weights-only loader and nothing else.

A pickle is a program. The weights-only loader runs none of it but the making of tensors; whatever asks for more is
refused. Zip archives are mapped, so that their tensors are zero-copy; the older format must be read.
"""

from __future__ import annotations

import os
import pickle
import stat
import zipfile
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsafeCheckpointError

__all__ = ["is_pickle", "load_pickle"]

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params_ema", "params")
"""Under which training checkpoints keep their weights."""
_MOST_PICKLE = 64 << 20
"""Bytes of the program in a zip archive; the tensors' bytes lie outside it."""


def is_pickle(path: str) -> bool:
    """Whether a file begins as a pickle or a zip archive does."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return False  # opening a pipe would wait for its other end; who opens the path refuses it
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if head.startswith(b"PK\x03\x04"):
        return True
    # A safetensors header's length may begin with the same byte; JSON follows it.
    length = int.from_bytes(head[:8], "little")
    return head[:1] == b"\x80" and not (head[8:9] in b"{ \t\r\n" and length + 8 <= status.st_size)


def load_pickle(path: str) -> dict[str, Tensor]:
    """The tensors of a pickle, by name, in CPU memory.

    UnsafeCheckpointError if it holds more than tensors and plain values; CheckpointError if it cannot be read or has no
    tensors.
    """
    try:
        archive = zipfile.is_zipfile(path)
    except Exception as error:
        raise CheckpointError(f"{path} is no whole zip archive: {error}") from None
    if archive:
        _check_archive(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        text = str(error)
        if any(word in text for word in ("Unsupported", "GLOBAL", "weights_only", "WeightsUnpickler")):
            raise UnsafeCheckpointError(
                f"{path} holds more than tensors, and loading it would run its code: {_first_line(text)}; convert it to "
                f"safetensors where it can be trusted"
            ) from None
        raise CheckpointError(f"{path} is no pickle of tensors: {_first_line(text)}") from None
    except Exception as error:  # the loader passes on whatever the file makes it stumble over
        raise CheckpointError(f"{path} cannot be read as a pickle: {_first_line(str(error))}") from None
    return _tensors(path, loaded)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (kept or lines or ["no reason given"])[0][:300]


def _check_archive(path: str) -> None:
    """Refuses archives that would unpack into more than they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # whatever a damaged directory makes the module stumble over
        raise CheckpointError(f"{path} is no whole zip archive: {error}") from None
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(
                f"{path}: {entry.filename} is compressed, from {entry.compress_size} to {entry.file_size} bytes; PyTorch "
                f"writes archives that are not"
            )
        if entry.filename.endswith("/data.pkl") and entry.file_size > _MOST_PICKLE:
            raise CheckpointError(f"{path}: its pickle has {entry.file_size} bytes; at most {_MOST_PICKLE} are read")


def _tensors(path: str, loaded: Any) -> dict[str, Tensor]:
    """The weights in what a pickle held: itself, or what training checkpoints keep beside other things."""
    for _ in range(2):
        if not isinstance(loaded, dict):
            break
        found = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
        if found:
            break
        inner = next((name for name in _WRAPPERS if isinstance(loaded.get(name), dict)), None)
        if inner is None:
            break
        loaded = loaded[inner]
    if isinstance(loaded, Tensor) or not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, where a dictionary of tensors is due")
    tensors = {name: value.detach() for name, value in loaded.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    odd = next((name for name in tensors if not isinstance(name, str)), None)
    if odd is not None:
        raise CheckpointError(f"{path} names a tensor {odd!r}, which is no text")
    return tensors
