"""Adapters for accelerate 1.15: a device map, and offloading of every leaf."""

from __future__ import annotations

from .common import GIB, Attached, as_device, get_blocks, module_bytes, plain_mode, prepare


@plain_mode
def attach_accelerate(model, device, resident_bytes=None, *, blocks_attr="blocks"):
    """infer_auto_device_map + dispatch_model: blocks that fit on the GPU, the rest on CPU hooks."""
    from accelerate import dispatch_model, infer_auto_device_map

    dev = as_device(device)
    prepare(model)
    total = module_bytes(model)
    if resident_bytes is None:
        return attach_accelerate_sequential(model, device, blocks_attr=blocks_attr)
    classes = sorted({type(b).__name__ for b in get_blocks(model, blocks_attr)})
    device_map = infer_auto_device_map(
        model,
        max_memory={dev.index: int(resident_bytes), "cpu": 4 * total + GIB},
        no_split_module_classes=classes,
    )
    on_gpu = [k for k, v in device_map.items() if v not in ("cpu", "disk")]
    if not on_gpu:  # dispatch_model cannot offload the root entry ""
        return attach_accelerate_sequential(model, device, blocks_attr=blocks_attr)
    dispatch_model(model, device_map=device_map, main_device=dev.index, force_hooks=True)
    return Attached(
        "accelerate",
        model,
        info={"budget": "native", "gpu_entries": len(on_gpu), "map_entries": len(device_map)},
        warmup_calls=1,
    )


@plain_mode
def attach_accelerate_sequential(
    model, device, resident_bytes=None, *, blocks_attr="blocks", per_block=False, pin=False
):
    """cpu_offload (what diffusers calls sequential offload): every leaf, every call.

    ``per_block`` loads a whole block in its pre-hook instead of leaf by leaf;
    ``pin`` hands it a pinned state dict, which the library does not do itself.
    """
    from accelerate import cpu_offload

    dev = as_device(device)
    prepare(model)
    classes = sorted({type(b).__name__ for b in get_blocks(model, blocks_attr)})
    state = {k: v.pin_memory() for k, v in model.state_dict().items()} if pin else None
    cpu_offload(
        model,
        execution_device=dev,
        offload_buffers=False,
        state_dict=state,
        preload_module_classes=classes if per_block else None,
    )
    return Attached(
        "accelerate_sequential",
        model,
        info={"budget": "ignored", "per_block": per_block, "pin": pin},
        warmup_calls=1,
        keep=state,
    )
