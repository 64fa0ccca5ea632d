"""What a reader of a report must know of machine and program, gathered without being asked and without secrets: no environment
variables, no arguments, no names of hosts or users."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import struct
import sys
from typing import Any, Optional

from .._native import __version__, resident_fraction
from ..errors import WeightstreamError

__all__ = ["after_start", "before_start", "checkpoint_facts", "file_system"]

_PACKAGES = ("torch", "transformers", "diffusers", "accelerate", "safetensors", "triton", "numpy")
_LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header, at most."""


def before_start() -> dict[str, Any]:
    """What is known before anything is loaded. Imports nothing."""
    return {
        "weightstream": __version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _kilobytes(_first("/proc/meminfo", "MemTotal")),
        "nvidia_driver": _nvidia_driver(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "script_revision": _revision(_script_folder()),
    }


def after_start() -> dict[str, Any]:
    """What the program has initialized by now: asks only a PyTorch that is imported, and no CUDA that is not initialized."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "version"):
        return {}
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "cuda_initialized": torch.cuda.is_initialized(),
    }
    if facts["cuda_initialized"]:
        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        facts["gpus"] = [{"name": one.name, "memory_bytes": one.total_memory} for one in found]
    return facts


def checkpoint_facts(path: str) -> dict[str, Any]:
    """A file as it is now: what it is by its size and its header's hash, where it lies, and how much of it is cached."""
    try:
        size, resident = resident_fraction(path)
        return {
            "bytes": size,
            "resident_fraction": resident,
            "file_system": file_system(path),
            "header_sha256": _header_hash(path, size),
        }
    except (OSError, WeightstreamError) as error:
        # Without the folder here, too.
        return {"problem": f"{type(error).__name__}: {str(error).replace(path, os.path.basename(path))}"}


def file_system(path: str, mounts: Optional[str] = None) -> Optional[str]:
    """The type of the file system that a path lies in; None where the system does not tell."""
    if mounts is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                mounts = file.read()
        except OSError:
            return None
    path = os.path.realpath(path)
    best: tuple[int, Optional[str]] = (-1, None)
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5:
            continue
        # Spaces and such are written as octal numbers there.
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The last of those mounted at one place is the one that is seen.
        if inside and len(point) >= best[0]:
            best = (len(point), kind[0])
    return best[1]


def _header_hash(path: str, size: int) -> str:
    """The hash of a safetensors file's header, which names all tensors with their places; of others, of the first 64 KiB."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            length = 64 << 10
        return hashlib.sha256(start + file.read(length)).hexdigest()


def _first(path: str, field: str) -> Optional[str]:
    """The value of the first line of a file of /proc that begins with this field."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == field:
                    return value.strip()
    except OSError:
        pass
    return None


def _kilobytes(text: Optional[str]) -> Optional[int]:
    number = (text or "").split(" ")[0]
    return int(number) * 1024 if number.isdigit() else None


def _nvidia_driver() -> Optional[str]:
    text = _first("/proc/driver/nvidia/version", "NVRM version") or ""
    words = [word for word in text.split() if word[:1].isdigit() and "." in word]
    return words[0] if words else None


def _version(name: str) -> Optional[str]:
    try:
        return importlib.metadata.version(name)
    except Exception:  # not there, or its files are damaged or cannot be opened: no reason to fail a start
        return None


def _script_folder() -> Optional[str]:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if isinstance(file, str) else None


def _revision(folder: Optional[str]) -> Optional[str]:
    """The commit that the program's script is of, read from git's files without starting it."""
    while folder:
        git = os.path.join(folder, ".git")
        if os.path.exists(git):
            return _head(git)
        parent = os.path.dirname(folder)
        folder = parent if parent != folder else None
    return None


def _head(git: str) -> Optional[str]:
    try:
        if os.path.isfile(git):  # a worktree: the file names the folder
            with open(git, encoding="utf-8") as file:
                git = os.path.join(os.path.dirname(git), file.read().partition(":")[2].strip())
        with open(os.path.join(git, "HEAD"), encoding="utf-8") as file:
            head = file.read().strip()
        if not head.startswith("ref: "):
            return head
        name = head[len("ref: ") :]
        shared = git
        common = os.path.join(git, "commondir")
        if os.path.isfile(common):
            with open(common, encoding="utf-8") as file:
                shared = os.path.join(git, file.read().strip())
        loose = os.path.join(shared, name)
        if os.path.isfile(loose):
            with open(loose, encoding="utf-8") as file:
                return file.read().strip()
        with open(os.path.join(shared, "packed-refs"), encoding="utf-8") as file:
            return next((line.split()[0] for line in file if line.rstrip().endswith(" " + name)), None)
    except (OSError, UnicodeError):
        return None
