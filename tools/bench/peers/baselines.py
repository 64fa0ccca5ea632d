"""Adapters without a library: all weights on the GPU, and blocks moved in and out by hooks."""

from __future__ import annotations

import torch

from .common import Attached, as_device, get_blocks, move_outside_blocks, plain_mode, plan, prepare, spread

# baselines
# --------------------------------------------------------------------------


@plain_mode
def attach_resident(model, device, resident_bytes=None, *, blocks_attr="blocks"):
    """All weights on the GPU: the upper bound."""
    dev = as_device(device)
    prepare(model).to(dev)
    return Attached("resident", model, info={"budget": "ignored"}, warmup_calls=2)


@plain_mode
def attach_naive(model, device, resident_bytes=None, *, blocks_attr="blocks", pin=True, copy_back=False):
    """Do-it-yourself block swap: hooks that move one block in and out, no overlap.

    ``copy_back=True`` also copies device to host after each block, as
    ``module.to("cpu")`` scripts do.
    """
    dev = as_device(device)
    prepare(model)
    p = plan(model, resident_bytes, blocks_attr=blocks_attr, staging_blocks=1)
    blocks = get_blocks(model, blocks_attr)
    move_outside_blocks(model, dev, blocks_attr)
    keep = set(spread(len(blocks), p["resident_blocks"]))
    host: dict[int, list[torch.Tensor]] = {}
    handles = []
    for i, block in enumerate(blocks):
        if i in keep:
            block.to(dev)
            continue
        tensors = [*block.parameters(), *block.buffers()]
        if pin:
            for t in tensors:
                t.data = t.data.pin_memory()
        host[i] = [t.data for t in tensors]

        def pre(_m, _a, tensors=tensors):
            for t in tensors:
                t.data = t.data.to(dev, non_blocking=True)

        def post(_m, _a, _o, tensors=tensors, i=i):
            for t, h in zip(tensors, host[i], strict=True):
                t.data = t.data.cpu() if copy_back else h

        handles += [block.register_forward_pre_hook(pre), block.register_forward_hook(post)]
    info = {**p, "budget": "native", "pin": pin, "copy_back": copy_back}
    return Attached("naive", model, info=info, close=lambda: [h.remove() for h in handles])


# --------------------------------------------------------------------------
