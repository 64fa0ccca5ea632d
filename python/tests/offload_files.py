"""What the loading tests share: safetensors files written byte by byte, and a small model."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from weightstream.offload.building import empty_weights

SPELLED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
if hasattr(torch, "float8_e8m0fnu"):  # from PyTorch 2.7 on
    SPELLED[torch.float8_e8m0fnu] = "F8_E8M0"


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements as they lie in memory."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Optional[Mapping[str, str]] = None,
    header_order: Optional[list[str]] = None,
    pad: int = 0,
    tail: bytes = b"",
) -> Path:
    """A safetensors file with the data in the order given, the header in any, and the header `pad` bytes longer."""
    entries: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        piece = raw_bytes(tensor)
        entries[name] = {
            "dtype": SPELLED[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    header = {name: entries[name] for name in header_order or entries}
    if metadata is not None:
        header = {"__metadata__": dict(metadata), **header}
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data + tail)
    return path


def encoded(value: Any) -> str:
    """Base64 of JSON, as models keep it in metadata."""
    return base64.b64encode(json.dumps(value).encode()).decode()


class Small(nn.Module):
    """Parameters in lists and outside, tied ones, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.arange(4.0) + 1, persistent=False)

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index) * self.frequencies
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))


def small(seed: int = 0) -> Small:
    """One with random weights, in eval mode."""
    torch.manual_seed(seed)
    model = Small().eval()
    with torch.no_grad():
        model.norm.running_mean.uniform_()
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def empty() -> Small:
    """One whose parameters have no data."""
    with empty_weights():
        return Small().eval()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Its state dict without the second names of tied weights."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}


def same(first: Tensor, second: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return first.dtype == second.dtype and first.shape == second.shape and raw_bytes(first) == raw_bytes(second)
