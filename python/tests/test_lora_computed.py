"""Adapters of layers whose weight a parametrization, or PyTorch's older norms, compute at each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import run, same_bits
from offload_files import write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

from weightstream import offload

WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "older weight norm": weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def loaded(made: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    path = str(write(folder / "a.safetensors", tensors))
    assert offload.load_loras_into_model(made, path) == [path], made._loras_errors


def decomposed(weight: Tensor, delta: Tensor, magnitude: Tensor) -> Tensor:
    moved = weight + delta.reshape(weight.shape)
    lengths = moved.flatten(1).norm(dim=1)
    return moved * (magnitude.double() / lengths).reshape(-1, *[1] * (weight.dim() - 1))


@pytest.mark.parametrize("kind", ["lora", "dora", "boft"])
@pytest.mark.parametrize("layer", ["line", "conv"])
@pytest.mark.parametrize("way", list(WAYS))
def test_they_are_computed_with_the_weight_of_now(way: str, layer: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module: Any = nn.Linear(8, 8) if layer == "line" else nn.Conv2d(8, 8, 3, padding=1)
    made = nn.ModuleDict({"x": WAYS[way](module)}).eval().requires_grad_(False)
    x = torch.randn(3, 8) if layer == "line" else torch.randn(2, 8, 5, 5)
    plain, module = run(made["x"], x), made["x"]
    weight, bias = module.weight.detach().double().clone(), module.bias.detach().double()
    down, up = torch.randn(2, *weight.shape[1:]) * 0.3, torch.randn(8, 2) * 0.3
    tensors = {"x.lora_A.weight": down, "x.lora_B.weight": up.reshape(8, 2, *[1] * (weight.dim() - 2))}
    delta = up.double() @ down.double().flatten(1)
    if kind == "lora":
        changed = weight + delta.reshape(weight.shape)
    elif kind == "dora":
        magnitude = torch.rand(8) + 0.5
        changed = decomposed(weight, delta, magnitude)
        tensors["x.dora_scale"] = magnitude.reshape(8, *[1] * (weight.dim() - 1))
    else:
        blocks = torch.randn(1, weight[0].numel() // 4, 4, 4)
        tensors = {"x.boft_R": blocks, "x.boft_s": torch.ones(8, 1)}
        skew = (blocks[0] - blocks[0].transpose(1, 2)).double() / 2
        one = torch.eye(4, dtype=torch.float64)
        whole = torch.block_diag(*((one - skew) @ torch.linalg.inv(one + skew)))
        changed = (weight.flatten(1) @ whole.t()).reshape(weight.shape)
    loaded(made, tensors, tmp_path)
    given = x.double()
    wanted = F.linear(given, changed, bias) if layer == "line" else F.conv2d(given, changed, bias, padding=1)
    assert float((run(made["x"], x) - wanted).abs().max() / wanted.abs().max()) < 3e-5
    offload.unload_loras_from_model(made)
    assert same_bits(run(made["x"], x), plain)


def test_dora_of_an_embedding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = nn.ModuleDict({"x": parametrizations.weight_norm(nn.Embedding(10, 6))}).requires_grad_(False)
    a, b, magnitude = torch.randn(2, 10), torch.randn(6, 2), torch.rand(6) + 0.5
    moved = made["x"].weight.double() + (b.double() @ a.double()).t()
    tensors = {"x.lora_embedding_A": a, "x.lora_embedding_B": b, "x.lora_magnitude_vector": magnitude}
    loaded(made, tensors, tmp_path)
    wanted = magnitude.double() * moved / moved.norm(dim=0)
    assert float((run(made["x"], torch.arange(10)) - wanted).abs().max()) < 1e-5


class Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (2, 0)))


@pytest.mark.parametrize("kind", ["lora", "diff", "oft", "dora"])
@pytest.mark.parametrize("way", list(WAYS))
def test_with_a_forward_of_its_own_they_are_refused_by_name(way: str, kind: str, tmp_path: Path) -> None:
    made = nn.ModuleDict({"x": WAYS[way](Causal(4, 4, 3))}).eval().requires_grad_(False)
    x = torch.randn(1, 4, 6)
    plain = run(made["x"], x)
    tensors = {
        "lora": {"x.lora_down.weight": torch.randn(2, 4, 3), "x.lora_up.weight": torch.randn(4, 2, 1)},
        "diff": {"x.diff": torch.randn(4, 4, 3)},
        "oft": {"x.oft_blocks": torch.randn(2, 2, 2)},
    }
    tensors["dora"] = {**tensors["lora"], "x.dora_scale": torch.rand(4, 1, 1)}
    path = str(write(tmp_path / "a.safetensors", tensors[kind]))
    assert offload.load_loras_into_model(made, path) == []
    assert "x: its weight is computed by a parametrization" in made._loras_errors[0][1], made._loras_errors
    assert same_bits(run(made["x"], x), plain)
