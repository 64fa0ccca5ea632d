"""Layers that other libraries quantized attach and stream as they are, each against its own resident run.

diffusers and torchao are there always; the others are skipped where they are not installed, and
`cargo xtask test --real-files` installs them all.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attach_models import Towered, attached, host, inputs, same_bits
from torch import nn

from weightstream.ownership import collect
from weightstream.towers import find_towers

DIM = 128


def package(name: str) -> Any:
    """A package that is installed on request only."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("WEIGHTSTREAM_REQUIRE_FILES") == "1":
            raise
        pytest.skip(f"{name} is not installed: `cargo xtask test --real-files` brings it")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def floats(dtype: torch.dtype = torch.bfloat16) -> Towered:
    torch.manual_seed(0)
    return Towered([Block() for _ in range(6)], dim=DIM).to(dtype).eval()


def replaced(make: Callable[[nn.Linear], nn.Module]) -> Towered:
    """The model with other layers in the place of its blocks' linear ones."""
    model = floats()
    for block in model.blocks:
        block.up, block.down = make(block.up), make(block.down)
    return model


def streams_as_it_is(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Bit-equal outputs at two thirds of the bytes, the same objects and state dict afterwards."""
    x = inputs().to(dtype)
    with torch.no_grad():  # not inference_mode, in which some of these libraries cannot run
        expected = model(x)
    parameters, state = dict(model.named_parameters()), model.state_dict()
    total = sum(owned.nbytes for owned in collect(model, find_towers(model)).tensors)
    with attached(model, device=host(), budget=total * 2 // 3) as attachment, torch.no_grad():
        for _ in range(3):
            assert same_bits(model(x), expected)
        assert attachment.stats()["copies"] > 0
        assert list(model.state_dict()) == list(state)
    with torch.no_grad():
        assert same_bits(model(x), expected)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    after = model.state_dict()
    for name, value in state.items():
        if type(value) is torch.Tensor and value.device.type == "cpu":
            assert same_bits(after[name], value), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_layers_of_diffusers(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    layers = pytest.importorskip("diffusers.quantizers.gguf.utils")
    blocks = gguf.GGMLQuantizationType[kind]

    def make(linear: nn.Linear) -> nn.Module:
        bias = linear.bias is not None
        layer = layers.GGUFLinear(linear.in_features, linear.out_features, bias=bias, compute_dtype=torch.bfloat16)
        packed = torch.from_numpy(gguf.quants.quantize(linear.weight.detach().float().numpy(), blocks))
        layer.weight = layers.GGUFParameter(packed, quant_type=blocks)
        if bias:
            layer.bias = linear.bias
        return layer

    streams_as_it_is(replaced(make))


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao(config: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = floats()
    torchao.quantize_(model.blocks, getattr(torchao, config)())
    streams_as_it_is(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qint8", "qint4", "qint2", "qfloat8"])
def test_quanto(kind: str, dtype: torch.dtype) -> None:
    quanto = package("optimum.quanto")
    model = floats(dtype)
    quanto.quantize(model.blocks, weights=getattr(quanto, kind))
    quanto.freeze(model)
    streams_as_it_is(model, dtype)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bits(kind: str, nested: bool) -> None:
    bnb = package("bitsandbytes")

    def make(linear: nn.Linear) -> nn.Module:
        bias = linear.bias is not None
        layer = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias, torch.bfloat16, compress_statistics=nested, quant_type=kind
        )
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    streams_as_it_is(replaced(make))


@pytest.mark.parametrize("ran", [False, True])
def test_bitsandbytes_8_bits(ran: bool) -> None:
    bnb = package("bitsandbytes")

    def make(linear: nn.Linear) -> nn.Module:
        bias = linear.bias is not None
        layer = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias, has_fp16_weights=False)
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    model = replaced(make)
    if ran:
        with torch.no_grad():
            model(inputs().bfloat16())
    streams_as_it_is(model)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("kind", ["int8", "uint4", "float8_e4m3fn", "int5"])
def test_sdnq(kind: str, products: bool) -> None:
    sdnq = package("sdnq")
    settings = dict(torch_dtype=torch.bfloat16, use_quantized_matmul=products, add_skip_keys=False)
    streams_as_it_is(sdnq.sdnq_post_load_quant(floats(), weights_dtype=kind, **settings))
