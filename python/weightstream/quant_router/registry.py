"""The handlers that an application registered, and who reads files of which extension."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from .._native import quant_handlers
from ..errors import QuantizationError

__all__ = [
    "Registered",
    "extension_of",
    "handlers",
    "register_file_extension",
    "register_handler",
    "registered",
    "replaced",
    "unregister_file_extension",
    "unregister_handler",
]

PRIORITY = 1000
"""Of a handler that names none."""


@dataclass(frozen=True, eq=False)
class Registered:
    """A handler of an application."""

    name: str
    priority: int
    module: Any
    """The module, or what stands for one."""


_lock = threading.Lock()
_handlers: list[Registered] = []
_extensions: dict[str, Any] = {}


def register_handler(handler: Any) -> Any:
    """Registers a module, or the module at an import path; gives it back. One of the same name is replaced.

    QuantizationError if it is no handler: it must have `detect` and `convert_to_quanto`.
    """
    module = importlib.import_module(handler) if isinstance(handler, str) else handler
    name = name_of(module)
    for needed in ("detect", "convert_to_quanto"):
        if not callable(getattr(module, needed, None)):
            raise QuantizationError(f"the handler {name} has no {needed}(), which every handler needs")
    priority = getattr(module, "HANDLER_PRIORITY", PRIORITY)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise QuantizationError(f"HANDLER_PRIORITY of the handler {name} is {priority!r}; give a number")
    with _lock:
        _handlers[:] = [other for other in _handlers if other.name != name]
        _handlers.append(Registered(name, priority, module))
        _handlers.sort(key=lambda one: one.priority)
    return module


def unregister_handler(handler: Any) -> bool:
    """Takes a handler away, by its module, import path or name. Whether it was registered."""
    with _lock:
        kept = [
            one
            for one in _handlers
            if one.module is not handler and handler not in (one.name, getattr(one.module, "__name__", None))
        ]
        found = len(kept) < len(_handlers)
        _handlers[:] = kept
    return found


def register_file_extension(extension: str, handler: Any) -> Any:
    """Files that end so are read by a handler; gives it back.

    The handler has `load_state_dict(path, writable_tensors, verboseLevel, default_dtype, pin_to_memory)`, which gives the
    weights, or (weights, quantization map), or both and the tied map; and, if it wants, `normalize(path)` and
    `get_file_metadata(path)`.
    """
    module = importlib.import_module(handler) if isinstance(handler, str) else handler
    if not callable(getattr(module, "load_state_dict", None)):
        raise QuantizationError(f"the handler {name_of(module)} of files has no load_state_dict()")
    if not extension.strip("."):
        raise QuantizationError("a file extension is empty")
    with _lock:
        _extensions[extension.lower().lstrip(".")] = module
    return module


def unregister_file_extension(extension: str) -> bool:
    """Files that end so are read as ever. Whether the extension was registered."""
    with _lock:
        return _extensions.pop(extension.lower().lstrip("."), None) is not None


def handlers() -> list[tuple[str, int]]:
    """Names and priorities of all handlers, in the order in which they are asked."""
    own = [(one.name, one.priority) for one in registered()]
    taken = replaced()
    return sorted([entry for entry in quant_handlers() if entry[0] not in taken] + own, key=lambda entry: entry[1])


def registered() -> list[Registered]:
    """The application's, the best first."""
    with _lock:
        return list(_handlers)


def replaced() -> list[str]:
    """The built-in handlers in whose place an application's is."""
    names = {one.name for one in registered()}
    return [name for name, _ in quant_handlers() if name in names]


def extension_of(path: str) -> Optional[Any]:
    """Who reads this file, or None."""
    with _lock:
        if not _extensions:
            return None
        lower = path.lower()
        fitting = [ending for ending in _extensions if lower.endswith("." + ending)]
        return _extensions[max(fitting, key=len)] if fitting else None


def name_of(module: Any) -> str:
    """What a handler is called in reports."""
    name = getattr(module, "HANDLER_NAME", None) or getattr(module, "__name__", None) or type(module).__name__
    return str(name)


def metadata_text(metadata: Optional[Mapping[str, Any]]) -> dict[str, str]:
    """Metadata as texts."""
    return {str(key): str(value) for key, value in (metadata or {}).items()}
