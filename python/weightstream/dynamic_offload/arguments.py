"""Checks the arguments of `enable_offload` that are no fields of a configuration, on every route and before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DynamicOffloadConfig
from .settings import DynamicOffloadSettings

__all__ = ["check_arguments"]

_KINDS = ("leaf_level", "block_level")


def check_arguments(
    texts: Mapping[str, Any], flags: Mapping[str, Any], switches: Mapping[str, Any], **others: Any
) -> None:
    """TypeError for what has the wrong type, ValueError for what cannot be. `switches` are flags that need not be given."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r} is no text")
    for name, value in (*flags.items(), *switches.items()):
        if not isinstance(value, bool) and not (value is None and name in switches):
            raise TypeError(f"{name}={value!r} is neither True nor False")
    for name, kind in (("settings", DynamicOffloadSettings), ("config", DynamicOffloadConfig), ("environ", Mapping)):
        value = others[name]
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    if others["record_event"] is not None and not callable(others["record_event"]):
        raise TypeError(f"record_event={others['record_event']!r} cannot be called")
    kind, blocks = others["offload_type"], others["num_blocks_per_group"]
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"offload_type={kind!r} is none of {', '.join(_KINDS)}")
    if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1):
        raise ValueError(f"num_blocks_per_group={blocks!r} is no whole number from 1 on")
