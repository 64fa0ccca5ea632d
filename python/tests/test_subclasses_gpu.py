"""Tensor subclasses on a GPU: those that stay as they are, and those that repack themselves for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attach_models import Towered, same_bits
from test_subclasses import Quantized
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

import weightstream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]

DIM = 1024


class Repacking(torch.Tensor):
    """An int8 weight that lies transposed on a GPU, as kernels like it, and plain on the CPU."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, packed: bool) -> Repacking:
        shape = codes.shape[::-1] if packed else codes.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, packed: bool) -> None:
        self.codes, self.packed = codes, packed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes"], self.packed

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: Any, size: Any, stride: Any) -> Repacking:
        return cls(inner["codes"], context)

    def dense(self) -> torch.Tensor:
        return (self.codes.t() if self.packed else self.codes).float() / 64

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            made = cls(func(args[0].codes), args[0].packed)
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func is torch.ops.aten._to_copy.default:
            codes, packed = args[0].codes, torch.device(kwargs["device"]).type == "cuda"
            if packed != args[0].packed:
                codes = codes.t().contiguous()
            return cls(codes.to(kwargs["device"]), packed)
        raise NotImplementedError(func)


class Linear(nn.Module):
    """A linear layer on such a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x, self.weight.dense())


def codes() -> torch.Tensor:
    """Random int8 codes of a rectangular weight."""
    return torch.randint(-8, 8, (DIM, DIM), dtype=torch.int8)


@pytest.mark.parametrize("kind", ["plain", "repacking"])
def test_inner_tensors_stream_and_come_back(kind: str) -> None:
    torch.manual_seed(0)
    make = {"plain": lambda: Quantized(codes(), torch.rand(DIM, 1)), "repacking": lambda: Repacking(codes(), False)}
    model = Towered([Linear(make[kind]()) for _ in range(16)], DIM)
    before = [block.weight.codes.clone() for block in model.blocks]
    x = torch.randn(2, 8).cuda()

    def reference() -> torch.Tensor:
        h = F.linear(x, model.stem.weight.cuda(), model.stem.bias.cuda())
        for block in model.blocks:
            h = h + F.linear(h, block.weight.to("cuda").dense())
        return F.linear(h, model.head.weight.cuda(), model.head.bias.cuda())

    # Not in inference mode, in which `to` of a wrapper is not taken apart into the operators that it knows.
    with torch.no_grad():
        expected = reference()
    with weightstream.attach(model, device="cuda", budget="12MiB") as attachment:
        assert all(block.weight.is_cuda and isinstance(block.weight, (Quantized, Repacking)) for block in model.blocks)
        with torch.inference_mode():
            for _ in range(4):
                assert torch.equal(model(x), expected)
        assert attachment.stats()["copies"] > 0
        state = model.state_dict()
        assert all(same_bits(state[f"blocks.{i}.weight"].codes.cpu(), want) for i, want in enumerate(before))
    for block, want in zip(model.blocks, before):
        assert block.weight.device.type == "cpu" and isinstance(block.weight, nn.Parameter)
        assert same_bits(block.weight.codes, want)
        assert not getattr(block.weight, "packed", False)
