"""Small models for the attach tests, and helpers that run them resident and streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import weightstream

DIM = 64


class MlpBlock(nn.Module):
    """A feed-forward block whose inner layers run in order: it can be cut into segments."""

    def __init__(self, dim: int = DIM, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, width * dim)
        self.down = nn.Linear(width * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class AttentionBlock(nn.Module):
    """Self-attention and a feed-forward part."""

    def __init__(self, dim: int = DIM, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = MlpBlock(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, dim)
        return self.mlp(x + self.out(mixed))


class Towered(nn.Module):
    """A base around one tower."""

    def __init__(self, blocks: list[nn.Module], dim: int = DIM) -> None:
        super().__init__()
        self.stem = nn.Linear(8, dim)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(dim, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp(blocks: int = 6, seed: int = 0) -> Towered:
    """A tower of MLP blocks."""
    torch.manual_seed(seed)
    return Towered([MlpBlock() for _ in range(blocks)]).eval()


def transformer(blocks: int = 4, seed: int = 0) -> Towered:
    """A tower of attention blocks."""
    torch.manual_seed(seed)
    return Towered([AttentionBlock() for _ in range(blocks)]).eval()


def inputs(seed: int = 1) -> torch.Tensor:
    """What they take."""
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))


def host(order: str = "random", seed: int = 0, **settings: Any) -> weightstream.HostDevice:
    """An emulated device with small pages that overwrites what has been used."""
    settings = {"bytes": "256MiB", "granularity": 4096, "poison": True, **settings}
    return weightstream.HostDevice(order=order, seed=seed, **settings)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of everything in the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The state dict has the same names, places and bits."""
    now = model.state_dict()
    assert list(now) == list(state)
    for name, value in now.items():
        assert value.device.type == "cpu", name
        assert same_bits(value, state[name]), name


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality that tells NaNs and signed zeros apart."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.numel() == 0 or torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


@contextlib.contextmanager
def attached(model: nn.Module, share: float = 0.5, **settings: Any) -> Iterator[weightstream.Attachment]:
    """The model attached to an emulated device with a share of its weights as budget."""
    settings.setdefault("device", host())
    settings.setdefault("budget", int(weight_bytes(model) * share))
    with weightstream.attach(model, **settings) as attachment:
        yield attachment


def run(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The model's output without grad."""
    with torch.inference_mode():
        return model(*args, **kwargs)
