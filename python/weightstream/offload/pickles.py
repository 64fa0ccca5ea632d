"""Weights in pickles (.pt, .pth, .bin, …), through PyTorch's weights-only loader and nothing else.

A pickle is a program. The weights-only loader runs none of it but the making of tensors; whatever asks for more is
refused. Zip archives are mapped, so that their tensors are zero-copy; the older format must be read, in pieces between which
a load may be stopped.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
import zipfile
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsafeCheckpointError

__all__ = ["is_pickle", "load_pickle"]

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params_ema", "params")
"""Under which training checkpoints keep their weights."""
_MOST_PICKLE = 64 << 20
"""Bytes of the program in a zip archive; the tensors' bytes lie outside it."""
_PIECE = 16 << 20
"""Bytes read between two looks at whether to stop."""


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


class _Watched(io.BufferedIOBase):
    """A file for the loader, which asks `poll` while it is read. It has no descriptor, or the loader would read around it."""

    def __init__(self, path: str, poll: Callable[[float], None]) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close
        self._size = max(os.fstat(self._file.fileno()).st_size, 1)
        self._poll = poll
        self.stopped: Optional[BaseException] = None
        """What `poll` raised. The loader may turn it into something of its own."""

    def _look(self) -> None:
        try:
            self._poll(self._file.tell() / self._size)
        except BaseException as error:
            self.stopped = error
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: Optional[int] = -1, /) -> bytes:
        self._look()
        return self._file.read(size)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            self._look()
            found = self._file.readinto(view[done : done + _PIECE])
            if not found:
                break
            done += found
        return done

    def readline(self, size: Optional[int] = -1, /) -> bytes:
        return self._file.readline(-1 if size is None else size)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


def load_pickle(path: str, poll: Callable[[float], None] = lambda _: None) -> dict[str, Tensor]:
    """The tensors of a pickle, by name, in CPU memory.

    `poll` is called with the share that is read, and may raise. UnsafeCheckpointError if the file holds more than tensors and
    plain values; CheckpointError if it cannot be read or has no tensors, or has some without data.
    """
    try:
        archive = zipfile.is_zipfile(path)
    except Exception as error:
        raise CheckpointError(f"{path} is no whole zip archive: {error}") from None
    if archive:
        _check_archive(path)
    if archive:
        return _tensors(path, _loaded(path, path, None))
    try:
        file = _Watched(path, poll)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        return _tensors(path, _loaded(path, file, file))


def _loaded(path: str, source: Any, watched: Optional[_Watched]) -> Any:
    """What the weights-only loader makes of a file."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=watched is None)
    except pickle.UnpicklingError as error:
        _stopped(watched)
        text = str(error)
        if any(word in text for word in ("Unsupported", "GLOBAL", "weights_only", "WeightsUnpickler")):
            raise UnsafeCheckpointError(
                f"{path} holds more than tensors, and loading it would run its code: {_first_line(text)}; convert it to "
                f"safetensors where it can be trusted"
            ) from None
        raise CheckpointError(f"{path} is no pickle of tensors: {_first_line(text)}") from None
    except Exception as error:  # the loader passes on whatever the file makes it stumble over
        _stopped(watched)
        raise CheckpointError(f"{path} cannot be read as a pickle: {_first_line(str(error))}") from None


def _stopped(watched: Optional[_Watched]) -> None:
    """Raises what stopped a load, whatever the loader made of it."""
    if watched is not None and watched.stopped is not None:
        raise watched.stopped from None


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
    if any("/code/" in entry.filename for entry in entries) and any(
        entry.filename.endswith("/constants.pkl") for entry in entries
    ):
        raise UnsafeCheckpointError(
            f"{path} is a TorchScript archive: it holds a program beside its tensors; save the state_dict() of what "
            f"torch.jit.load makes of it, where it can be trusted"
        )
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(
                f"{path}: {entry.filename} is compressed, from {entry.compress_size} to {entry.file_size} bytes; PyTorch "
                f"writes archives that are not"
            )
        if entry.filename.endswith("/data.pkl") and entry.file_size > _MOST_PICKLE:
            raise CheckpointError(f"{path}: its pickle has {entry.file_size} bytes; at most {_MOST_PICKLE} are read")


def _has_tensors(held: dict[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in held.values())


def _tensors(path: str, loaded: Any) -> dict[str, Tensor]:
    """The weights in what a pickle held: itself, or what training checkpoints keep beside other things."""
    for _ in range(2):
        if not isinstance(loaded, dict):
            break
        # Before tensors beside it: a loss, a step. Within, a module may have any name.
        inner = next((loaded[name] for name in _WRAPPERS if isinstance(loaded.get(name), dict)), None)
        if inner is None or (_has_tensors(loaded) and not _has_tensors(inner)):
            break
        loaded = inner
    if isinstance(loaded, Tensor) or not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, where a dictionary of tensors is due")
    tensors = {name: value.detach() for name, value in loaded.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    odd = next((name for name in tensors if not isinstance(name, str)), None)
    if odd is not None:
        raise CheckpointError(f"{path} names a tensor {odd!r}, which is no text")
    empty = [name for name, value in tensors.items() if value.is_meta]
    if empty:
        raise CheckpointError(
            f"{path} has no data for {', '.join(empty[:4])}{', …' * (len(empty) > 4)}: saved from the meta device"
        )
    return tensors
