"""A small model with one layer of each kind that may stay packed, and files for it."""

from __future__ import annotations

from typing import Any

import torch
from quant_files import fp8_parts, int8_parts
from torch import Tensor, nn

from weightstream.offload.building import empty_weights

FILES = (
    "awq", "bnb", "compressed-tensors-int", "experts", "fp8", "fp8-plain", "gptq", "gptq-3bit", "gptq-v2", "int8", "mxfp8",
    "nunchaku", "nvfp4", "nvfp4-compressed-tensors", "nvfp4-modelopt", "quanto", "torchao", "w4a8", "rotation",
)  # fmt: skip
ALL = ("embed.weight", "blocks.0.weight", "blocks.2.weight", "conv.weight", "table")


class Model(nn.Module):
    """One layer of each kind that may stay packed, and one parameter that may not."""

    def __init__(self, width: int = 32, vocabulary: int = 40, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.LayerNorm(width)
        self.table = nn.Parameter(torch.zeros(6, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        for block in self.blocks:
            x = self.norm(x + block(x))
        x = x + self.conv(x.view(-1, 1, 4, 8)).mean() + self.table.sum(0)
        return self.head(x)


def empty(**kwargs: Any) -> Model:
    with empty_weights():
        return Model(**kwargs).eval()


def quantized(names: tuple[str, ...], seed: int = 0, tied: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of the model, those of `names` in INT8 or FP8; and the numbers that all of them stand for."""
    torch.manual_seed(seed)
    plain = {name: tensor.detach().clone() for name, tensor in Model(tied=tied).state_dict().items()}
    plain["table"] = torch.randn(6, 32)
    if tied:
        del plain["head.weight"]
    file = dict(plain)
    for number, name in enumerate(names):
        shape = plain.pop(name).shape
        flat = (fp8_parts if number % 2 else int8_parts)(shape[0], shape[1:].numel(), name, seed + number)
        del file[name]
        file.update({key: part.view(shape) if key == name else part for key, part in flat.items()})
        plain[name] = (file[name].float().view(shape[0], -1) * file[f"{name}_scale"].reshape(-1, 1)).view(shape)
    return file, plain


def reference(plain: dict[str, Tensor], **kwargs: Any) -> Model:
    model = Model(**kwargs).eval()
    model.load_state_dict(plain, strict=not kwargs)
    return model


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
