"""Adapters for diffusers 0.42 group offloading and for diffusers-mm 0.4, which builds on it."""

from __future__ import annotations

import torch
from torch import nn

from .common import Attached, as_device, get_blocks, plain_mode, plan, prepare, split_blocks


def _ensure_root_group(model: nn.Module, blocks_attr: str) -> bool:
    """block_level + stream only installs its prefetch chain when something lies
    outside the block list; without it blocks run before their copy finished.
    A one-element buffer is enough. Returns whether one was added."""
    inside = {id(t) for b in get_blocks(model, blocks_attr) for t in [*b.parameters(), *b.buffers()]}
    if any(id(t) not in inside for t in [*model.parameters(), *model.buffers()]):
        return False
    model.register_buffer("_bench_anchor", torch.zeros(1), persistent=False)
    return True


@plain_mode
def attach_diffusers(
    model,
    device,
    resident_bytes=None,
    *,
    blocks_attr="blocks",
    offload_type="block_level",
    use_stream=True,
    record_stream=True,
    low_cpu_mem_usage=False,
    split=False,
):
    """apply_group_offloading as documented: everything streams, one block ahead.

    ``split=True`` emulates residency (the function has no budget): see ``split_blocks``.
    """
    from diffusers.hooks import apply_group_offloading

    dev = as_device(device)
    prepare(model)
    p = plan(model, resident_bytes, blocks_attr=blocks_attr, staging_blocks=2)
    kept: list[int] = []
    if split and 0 < p["resident_blocks"] < p["blocks"]:
        _, kept = split_blocks(model, dev, p["resident_blocks"], blocks_attr)
        blocks_for_anchor = (
            "_streamed_blocks" if "." not in blocks_attr else (blocks_attr.rpartition(".")[0] + "._streamed_blocks")
        )
    else:
        blocks_for_anchor = blocks_attr
    anchored = _ensure_root_group(model, blocks_for_anchor) if use_stream else False
    apply_group_offloading(
        model,
        onload_device=dev,
        offload_device=torch.device("cpu"),
        offload_type=offload_type,
        num_blocks_per_group=1 if offload_type == "block_level" else None,
        use_stream=use_stream,
        record_stream=record_stream and use_stream,
        low_cpu_mem_usage=low_cpu_mem_usage and use_stream,
    )
    info = {
        **p,
        "resident_blocks": len(kept),
        "budget": "emulated" if kept else "ignored",
        "offload_type": offload_type,
        "use_stream": use_stream,
        "record_stream": record_stream,
        "anchor_added": anchored,
    }
    # The first call with streams records the order and copies blockingly.
    return Attached("diffusers", model, info=info, warmup_calls=3)


@plain_mode
def attach_diffusers_split(model, device, resident_bytes, *, blocks_attr="blocks", **kw):
    return attach_diffusers(model, device, resident_bytes, blocks_attr=blocks_attr, split=True, **kw)


@plain_mode
def attach_diffusers_leaf(model, device, resident_bytes=None, *, blocks_attr="blocks", **kw):
    return attach_diffusers(model, device, resident_bytes, blocks_attr=blocks_attr, offload_type="leaf_level", **kw)


@plain_mode
def attach_diffusers_mm(model, device, resident_bytes=None, *, blocks_attr="blocks", low_cpu_mem=False):
    """ModelManager(strategy="block_pin") with an explicit pin count.

    The library's own default is ``low_cpu_mem=True`` (pin per transfer).
    """
    from diffusers_mm import ModelManager

    dev = as_device(device)
    prepare(model)
    p = plan(model, resident_bytes, blocks_attr=blocks_attr, staging_blocks=1)
    blocks = get_blocks(model, blocks_attr)
    mm = ModelManager(
        strategy="block_pin",
        group_offload_use_stream=True,
        group_offload_low_cpu_mem=low_cpu_mem,
        block_pin_auto_evict=False,
        block_pin_spill_aware=False,
        block_pin_workload_probe=False,
        block_pin_call_workload=False,
    )
    mm.register_component("transformer", model)  # the name makes it a "denoiser"
    mm.set_block_pin_count("transformer", p["resident_blocks"])
    mm.apply_offload_strategy(dev)
    streamed = blocks[p["resident_blocks"] :]
    if streamed and not any(hasattr(m, "_diffusers_hook") for m in streamed[-1].modules()):
        raise RuntimeError("diffusers-mm did not hook the streamed blocks (it only logs failures)")
    info = {**p, "budget": "native", "low_cpu_mem": low_cpu_mem}
    return Attached("diffusers_mm", model, info=info, warmup_calls=3, close=mm.clear, keep=mm)
