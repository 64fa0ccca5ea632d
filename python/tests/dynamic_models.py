"""Small models and helpers of the tests of `weightstream.dynamic_offload`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weightstream import HostDevice

DEVICE = HostDevice(bytes="64MiB", granularity=4096)
"""An emulated device with small pages."""


class Plain(nn.Module):
    """A model without repeated blocks: an embedding, linear layers, a subclass of one, a convolution outside."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 64)
        self.up = nn.Linear(64, 512)
        self.middle = Doubled(512, 512)
        self.last = nn.Linear(512, 64)
        self.norm = nn.LayerNorm(64)
        self.conv = nn.Conv1d(64, 64, 3)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.middle(torch.relu(self.up(self.table(tokens))))
        return self.conv(self.norm(self.last(torch.relu(hidden))).mT)


class Doubled(nn.Linear):
    """A layer whose forward is its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden) + 1


def plain(seed: int = 0, dtype: torch.dtype = torch.float32) -> Plain:
    torch.manual_seed(seed)
    return Plain(dtype).eval().requires_grad_(False)


TOKENS = torch.arange(17)


def resident(model: nn.Module, *inputs: Any) -> Any:
    with torch.inference_mode():
        return model(*inputs)


def same(model: nn.Module, expected: Tensor, *inputs: Any) -> bool:
    """Whether two calls give these bits."""
    with torch.inference_mode():
        return all(torch.equal(model(*(inputs or (TOKENS,))), expected) for _ in range(2))


def untouched(model: nn.Module) -> bool:
    """Whether no module has a forward of its own or a mark of an offload."""
    marks = ("forward", "_diffusers_hook", "_weightstream", "_weightstream_dynamic_offload")
    return not any(name in part.__dict__ for part in model.modules() for name in marks)
