"""What PyTorch's compiler may do with an attached model: not run while a step is watched, and not bake weights in.

The compiler skips code that it meets under a dispatch mode, and remembers that for every model that shares the code.
So it is turned off for a watched step, by means that leave its caches alone. It is never imported here: that takes
seconds, and who compiles has imported it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .errors import ModelError, StateError

__all__ = ["COMPILES", "check_compiled", "compiling", "holds_compiled", "refuse_freezing", "uncompiled_step"]

_frames: Any = torch._C._dynamo.eval_frame

COMPILES = hasattr(torch.compiler, "set_stance")
"""Whether this version compiles attached models. Before 2.6 its compiler copies modules, and cannot be told to wait."""


def compiling() -> bool:
    """Whether the calling thread runs inside a compiled callable, so that what it calls is compiled too."""
    if hasattr(_frames, "get_eval_frame_callback"):
        callback = _frames.get_eval_frame_callback()
    else:
        callback = _frames.set_eval_frame(None)
        _frames.set_eval_frame(callback)
    return callback is not None


def holds_compiled(model: nn.Module) -> str | None:
    """The name of a part of `model` that was compiled by itself, or None."""
    for name, module in model.named_modules():
        if "_compiled_call_impl" in module.__dict__ and module.__dict__["_compiled_call_impl"] is not None:
            return name or type(module).__name__
        if "dynamo_ctx" in module.__dict__:
            return name or type(module).__name__
    return None


def check_compiled(model: nn.Module) -> None:
    """Raises ModelError if `model` has compiled parts that this version of PyTorch would copy."""
    part = None if COMPILES else holds_compiled(model)
    if part is not None:
        raise ModelError(
            f"{part} is compiled, and PyTorch {torch.__version__}'s compiler copies the modules it compiles; attach the "
            f"plain model, or use PyTorch 2.6 or newer"
        )


def refuse_freezing(name: str) -> None:
    """Raises StateError if the compiler would make constants of weights, copying what lies behind them now."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None and getattr(config, "freezing", False):
        raise StateError(
            f"{name} is compiled with torch._inductor.config.freezing, which makes constants of weights that stream; set "
            f"it to False before compiling"
        )


class _Stance:
    """How many threads have the compiler turned off, which is one switch for the process."""

    lock = threading.Lock()
    count = 0
    switch: Any = None


@contextmanager
def uncompiled_step() -> Iterator[None]:
    """Runs everything as plain Python, compiled callables too. Other threads' compiled code runs as Python meanwhile."""
    callback = _frames.set_eval_frame(None)
    # Someone else's callables are compiled only if they imported the compiler; it may not be imported for them.
    dynamo = sys.modules.get("torch._dynamo") if COMPILES else None
    try:
        if dynamo is not None:
            with _Stance.lock:
                if _Stance.count == 0:
                    _Stance.switch = dynamo.set_stance("force_eager")
                _Stance.count += 1
        try:
            yield
        finally:
            if dynamo is not None:
                with _Stance.lock:
                    _Stance.count -= 1
                    if _Stance.count == 0:
                        _Stance.switch.__exit__(None, None, None)
    finally:
        _frames.set_eval_frame(callback)
