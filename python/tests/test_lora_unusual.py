"""Adapters where layers, files or callers are unusual: forwards that do more than multiply, parts of fused layers, empty batches,
weights that are written, layers that are replaced, threads, and arguments that mean nothing."""

from __future__ import annotations

import copy
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import adapter, inputs, model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from weightstream import StateError, WeightsError, offload, profile_type

WIDTH = 16


class Gain(nn.Linear):
    """Half its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.5, self.bias)


class Reflecting(nn.Conv2d):
    """A convolution that pads by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.weight, self.bias)


class Causal(nn.Conv3d):
    """As in VAEs of videos: padding in time at one end."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1, 2, 0)))


class Fused(nn.Module):
    """Query, key and value in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv(x)


class Attention(nn.Module):
    """Where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Fused()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def written(folder: Path, tensors: dict[str, Tensor], metadata: Any = None) -> str:
    path = folder / "adapter.safetensors"
    save_file({key: value.clone() for key, value in tensors.items()}, path, metadata=metadata)
    return str(path)


def check(layers: nn.Module, path: str, deltas: dict[str, Tensor], *given: Tensor) -> None:
    """That a model with the file gives what the merged one gives in float64, and has its own bits when it is unloaded."""
    layers.eval().requires_grad_(False)
    before = layers(*given)
    merged = copy.deepcopy(layers).double()
    for name, parameter in merged.named_parameters():
        if name in deltas:
            parameter.data.add_(deltas[name].reshape(parameter.shape))
    expected = merged(*(one.double() for one in given))
    assert offload.load_loras_into_model(layers, [path]) == [path], layers._loras_errors
    torch.testing.assert_close(layers(*given).double(), expected, rtol=1e-4, atol=1e-5)
    assert layers(*(one[:0] for one in given)).numel() == 0
    offload.unload_loras_from_model(layers)
    assert torch.equal(layers(*given), before)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: Gain(32, 32), (3, 32)),
        (lambda: Reflecting(8, 8, 3, padding=1), (2, 8, 6, 6)),
        (lambda: Causal(8, 8, 3), (2, 8, 3, 6, 6)),
    ],
)
def test_layers_that_do_more_than_multiply_get_a_changed_weight(layer: Any, shape: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(layer())
    outputs, columns, *kernel = made[0].weight.shape
    down, up = numbers(3, columns, *kernel), numbers(outputs, 3, *[1] * len(kernel), seed=1)
    delta = torch.einsum("or,ri...->oi...", up.reshape(outputs, 3).double(), down.double())
    path = written(tmp_path, {"0.lora_A.weight": down, "0.lora_B.weight": up})
    check(made, path, {"0.weight": delta}, numbers(*shape, seed=2))


def test_a_kronecker_product_with_a_core(tmp_path: Path) -> None:
    first, core, left, right = numbers(2, 2), numbers(2, 2, 3, 3, seed=1), numbers(2, 8, seed=2), numbers(2, 4, seed=3)
    second = torch.einsum("ij...,ip,jr->pr...", core.double(), left.double(), right.double()).contiguous()
    delta = torch.kron(first.double().reshape(2, 2, 1, 1), second)
    names = {"lokr_w1": first, "lokr_t2": core, "lokr_w2_a": left, "lokr_w2_b": right}
    path = written(tmp_path, {f"0.{name}": tensor for name, tensor in names.items()})
    check(nn.Sequential(nn.Conv2d(8, 16, 3, padding=1)), path, {"0.weight": delta}, numbers(2, 8, 5, 5, seed=4))


@pytest.mark.parametrize(("part", "first"), [("q", 0), ("k", WIDTH), ("v", 2 * WIDTH)])
def test_a_rotation_of_a_part_of_a_fused_layer(part: str, first: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = Attention()
    blocks = numbers(4, 4, 4).double()
    skew, one = blocks - blocks.transpose(1, 2), torch.eye(4, dtype=torch.float64)
    turned = (one + skew) @ torch.linalg.inv(one - skew)
    own = made.attn.qkv.weight.detach()[first : first + WIDTH].double()
    delta = torch.zeros(3 * WIDTH, WIDTH, dtype=torch.float64)
    delta[first : first + WIDTH] = torch.einsum("knm,kni->kmi", turned, own.view(4, 4, WIDTH)).reshape(own.shape) - own
    path = written(tmp_path, {f"attn.to_{part}.oft_blocks": blocks.float()})
    check(made, path, {"attn.qkv.weight": delta}, numbers(3, WIDTH, seed=5))


@pytest.mark.parametrize(
    "tensors",
    [
        {"0.lokr_w1": numbers(4, 4), "0.lokr_w2": numbers(16, 8)},
        {"0.oft_blocks": numbers(8, 8, 8)},
        {"0.lora_A.weight": numbers(4, 32), "0.lora_B.weight": numbers(64, 4)},
    ],
    ids=["lokr", "oft", "lora"],
)
def test_an_empty_batch(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(32, 64)).eval().requires_grad_(False)
    offload.load_loras_into_model(layers, [written(tmp_path, tensors)])
    assert layers(torch.zeros(0, 32)).shape == (0, 64) and layers(torch.zeros(2, 0, 32)).shape == (2, 0, 64)


def test_magnitudes_follow_a_weight_that_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 24)).eval().requires_grad_(False)
    down, up, scale = numbers(4, 32), numbers(24, 4, seed=1), numbers(24, 1, seed=2).abs() + 1
    names = {"lora_A.weight": down, "lora_B.weight": up, "dora_scale": scale}
    path = written(tmp_path, {f"0.{name}": tensor for name, tensor in names.items()})
    offload.load_loras_into_model(layers, [path])
    x = numbers(5, 32, seed=3)
    other = {"0.weight": numbers(24, 32, seed=4), "0.bias": numbers(24, seed=5)}

    def expect() -> None:
        changed = layers[0].weight.double() + up.double() @ down.double()
        changed = changed * (scale.double() / changed.norm(dim=1, keepdim=True))
        expected = x.double() @ changed.t() + layers[0].bias.double()
        torch.testing.assert_close(layers(x).double(), expected, rtol=1e-4, atol=1e-5)

    expect()
    layers.load_state_dict(other)
    expect()
    layers[0].weight.mul_(2)
    expect()
    layers[0].weight.data = numbers(24, 32, seed=6)
    expect()


def test_threads_that_load_at_once_leave_one_of_their_adapters_and_no_other(tmp_path: Path) -> None:
    made = model().eval().requires_grad_(False)
    x = inputs()
    before = made(x)
    paths = []
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        paths.append(written(tmp_path / str(number), adapter("lora", seed=number).tensors))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(3):
            threads = [threading.Thread(target=offload.load_loras_into_model, args=(made, [path])) for path in paths]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not torch.equal(made(x), before)
            offload.unload_loras_from_model(made)
            assert torch.equal(made(x), before)
    finally:
        sys.setswitchinterval(interval)


def test_a_layer_that_was_replaced_is_told(tmp_path: Path) -> None:
    made = model().eval().requires_grad_(False)
    path = written(tmp_path, adapter("lora").tensors)
    offload.load_loras_into_model(made, [path])
    made.blocks[1].up = copy.deepcopy(nn.Linear(32, 64))
    with pytest.raises(StateError, match=r"blocks\.1\.up is another layer"):
        offload.activate_loras(made, ["0"], [0.5])
    assert offload.load_loras_into_model(made, [path]) == [path]
    offload.activate_loras(made, ["0"], [0.5])


def test_a_model_with_adapters_is_not_quantized_nor_changed_by_the_attempt(tmp_path: Path) -> None:
    made = model().eval().requires_grad_(False)
    offload.load_loras_into_model(made, [written(tmp_path, adapter("lora").tensors)])
    with pytest.raises(StateError, match="has LoRAs.*load them after it"):
        offload.quantize(made, "qint8")
    with pytest.raises(StateError, match="transformer has LoRAs"):
        offload.profile({"transformer": made}, profile_type.LowRAM_LowVRAM, device="host", loras="transformer")
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}


def test_what_a_header_says_and_is_not_followed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.Sequential(nn.Linear(32, 32)).eval().requires_grad_(False)
    tensors = {"0.lora_A.weight": numbers(4, 32), "0.lora_B.weight": numbers(32, 4)}
    caplog.set_level(logging.WARNING, logger="weightstream.offload")
    path = written(tmp_path, tensors, {"lora_alpha": "abc"})
    assert offload.load_loras_into_model(layers, [path]) == [path]
    assert "lora_alpha" in caplog.text and "abc" in caplog.text


def test_arguments_that_mean_nothing_are_refused_by_name(tmp_path: Path) -> None:
    made = model().eval().requires_grad_(False)
    path = written(tmp_path, adapter("lora").tensors)
    for wrong in (None, 3, b"x"):
        with pytest.raises(TypeError, match="lora_path"):
            offload.load_loras_into_model(made, wrong)  # type: ignore[arg-type]
    for name in ("check_only", "activate_all_loras", "ignore_model_variations", "pinnedLora"):
        with pytest.raises(TypeError, match=name):
            offload.load_loras_into_model(made, [path], **{name: "no"})
    offload.load_loras_into_model(made, [path])
    for wrong in (None, {"0": 1}, 1.5):
        with pytest.raises(TypeError, match="lora_nos"):
            offload.activate_loras(made, wrong)  # type: ignore[arg-type]
    for multiplier in (1e300, -1e39, float("inf"), float("nan")):
        with pytest.raises(WeightsError, match="multiplier 0"):
            offload.activate_loras(made, ["0"], [multiplier])
