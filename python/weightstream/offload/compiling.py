"""Compiles the blocks of a model, each for itself, before the model is attached."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..towers import Tower

__all__ = ["compile_blocks"]


def compile_blocks(model: nn.Module, towers: list[Tower], mode: str, undoing: list[Callable[[], None]]) -> None:
    """Has PyTorch compile every block, and modules with `_compile_me = True`; those with False are left out. Nothing is compiled
    before it runs. What undoes it is noted in `undoing` first, for an interrupt anywhere."""
    blocks = [block for tower in towers for _, block in tower.blocks]
    chosen = {id(block): block for block in blocks if getattr(block, "_compile_me", True)}
    for module in model.modules():
        if module.__dict__.get("_compile_me") is True:
            chosen.setdefault(id(module), module)
    done: list[nn.Module] = []

    def undo() -> None:
        while done:
            done[-1]._compiled_call_impl = None
            done.pop()

    undoing.append(undo)
    for module in chosen.values():
        done.append(module)
        module.compile(mode=mode)
