"""Refuses to run an attached model for somebody who writes down its operators: a graph would keep addresses, not weights.

`torch.fx`, `torch.jit.trace`, `make_fx`, `torch.export` and fake tensors all run a forward to see what it does. What
they make reads a weight wherever it is used, in its turn or not. Trace before attaching.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import _symbolic_trace
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from .errors import StateError

__all__ = ["refuse_fakes", "refuse_tracing"]

_count: Any = torch._C._len_torch_dispatch_stack
_jit_state: Any = torch._C._get_tracing_state


def refuse_tracing(name: str) -> None:
    """Raises StateError if the forward `name` is being traced. Asked at the beginning of a step only."""
    if _count():
        # Modes with a key are PyTorch's own for tracing: fake tensors, proxies, functionalization.
        for mode in _python_dispatch._get_current_dispatch_mode_stack():
            if getattr(mode, "_mode_key", None) is not None:
                _refuse(name, f"under {type(mode).__name__}")
    if getattr(_symbolic_trace, "_is_fx_tracing_flag", False):  # what is_fx_tracing() says, without its log line
        _refuse(name, "by torch.fx")
    if _jit_state() is not None:
        _refuse(name, "by torch.jit")


def refuse_fakes(name: str, inputs: Any) -> None:
    """Raises StateError if fake tensors are among the inputs of a call that failed: they mix with no weights."""
    for value in tree_leaves(inputs):
        if isinstance(value, FakeTensor):
            _refuse(name, "with fake tensors")


def _refuse(name: str, how: str) -> None:
    raise StateError(
        f"{name} is attached and was called to be traced {how}; a trace would read its weights out of their turn. Trace or "
        f"export the plain model: detach() it first"
    )
