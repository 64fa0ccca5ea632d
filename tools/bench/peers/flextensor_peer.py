"""Adapter for FlexTensor 0.5.0, memory mode."""

from __future__ import annotations

import torch

from .common import MIB, Attached, as_device, plain_mode, plan, prepare

_ft_count = 0


@plain_mode
def attach_flextensor(
    model,
    device,
    resident_bytes=None,
    *,
    blocks_attr="blocks",
    num_blocks=4,
    min_blocks=2,
    profiling_iters=5,
    profile_mode="view",
    pinned_memory_mode="torch",
    compile_fn=None,
):
    """Memory mode: max_gpu_mem_fraction = resident_bytes / total VRAM.

    In 0.5.0 that budget is compared with slots + resident weights only, not with
    activations, so it is the same quantity as ``resident_bytes``. Needs
    ``warmup_calls`` forwards with representative inputs before it is in its final
    state; those allocate more VRAM than the steady state does.
    """
    import flextensor as ft

    global _ft_count
    _ft_count += 1
    name = f"bench{_ft_count}"
    dev = as_device(device)
    prepare(model)
    fraction = None
    if resident_bytes is not None:
        total = torch.cuda.get_device_properties(dev).total_memory
        # It refuses less than 256 MiB for the blocks, after setting aside the rest.
        floor = 257 * MIB + plan(model, None, blocks_attr=blocks_attr)["other_bytes"]
        fraction = min(1.0, max(int(resident_bytes), floor) / total)
    config = ft.OffloadConfig(
        gpu_device=dev.index,
        include_patterns=[f"{blocks_attr}.*"],
        max_gpu_mem_fraction=fraction,
        num_blocks=max(num_blocks, min_blocks),
        min_blocks=min_blocks,
        discovery_iters=1,
        profiling_iters=profiling_iters,
        profile_mode=profile_mode,
        pinned_memory_mode=pinned_memory_mode,
    )
    proxy = ft.offload(model, config, name=name, compile_fn=compile_fn)
    manager = ft.get_offload_manager(name)
    info = {
        **plan(model, resident_bytes, blocks_attr=blocks_attr, staging_blocks=2),
        "budget": "native",
        "fraction": fraction,
        "num_blocks": num_blocks,
        "profile_mode": profile_mode,
    }
    run = Attached(
        "flextensor",
        proxy,
        info=info,
        warmup_calls=manager.iters_before_inference + 2,
        close=lambda: ft.release(name, preserve_model=False),
        keep=(manager, model),
    )
    # After warm-up run.phase() must be INFERENCE. run.memory() is its own account of
    # the slots; measure VRAM with torch.
    run.memory = lambda: ft.get_gpu_memory_usage(name)
    run.phase = lambda: manager.phase.name
    return run
