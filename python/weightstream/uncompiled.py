"""Keeps this package's own code out of compiled graphs, whoever compiles the model.

A compiler that meets a wrapped forward cuts its graph there, runs the wrapper as plain Python, and compiles what it
calls: the block. This is what `torch._dynamo.disable(recursive=False)` does, without importing the compiler, which
takes seconds.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

__all__ = ["keep_package_uncompiled", "uncompiled"]

_frames: Any = torch._C._dynamo.eval_frame


def uncompiled(function: FunctionType) -> FunctionType:
    """Marks a function made at run time: it is neither traced into nor compiled itself."""
    function._torchdynamo_disable = True
    return function


@cache
def keep_package_uncompiled(late: str | None = None) -> None:
    """Marks the code of every function of this package, or of its module `late`, which was imported after that. Does nothing
    to anything else, and nothing the second time."""
    skip = _skipper()
    for name, module in list(sys.modules.items()):
        if name == late or (late is None and name.split(".")[0] == __package__):
            for code in _codes(vars(module), name):
                skip(code)


def _skipper() -> Callable[[CodeType], None]:
    """How this version of PyTorch runs a frame as plain Python and still looks at the frames it calls."""
    if hasattr(_frames, "set_code_exec_strategy"):
        strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        return lambda code: _frames.set_code_exec_strategy(code, strategy)
    return getattr(_frames, "skip_code", lambda code: None)


def _codes(namespace: dict[str, Any], module: str) -> Iterator[CodeType]:
    """The code of the functions and classes that a module defines, inner functions included."""
    for value in list(namespace.values()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if inspect.isfunction(value) and value.__module__ == module:
            yield from _nested(value.__code__)
        elif inspect.isclass(value) and value.__module__ == module:
            yield from _codes(dict(vars(value)), module)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
