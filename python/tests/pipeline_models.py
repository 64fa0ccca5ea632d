"""Small models that run one after the other, as a pipeline's do, and what they should compute."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import weightstream
from weightstream import offload


class Fuse:
    """Raises an error at a certain call of a block, or never."""

    calls = 0
    at: int | None = None
    error: type[BaseException] = ValueError

    @classmethod
    def burn(cls) -> None:
        cls.calls += 1
        if cls.calls == cls.at:
            raise cls.error("burnt")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.norm(x))
        Fuse.burn()
        return x[..., : self.down.out_features] + self.down(torch.relu(x))


class Model(nn.Module):
    """Blocks between two layers, a buffer that its forward writes, and a method besides forward."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        self.scale += 0.5
        return self.last(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))

    def decode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


WIDTHS = {"transformer": (128, 8), "text_encoder": (96, 6), "text_encoder_2": (80, 5), "vae": (64, 3)}


class Pipeline:
    """Like one of diffusers: components, and a way to move them."""

    def __init__(self, **components: Any) -> None:
        self.components = components

    def to(self, device: str) -> Pipeline:
        for model in self.components.values():
            model.to(device)
        return self

    def enable_model_cpu_offload(self) -> None:
        raise AssertionError("not refused")


def pipeline(*names: str, seed: int = 0) -> tuple[dict[str, Model], dict[str, Model], dict[str, Tensor]]:
    """Models, what they should be once their weights are bfloat16, and an input for each."""
    torch.manual_seed(seed)
    models = {name: Model(*WIDTHS[name]).eval() for name in names or WIDTHS}
    references = {name: copy.deepcopy(model).bfloat16() for name, model in models.items()}
    inputs = {name: torch.randn(2, WIDTHS[name][0]).bfloat16() for name in models}
    return models, references, inputs


def device(size: str = "16MiB", **settings: Any) -> weightstream.HostDevice:
    """An emulated device on which a missing wait, or a read of what is away, shows."""
    return weightstream.HostDevice(
        **{"bytes": size, "granularity": 4096, "poison": True, "order": "random", **settings}
    )


def set_up(models: Any, **parameters: Any) -> offload.OffloadObject:
    """`offload.all` on an emulated device, nothing quantized, in few megabytes."""
    settings = {"budgets": 0.3, "quantizeTransformer": False, "verboseLevel": 0, "device": device()}
    return offload.all(models, **{**settings, **parameters})


@torch.no_grad()
def check(models: dict[str, Model], references: dict[str, Model], inputs: dict[str, Tensor], *names: str) -> None:
    """Runs models in this order and compares the bits."""
    for name in names or models:
        got, wanted = models[name](inputs[name]), references[name](inputs[name])
        assert torch.equal(got, wanted), name
