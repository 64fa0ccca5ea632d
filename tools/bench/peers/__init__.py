"""Adapters that run other weight-streaming libraries on one plain model, through their public interfaces.

Every adapter has the same shape:

    run = attach(NAME, model, device, budget_bytes)
    for _ in range(run.warmup_calls):      # discovery, tracing, first load
        run(x)
    y = run(x)                             # steady state: time this
    run.close()

`model` is an ordinary module on the CPU (bfloat16, eval) whose attribute `blocks` is a ModuleList of blocks of one
shape that its forward iterates over. Inputs are already on `device`. The budget is the device memory for WEIGHTS in
total: blocks kept there, staging slots, and what lies outside the block list; activations are not in it. Each adapter
translates it into what its library understands; `run.info["budget"]` says how:

    "native"    the library takes a byte budget, or a count, itself
    "emulated"  the adapter keeps some blocks away from the library by hand
    "ignored"   the library has no such notion; it streams everything

Use one process a peer: mmgp patches safetensors and the default device, FlexTensor and block-streamer change the
model, and the pinned-host cache of one peer would be charged to the next. `wheels.json` lists the packages a peer
needs beside torch, accelerate, transformers, safetensors, numpy, scipy, psutil and pyyaml.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from .common import Attached

# name -> (module, function)
PEERS = {
    "resident": ("baselines", "attach_resident"),
    "naive": ("baselines", "attach_naive"),
    "accelerate": ("accelerate_peer", "attach_accelerate"),
    "accelerate_sequential": ("accelerate_peer", "attach_accelerate_sequential"),
    "diffusers": ("diffusers_peer", "attach_diffusers"),
    "diffusers_split": ("diffusers_peer", "attach_diffusers_split"),
    "diffusers_leaf": ("diffusers_peer", "attach_diffusers_leaf"),
    "diffusers_mm": ("diffusers_peer", "attach_diffusers_mm"),
    "flextensor": ("flextensor_peer", "attach_flextensor"),
    "piper": ("piper_peer", "attach_piper"),
    "piper_split": ("piper_peer", "attach_piper_split"),
    "block_streamer": ("block_streamer_peer", "attach_block_streamer"),
    "mmgp": ("mmgp_peer", "attach_mmgp"),
    "mmgp_repaired": ("mmgp_peer", "attach_mmgp_repaired"),
}


def attach(name: str, model: nn.Module, device: Any, budget_bytes: int | None, **options: Any) -> Attached:
    """Runs `model` through the peer called `name`."""
    module, function = PEERS[name]
    return getattr(importlib.import_module(f".{module}", __name__), function)(model, device, budget_bytes, **options)
