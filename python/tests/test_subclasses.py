"""Tensor subclasses that are made of inner tensors: the inner tensors stream, the wrapper is built around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attach_models import Towered, attached, inputs, run, same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

import weightstream


class Quantized(torch.Tensor):
    """An int8 weight with a scale a row."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=scale.dtype, device=codes.device, requires_grad=False
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes = codes
        self.scale = scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantized:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: Any, size: Any, stride: Any) -> Quantized:
        return cls(inner["codes"], inner["scale"])

    def dense(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            made = cls(func(args[0].codes), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func is torch.ops.aten._to_copy.default:
            moved = {name: value for name, value in kwargs.items() if name != "dtype"}
            return cls(func(args[0].codes, **moved), func(args[0].scale, **moved))
        plain = torch.utils._pytree.tree_map_only(Quantized, lambda q: q.dense(), (args, kwargs))
        return func(*plain[0], **plain[1])


class QuantizedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Quantized.of(torch.randn(64, 64)), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dense(), self.bias)


def quantized(blocks: int = 8) -> Towered:
    torch.manual_seed(0)
    return Towered([QuantizedLinear() for _ in range(blocks)])


def test_quantized_weights_stream() -> None:
    model = quantized()
    model.blocks[5].weight = model.blocks[1].weight
    x = inputs()
    expected = run(model, x)
    dense = [block.weight.dense() for block in model.blocks]
    parameters = dict(model.named_parameters())
    device = weightstream.HostDevice(bytes="1MiB", granularity=4096, order="random", poison=True)
    with weightstream.attach(model, device=device, budget="28KiB") as attachment:
        assert isinstance(model.blocks[0].weight, Quantized) and isinstance(model.blocks[0].weight, nn.Parameter)
        assert model.blocks[5].weight is model.blocks[1].weight
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.stats()["copies"] > 0
        state = model.state_dict()
        assert all(same_bits(state[f"blocks.{i}.weight"].dense(), dense[i]) for i in range(8))
    assert same_bits(run(model, x), expected)
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert model.blocks[5].weight is model.blocks[1].weight


def test_replaced_wrappers_are_named() -> None:
    model = quantized()
    with attached(model, budget="60KiB"):
        run(model, inputs())
        model.blocks[3].weight = nn.Parameter(Quantized.of(torch.zeros(64, 64) + 1), requires_grad=False)
        with pytest.raises(weightstream.StateError, match=r"blocks\.3\.weight"):
            run(model, inputs())


def test_torchao_weights() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = Towered([nn.Linear(64, 64) for _ in range(8)])
    torchao.quantize_(model.blocks, torchao.Int8WeightOnlyConfig())
    x = inputs()
    expected = run(model, x)
    state = {name: value for name, value in model.state_dict().items() if "bias" in name}
    with attached(model, budget="28KiB") as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.stats()["copies"] > 0
    assert same_bits(run(model, x), expected)
    assert state and all(same_bits(model.state_dict()[name], state[name]) for name in state)
