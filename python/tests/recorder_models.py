"""Small models whose blocks run a function that a test gives them, for the recorder's tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

WIDTH = 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Block(nn.Module):
    """A block that runs the function it is given on itself and its input."""

    def __init__(self, run, **children) -> None:
        super().__init__()
        self.run = run
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return self.run(self, x)


class Model(nn.Module):
    """Blocks one after the other, with a base around them."""

    def __init__(self, make, count: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([make() for _ in range(count)])
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def model_of(run, **makers) -> Model:
    torch.manual_seed(0)
    model = Model(lambda: Block(run, **{name: make() for name, make in makers.items()}))
    return model.requires_grad_(False).eval()


X = torch.randn(3, WIDTH)
SEQUENCE = torch.randn(2, 5, WIDTH)
