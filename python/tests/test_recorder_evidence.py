"""Evidence: it holds while nothing changes, and is dropped with the tree, a forward, a mode or the adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightstream.evidence import Evidence


class Adapted(nn.Linear):
    """A linear layer with the state PEFT's tuner layers keep."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._active_adapter = ["default"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.scaling = {"default": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Root(nn.Module):
    """Some layers under a root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Adapted()) for _ in range(3)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def replace_child(model: Root) -> None:
    model.layers[1][0] = nn.Linear(4, 4)


def add_child(model: Root) -> None:
    model.layers[2].add_module("extra", nn.ReLU())


def remove_child(model: Root) -> None:
    del model.layers[2]


def swap_children(model: Root) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def wrap_forward(model: Root) -> None:
    forward = model.head.forward
    model.head.forward = lambda x: forward(x)


def patch_class(model: Root) -> None:
    Root.forward = lambda self, x: x + 1


def change_class(model: Root) -> None:
    model.head.__class__ = type("Other", (nn.Linear,), {})


def train(model: Root) -> None:
    model.layers[1].train()


def other_adapter(model: Root) -> None:
    model.layers[0][1]._active_adapter = ["style"]


def append_adapter(model: Root) -> None:
    model.layers[0][1]._active_adapter.append("style")


def disable_adapters(model: Root) -> None:
    model.layers[2][1]._disable_adapters = True


def merge(model: Root) -> None:
    model.layers[2][1].merged_adapters.append("default")


def scale(model: Root) -> None:
    model.layers[2][1].scaling["default"] = 0.5


@pytest.mark.parametrize(
    "change",
    [
        replace_child, add_child, remove_child, swap_children, wrap_forward, patch_class, change_class, train,
        other_adapter, append_adapter, disable_adapters, merge, scale,
    ],
)  # fmt: skip
def test_a_change_drops_it(change, monkeypatch):
    monkeypatch.setattr(Root, "forward", Root.forward)
    model = Root().eval()
    evidence = Evidence(model)
    assert evidence.holds()
    change(model)
    assert not evidence.holds()


def test_what_does_not_matter_keeps_it():
    model = Root().eval()
    evidence = Evidence(model)
    model(torch.ones(1, 4))
    model.note = "an attribute"
    model.head.weight.data = torch.zeros(4, 4)
    model.eval()
    assert evidence.holds()


def test_forwards_one_wraps_oneself_are_left_out():
    model = Root()
    evidence = Evidence(model, ignoring_forward_of=[model.head])
    wrap_forward(model)
    assert evidence.holds()
    model.layers[0][0].forward = model.head.forward
    assert not evidence.holds()
