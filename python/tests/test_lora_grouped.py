"""Adapters of convolutions in groups, whose rows meet the inputs of their own group alone: beside their weight, merged in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import run, same_bits
from offload_files import write
from quant_files import only
from torch import Tensor, nn

from weightstream import offload
from weightstream.quant import QuantConv2d


def convolution(base: str, bias: bool = True) -> nn.ModuleDict:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3, padding=1, groups=2, padding_mode="circular", bias=bias)
    if base == "int8":
        data = torch.randint(-127, 128, (8, 2, 3, 3), dtype=torch.int8)
        packed = only({"weight": data, "weight_scale": torch.rand(8, 1) / 200})
        layer = QuantConv2d.from_parts(packed.weight, packed.parts, layer.bias, like=layer, dtype=torch.float32)
    return nn.ModuleDict({"conv": layer}).requires_grad_(False)


def reference(made: nn.ModuleDict, weight: Tensor) -> nn.Conv2d:
    layer: Any = made["conv"]
    plain = nn.Conv2d(4, 8, 3, padding=1, groups=2, padding_mode="circular", bias=layer.bias is not None).double()
    plain.requires_grad_(False).weight.copy_(weight)
    if layer.bias is not None:
        plain.bias.copy_(layer.bias)
    return plain


def weight_of(made: nn.ModuleDict) -> Tensor:
    return made["conv"].weight.clone().double()


def check(made: nn.ModuleDict, tensors: dict[str, Tensor], change: Any, folder: Path) -> None:
    x = torch.randn(2, 4, 6, 6)
    plain, weight = run(made["conv"], x), weight_of(made)
    path = str(write(folder / "a.safetensors", tensors))
    assert offload.load_loras_into_model(made, path) == [path], made._loras_errors
    for multiplier in (1.0, 0.3, -1.0):
        offload.activate_loras(made, [0], [multiplier])
        wanted = run(reference(made, change(weight, multiplier)), x.double())
        apart = float((run(made["conv"], x) - wanted).abs().max() / wanted.abs().max())
        assert apart < 3e-5, (multiplier, apart)
    offload.unload_loras_from_model(made)
    assert same_bits(run(made["conv"], x), plain)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("base", ["f32", "int8"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_rotations_of_outputs_within_a_group_and_across(size: int, base: str, bias: bool, tmp_path: Path) -> None:
    made = convolution(base, bias)
    blocks, rescale = torch.randn(8 // size, size, size) * 0.2, 1 + torch.randn(8) * 0.2
    skew = (blocks - blocks.transpose(1, 2)).double()
    one = torch.eye(size, dtype=torch.float64)
    turned = (one + skew) @ torch.linalg.inv(one - skew)

    def change(weight: Tensor, multiplier: float) -> Tensor:
        whole = torch.block_diag(*(one + multiplier * (turned - one))).t()
        factors = 1 + multiplier * (rescale.double() - 1)
        return (factors[:, None] * (whole @ weight.flatten(1))).reshape(weight.shape)

    check(made, {"conv.oft_blocks": blocks, "conv.rescale": rescale.reshape(8, 1, 1, 1)}, change, tmp_path)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_butterflies_of_outputs_within_a_group_and_across(stages: int, tmp_path: Path) -> None:
    made = convolution("f32")
    blocks = torch.randn(stages, 4, 2, 2) * 0.3
    skew = (blocks - blocks.transpose(2, 3)).double()
    one = torch.eye(2, dtype=torch.float64)
    turned = (one + skew) @ torch.linalg.inv(one - skew)

    def change(weight: Tensor, multiplier: float) -> Tensor:
        rows = weight.flatten(1)
        for stage in range(stages):
            apart = 2**stage
            order = torch.arange(8).reshape(-1, 2, apart).transpose(1, 2).flatten()
            gather = torch.eye(8, dtype=torch.float64)[order]
            rows = gather.t() @ torch.block_diag(*(one + multiplier * (turned[stage] - one))) @ gather @ rows
        return rows.reshape(weight.shape)

    check(made, {"conv.oft_blocks": blocks}, change, tmp_path)


@pytest.mark.parametrize("base", ["f32", "int8"])
@pytest.mark.parametrize("axis", [0, 1])
def test_magnitudes(axis: int, base: str, tmp_path: Path) -> None:
    made = convolution(base)
    down, up = torch.randn(3, 2, 3, 3) * 0.3, torch.randn(8, 3, 1, 1) * 0.3
    magnitude = torch.rand(8, 1, 1, 1) + 0.5 if axis == 0 else torch.rand(1, 2, 1, 1) + 0.5
    delta = (up.flatten(1).double() @ down.flatten(1).double()).reshape(8, 2, 3, 3)
    others = [dim for dim in range(4) if dim != axis]

    def change(weight: Tensor, multiplier: float) -> Tensor:
        before = weight.square().sum(others, keepdim=True).sqrt()
        moved = weight + multiplier * delta
        wanted = before + multiplier * (magnitude.double() - before)
        return wanted * moved / moved.square().sum(others, keepdim=True).sqrt()

    tensors = {"conv.lora_down.weight": down, "conv.lora_up.weight": up, "conv.dora_scale": magnitude}
    check(made, tensors, change, tmp_path)


def test_factors_of_the_inputs_of_one_group_are_refused(tmp_path: Path) -> None:
    made = convolution("f32")
    x = torch.randn(1, 4, 5, 5)
    plain = run(made["conv"], x)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"feedforward_modules": ["conv"]}))
    path = str(write(tmp_path / "a.safetensors", {"conv.ia3_l": torch.rand(1, 2, 1, 1)}))
    assert offload.load_loras_into_model(made, path) == []
    assert "conv: it is a convolution in groups" in made._loras_errors[0][1], made._loras_errors
    assert same_bits(run(made["conv"], x), plain)
