"""The group route: diffusers' own group offloading, with its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import NotAvailableError
from .config import DynamicOffloadConfig
from .linear import compute_device
from .routes import GROUP
from .state import Applied

__all__ = ["offload", "resolved"]

_HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


def resolved(config: DynamicOffloadConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The options that diffusers is given: those asked for, as far as the device and this version of it have them."""
    streams = compute_device(config.execution_device).type == "cuda"
    used = {
        "offload_type": "leaf_level",
        "use_stream": streams,
        "record_stream": streams,
        "low_cpu_mem_usage": True,
        **options,
    }
    if used["offload_type"] not in ("leaf_level", "block_level"):
        raise ValueError(f"offload_type={used['offload_type']!r} is none of leaf_level, block_level")
    blocks = used.get("num_blocks_per_group", 1)
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise ValueError(f"num_blocks_per_group={blocks!r} is no whole number from 1 on")
    used["use_stream"] = used["use_stream"] and streams
    used["record_stream"] = used["record_stream"] and used["use_stream"]
    used["non_blocking"] = used["use_stream"]
    if used["offload_type"] == "block_level":
        used.setdefault("num_blocks_per_group", 1)
    else:
        used.pop("num_blocks_per_group", None)
    known = inspect.signature(_function()).parameters
    return {name: value for name, value in used.items() if name in known}


def offload(module: nn.Module, config: DynamicOffloadConfig, used: dict[str, Any]) -> Applied:
    """Applies it, with options that `resolved` gave."""
    onload = compute_device(config.execution_device)
    _function()(module, onload_device=onload, offload_device=torch.device("cpu"), **used)

    def remove() -> None:
        for part in module.modules():
            registry = getattr(part, "_diffusers_hook", None)
            for name in list(getattr(registry, "hooks", {})):
                if name in _HOOKS:
                    registry.remove_hook(name, recurse=False)
            # A registry without hooks is no longer there for others to find.
            if registry is not None and not registry.hooks:
                part.__dict__.pop("_diffusers_hook", None)
                if getattr(part.__dict__.get("forward"), "__func__", None) is type(part).forward:
                    del part.__dict__["forward"]
        module.to("cpu")

    return Applied(GROUP, remove, dict)


def _function() -> Callable[..., None]:
    try:
        from diffusers.hooks import apply_group_offloading
    except ImportError:
        raise NotAvailableError("the route diffusers_group_offload needs the package diffusers") from None
    return apply_group_offloading
