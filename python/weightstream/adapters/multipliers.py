"""Multipliers as users give them: a number, or a list of numbers with one value a step, for each adapter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import WeightsError
from .strengths import LARGEST

__all__ = ["Multiplier", "at_step", "read_multipliers", "read_step"]

Multiplier = tuple[float, ...]
"""One value a step; the last one stays."""


def read_multipliers(given: Any, count: int) -> list[Multiplier]:
    """The multipliers of `count` adapters. Those that are missing are 1. WeightsError for what is no number."""
    if given is None:
        given = []
    if _is_number(given):
        given = [given]
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, tuple)):
        raise WeightsError(f"lora_multi is {given!r}; give a list with a number, or a list of numbers, for each LoRA")
    if len(given) > count:
        raise WeightsError(f"lora_multi has {len(given)} multipliers for {count} LoRAs")
    read = [_read(number, one) for number, one in enumerate(given)]
    return read + [(1.0,)] * (count - len(read))


def at_step(multiplier: Multiplier, step: int) -> float:
    """Its value at a step."""
    return multiplier[min(step, len(multiplier) - 1)]


def read_step(step: Any) -> int:
    """A step's number, from 0 up."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or step.__index__() < 0:
        raise WeightsError(f"step_no is {step!r}; give the number of a step, from 0 up")
    return step.__index__()


def _read(number: int, given: Any) -> Multiplier:
    values = [given] if _is_number(given) else given
    is_list = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    if not is_list or not values or not all(map(_is_number, values)):
        raise WeightsError(
            f"multiplier {number} is {given!r}; give a number, or a list of numbers with one for each step"
        )
    read = tuple(float(value) for value in values)
    if not all(math.isfinite(value) and abs(value) <= LARGEST for value in read):
        raise WeightsError(f"multiplier {number} is {given!r}, which is no finite number in float32")
    return read


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, (bool, str, bytes)) and not hasattr(value, "__len__")
