"""Calls an application's functions with as many of the agreed arguments as they take, by name or by place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import QuantizationError, WeightstreamError

__all__ = ["call"]


def call(
    handler: str, function: Callable[..., Any], positional: list[Any], named: Mapping[str, Any], name: str = ""
) -> Any:
    """`function` with `positional` first and those of `named` that it has parameters for.

    What it raises is a QuantizationError that names the handler; ours, and interrupts, pass through.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = list(parameters)[: len(positional)]
    known = {name: value for name, value in named.items() if everything or (name in parameters and name not in taken)}
    try:
        return function(*positional, **known)
    except WeightstreamError:
        raise
    except Exception as error:
        name = name or getattr(function, "__name__", "a function")
        raise QuantizationError(f"{name} of the handler {handler} failed: {type(error).__name__}: {error}") from error
