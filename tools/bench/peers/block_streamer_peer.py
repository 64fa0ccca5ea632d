"""Adapter for block-streamer 0.2.0."""

from __future__ import annotations

from torch import nn

from .common import Attached, as_device, move_outside_blocks, owner_of, plain_mode, plan, prepare


@plain_mode
def attach_block_streamer(model, device, resident_bytes=None, *, blocks_attr="blocks", prefetch_ahead=None):
    """Replace the block list with one StreamedModel that runs all blocks.

    Works for models whose forward feeds the hidden state through the list; extra
    arguments go unchanged to every block. The budget becomes prefetch_ahead + 1
    slots: nothing stays resident between calls.
    """
    from block_streamer import StreamedModel

    dev = as_device(device)
    prepare(model)
    p = plan(model, resident_bytes, blocks_attr=blocks_attr, staging_blocks=2)
    if prefetch_ahead is None:
        prefetch_ahead = 1 if resident_bytes is None else max(1, p["slots"] - 1)
    move_outside_blocks(model, dev, blocks_attr)
    owner, leaf = owner_of(model, blocks_attr)
    streamed = StreamedModel(list(getattr(owner, leaf)), device=dev, prefetch_ahead=int(prefetch_ahead))
    setattr(owner, leaf, nn.ModuleList([streamed]))
    info = {**p, "resident_blocks": 0, "budget": "native", "prefetch_ahead": prefetch_ahead}
    run = Attached("block_streamer", model, info=info, warmup_calls=2, close=streamed.close, keep=streamed)
    run.stats = streamed.stats
    return run
