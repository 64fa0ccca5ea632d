"""Convolution networks for the tests of the convolution route."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weightstream import dynamic_offload as ddo


class Scaled(nn.Conv2d):
    """A convolution with a forward and a parameter of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.randn(1, self.out_channels, 1, 1))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.gain * super().forward(x) + shift


class Net(nn.Module):
    """Convolutions of every dimension, a transposed one, a linear layer and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv2d(3, 8, 3, padding=1)
        self.scaled = Scaled(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.volume = nn.Conv3d(1, 2, 3, padding=1)
        self.line = nn.Conv1d(16, 4, 5)
        self.head = nn.Linear(4, 300)
        self.alias = self.flat

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(self.scaled(self.flat(x), shift=0.5)))
        deep = self.volume(hidden[:, None]).flatten(1, 2).flatten(2)
        return self.head(self.line(deep).mT)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype).eval()


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def state(model: nn.Module) -> dict[str, tuple[int, int, tuple[int, ...], bytes]]:
    """Identity, address, strides and bytes of every tensor."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: (
            id(t) if isinstance(t, nn.Parameter) else 0,
            t.data_ptr(),
            t.stride(),
            t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in tensors
    }


def enable(model: nn.Module, **arguments: Any) -> ddo.DynamicOffloadApplyResult:
    """The module on the route, on the emulator."""
    options = {
        "execution_device": "host",
        "environ": {},
        "route": "linear_convolution",
        "component": "vae",
        "small_tensor_threshold_bytes": 0,
    }
    return ddo.enable_offload(model, **{**options, **arguments})
