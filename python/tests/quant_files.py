"""Quantized weights for tests: small ones made here, and those of the corpus with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightstream._native import Checkpoint
from weightstream.offload.tensors import map_tensors
from weightstream.quant import QuantLinear
from weightstream.quant.finding import Found, Packed, find

_BESIDE = Path(__file__).parent / "formats"
"""Where a bundle for another machine has the corpus."""
CORPUS = _BESIDE if _BESIDE.is_dir() else Path(__file__).parents[2] / "crates/quant-router/tests/corpus/formats"


def corpus(name: str) -> tuple[Found, dict[str, Tensor], int]:
    """What is found in a file of the corpus, the numbers its weights stand for, and by how many steps of f32 they may be off."""
    if name == "mxfp8" and not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("this PyTorch has no type for the scales of MXFP8")
    checkpoint = Checkpoint.open([str(CORPUS / f"{name}.safetensors")])
    tensors, _, _ = map_tensors(checkpoint, checkpoint.entries())
    metadata = checkpoint.metadata()[0]
    expected = {key.removeprefix("expected."): value for key, value in tensors.items() if key.startswith("expected.")}
    given = {key: value for key, value in tensors.items() if not key.startswith("expected.")}
    return find(given, metadata), expected, int(metadata["ulps"])


def steps_apart(have: Tensor, want: Tensor) -> int:
    """The most steps of f32 between two tensors; numbers that are none count as alike."""
    both = have.isnan() & want.isnan()

    def place(numbers: Tensor) -> Tensor:
        bits = numbers.contiguous().view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    apart = (place(have) - place(want)).abs().masked_fill(both, 0)
    return int(apart.max()) if apart.numel() else 0


def int8_parts(rows: int, columns: int, name: str = "weight", seed: int = 0) -> dict[str, Tensor]:
    """An INT8 weight with a scale a row."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=generator)
    scale = numbers.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
    return {name: (numbers / scale).round().to(torch.int8), f"{name}_scale": scale}


def int8_numbers(parts: dict[str, Tensor], name: str = "weight") -> Tensor:
    return parts[name].float() * parts[f"{name}_scale"]


def fp8_parts(rows: int, columns: int, name: str = "weight", seed: int = 0) -> dict[str, Tensor]:
    """An FP8 weight with one scale."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=generator)
    scale = numbers.abs().max() / 448
    return {name: (numbers / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def only(parts: dict[str, Tensor], **kwargs: Any) -> Packed:
    """The one weight that these tensors make."""
    (packed,) = find(parts, **kwargs).packed.values()
    return packed


def int8_linear(rows: int, columns: int, seed: int = 0, bias: bool = False, dtype: Any = torch.float32) -> QuantLinear:
    packed = only(int8_parts(rows, columns, seed=seed))
    add = torch.randn(rows, generator=torch.Generator().manual_seed(seed + 1)).to(dtype) if bias else None
    return QuantLinear.from_parts(packed.weight, packed.parts, add, dtype=dtype)


class Blocks(nn.Module):
    """A tower of quantized linear layers between norms."""

    def __init__(self, blocks: int = 6, width: int = 128, bias: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(int8_linear(width, width, number, bias), nn.GELU(), int8_linear(width, width, 99 + number))
            for number in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x
