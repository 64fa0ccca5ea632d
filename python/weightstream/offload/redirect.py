"""Lets other libraries load through us: an opt-in that can be undone exactly.

`safetensors.safe_open` and `safetensors.torch.load_file` are replaced, and with them every reference to them that a module
holds already (transformers, accelerate and diffusers import them by name). What is asked for another framework or device
goes to the original.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Optional

import torch
from torch import Tensor

from .._native import Checkpoint
from ..errors import CheckpointError, StateError
from .tensors import Entry, map_tensors

__all__ = ["Redirection", "redirect_safetensors"]

_lock = threading.Lock()
_active: list[Redirection] = []


def redirect_safetensors() -> Redirection:
    """Makes safetensors' loads, everywhere in this process, go through this package until the result is undone.

        with offload.redirect_safetensors():
            model = AutoModel.from_pretrained(path)

    Or keep the result and call its `undo()`. StateError if it is in force already.
    """
    return Redirection()


class Redirection:
    """Safetensors' loads redirected; `undo`, or the end of a `with` block, puts back what was there."""

    def __init__(self) -> None:
        import safetensors
        import safetensors.torch

        with _lock:
            if _active:
                raise StateError("safetensors is redirected already; undo() that first")
            opened, loaded = safetensors.safe_open, safetensors.torch.load_file
            self._pairs = [(opened, _opener(opened)), (loaded, _loader(loaded))]
            self._replace({id(old): new for old, new in self._pairs}, keep={id(old): old for old, _ in self._pairs})
            _active.append(self)

    def undo(self) -> None:
        """Puts the originals back, wherever a module holds a replacement. A second call does nothing."""
        with _lock:
            if self in _active:
                self._replace({id(new): old for old, new in self._pairs}, keep={id(new): new for _, new in self._pairs})
                _active.remove(self)

    @staticmethod
    def _replace(by_id: dict[int, Any], keep: dict[int, Any]) -> None:
        """Replaces objects, known by identity, in the name spaces of all modules but this package's."""
        for name, module in list(sys.modules.items()):
            space = getattr(module, "__dict__", None)
            if not isinstance(space, dict) or name.startswith("weightstream"):
                continue
            for key, value in list(space.items()):
                if id(value) in by_id and value is keep[id(value)]:
                    space[key] = by_id[id(value)]

    def __enter__(self) -> Redirection:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.undo()


def _on_cpu(device: Any) -> bool:
    try:
        return torch.device(device).type == "cpu"
    except (RuntimeError, TypeError):
        return False


def _opener(original: Any) -> Any:
    @functools.wraps(original, updated=())
    def safe_open(filename: Any, framework: Any, device: Any = "cpu", **others: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch") or not _on_cpu(device):
            return original(filename, framework, device=device, **others)
        return _File(filename)

    return safe_open


def _loader(original: Any) -> Any:
    @functools.wraps(original)
    def load_file(filename: Any, device: Any = "cpu", **others: Any) -> dict[str, Tensor]:
        if not _on_cpu(device):
            return original(filename, device=device, **others)
        checkpoint = _open(filename)
        return map_tensors(checkpoint, checkpoint.entries())[0]

    return load_file


def _open(filename: Any) -> Checkpoint:
    """Opens one file; what is wrong with it is an error of theirs too, for callers that expect those."""
    import safetensors

    path = os.fspath(filename)
    os.stat(path)
    try:
        return Checkpoint.open([path], exact=True)
    except CheckpointError as error:
        raise _both(safetensors.SafetensorError)(str(error)) from None


@functools.cache
def _both(theirs: type[Exception]) -> type[Exception]:
    return type("CheckpointError", (CheckpointError, theirs), {"__doc__": CheckpointError.__doc__})


class _File:
    """An open file, as safetensors' `safe_open` gives it."""

    def __init__(self, filename: Any) -> None:
        self._checkpoint = _open(filename)
        self._entries = {entry[0]: entry for entry in self._checkpoint.entries()}

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """The tensors' names in the order of their bytes."""
        return list(self._entries)

    def metadata(self) -> Optional[dict[str, str]]:
        """What the file says beside its tensors."""
        return self._checkpoint.metadata()[0] or None

    def get_tensor(self, name: str) -> Tensor:
        """One tensor."""
        return map_tensors(self._checkpoint, [self._entry(name)])[0][name]

    def get_tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return map_tensors(self._checkpoint, list(self._entries.values()))[0]

    def get_slice(self, name: str) -> _Slice:
        """One tensor to be sliced."""
        return _Slice(self.get_tensor(name), self._entry(name)[1])

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            import safetensors

            where = self._checkpoint.files()[0]
            raise _both(safetensors.SafetensorError)(f"{where} does not contain a tensor {name}")
        return self._entries[name]


class _Slice:
    """A tensor that is read in parts: a view, since nothing is read before it is used."""

    def __init__(self, tensor: Tensor, kind: str) -> None:
        self._tensor = tensor
        self._kind = kind

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its type as the file spells it."""
        return self._kind

    def __getitem__(self, key: Any) -> Tensor:
        return self._tensor[key]
