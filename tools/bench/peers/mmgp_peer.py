"""Adapters for mmgp 3.8.2, as shipped and with its prefetch repaired."""

from __future__ import annotations

import contextlib

import torch

from .common import MIB, Attached, as_device, plain_mode, plan, prepare


@plain_mode
def attach_mmgp(
    model,
    device,
    resident_bytes=None,
    *,
    blocks_attr="blocks",
    pinned=True,
    async_transfers=True,
    compile=False,
    keep_default_device=False,
    repair_prefetch=False,
):
    """offload.all with a per-model budget in MB, pinned, unquantised.

    The budget is passed as a dict: 3.8.2 drops a plain number (its scalar branch
    reads the wrong variable) and forgets to divide "50%" by 100.

    ``repair_prefetch`` (shim): 3.8.2 compares a predecessor name that carries the
    model id with a loaded-block name that does not, so it never recognises a
    prefetched block and copies each one a second time. Dropping the prefix makes
    its prefetch work as meant. Report as-shipped and repaired numbers apart.
    """
    from mmgp import offload

    dev = as_device(device)
    if dev.index not in (0, None):
        raise ValueError("mmgp always uses cuda:0")
    prepare(model)
    budgets = {} if resident_bytes is None else {"transformer": max(1, int(resident_bytes) / MIB)}
    previous = torch.get_default_device()
    manager = offload.all(
        {"transformer": model},
        pinnedMemory=pinned,
        quantizeTransformer=False,
        budgets=budgets,
        asyncTransfers=async_transfers,
        compile=compile,
        convertWeightsFloatTo=None,
        # It sizes its pinning limit from MemTotal at import, which a machine whose
        # memory grows on demand under-reports; do not let it fall back to partial pinning.
        perc_reserved_mem_max=1e3,
        verboseLevel=0,
    )
    if not keep_default_device:
        # It leaves set_default_device("cuda") on, a mode that every torch call then passes.
        torch.set_default_device(None if previous.type == "cpu" else previous)

    if repair_prefetch:
        for key, prev in list(manager.prev_blocks_names.items()):
            if prev is not None and prev.startswith("transformer/"):
                manager.prev_blocks_names[key] = prev.removeprefix("transformer/")

    def close():
        with contextlib.suppress(Exception):
            manager.release()
        torch.set_default_device(None)

    info = {
        **plan(model, resident_bytes, blocks_attr=blocks_attr, staging_blocks=2),
        "budget": "native",
        "preloaded_blocks": len(manager.preloaded_blocks_per_model.get("transformer", {})),
        "repair_prefetch": repair_prefetch,
    }
    return Attached("mmgp", model, info=info, warmup_calls=2, close=close, keep=manager)


@plain_mode
def attach_mmgp_repaired(model, device, resident_bytes, *, blocks_attr="blocks", **kw):
    return attach_mmgp(model, device, resident_bytes, blocks_attr=blocks_attr, repair_prefetch=True, **kw)
