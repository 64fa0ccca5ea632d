"""Attached parameters do not require grad, and with some modules PyTorch computes other bits where they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attach_models import DIM, attached, run, same_bits
from torch import nn


class Recurrent(nn.Module):
    """Layers of one recurrent kind."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(DIM, DIM, batch_first=True) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Crossing(nn.Module):
    """Layers of attention to something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(DIM, 4, batch_first=True) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x.flip(1)
        for layer in self.layers:
            x = layer(x, other, other, need_weights=False)[0]
        return x


MODELS = {"GRU": lambda: Recurrent(nn.GRU), "RNN": lambda: Recurrent(nn.RNN), "attention": Crossing}


def _on_and_off(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, its input, and what it gives without grad where its parameters require grad and where they do not."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    x = torch.randn(2, 5, DIM)
    with torch.no_grad():
        on = model(x)
        model.requires_grad_(False)
        off = model(x)
        model.requires_grad_(True)
    return model, x, on, off


@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_those_of_the_model_that_requires_no_grad(kind: str) -> None:
    model, x, on, off = _on_and_off(kind)
    with torch.no_grad():
        with attached(model, 0.6):
            for _ in range(3):
                assert same_bits(model(x), off)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert same_bits(model(x), on)
    with attached(model, 0.6):
        assert same_bits(run(model, x), off)


def test_pytorch_looks_at_requires_grad_where_grad_is_off() -> None:
    outputs = [_on_and_off(kind)[2:] for kind in MODELS]
    if all(same_bits(on, off) for on, off in outputs):
        pytest.skip("this PyTorch computes the same bits on this machine")
    assert all(torch.allclose(on, off, atol=1e-5) for on, off in outputs)
