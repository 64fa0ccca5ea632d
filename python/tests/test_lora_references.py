"""Files that LyCORIS and PEFT wrote, on layers that compute with them: what the layers merged by those libraries compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import weightstream
from weightstream import offload

_BESIDE = Path(__file__).parent / "merged"
"""Where a bundle for another machine has the corpus."""
CORPUS = _BESIDE if _BESIDE.is_dir() else Path(__file__).parents[2] / "crates/lora-runtime/tests/corpus/merged"
CONVOLUTIONS = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}


def layer(kind: str, shape: list[int], bias: bool) -> nn.Module:
    if kind == "linear":
        return nn.Linear(shape[1], shape[0], bias)
    if kind == "norm":
        return nn.LayerNorm(shape[0])
    if kind == "embedding":
        return nn.Embedding(*shape)
    return CONVOLUTIONS[kind](shape[1], shape[0], tuple(shape[2:]), padding=1, bias=bias)


class Layers(nn.Module):
    """The corpus's layers, in blocks that stream one after the other."""

    def __init__(self, described: list[Any]) -> None:
        super().__init__()
        for name, kind, shape, bias in described:
            setattr(self, name, layer(kind, shape, bias))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, name: str, x: Tensor) -> Tensor:
        for block in self.blocks:
            block(torch.zeros(1, 16))
        return getattr(self, name)(x)


def input_of(kind: str, shape: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "embedding":
        return torch.randint(0, shape[0], (3, 5), generator=generator)
    sizes = {"linear": [3, 5], "norm": [3]}.get(kind)
    if sizes is not None:
        return torch.randn(*sizes, shape[-1], generator=generator)
    return torch.randn(2, shape[1], *[6] * (len(shape) - 2), generator=generator)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.safetensors")), ids=lambda path: path.stem)
def test_layers_compute_what_the_trainers_merge(path: Path, tmp_path: Path) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    described = json.loads(metadata["layers"])
    kinds = {name: (kind, shape) for name, kind, shape, _ in described}
    torch.manual_seed(0)
    made = Layers(described).eval().requires_grad_(False)
    adapter = {key: tensor for key, tensor in tensors.items() if "::" not in key}
    for key, value in tensors.items():
        if key.startswith("base::"):
            name, _, part = key.removeprefix("base::").rpartition(".")
            getattr(getattr(made, name), part).copy_(value)
    save_file(
        adapter,
        tmp_path / "adapter_model.safetensors",
        {k: v for k, v in metadata.items() if k not in ("layers", "config")},
    )
    if "config" in metadata:
        (tmp_path / "adapter_config.json").write_text(metadata["config"])
    given = str(tmp_path / "adapter_model.safetensors")
    wanted: dict[tuple[str, float], dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("merged::"):
            _, what, multiplier = key.split("::")
            name, _, part = what.rpartition(".")
            wanted.setdefault((name, float(multiplier)), {})[part] = value.double()
    assert wanted
    for streams in (False, True):
        attachment = weightstream.attach(made, device=host(), budget=24 << 10) if streams else None
        assert offload.load_loras_into_model(made, given) == [given], made._loras_errors
        for (name, multiplier), parts in wanted.items():
            kind, shape = kinds[name]
            reference = layer(kind, shape, getattr(getattr(made, name), "bias", None) is not None).double()
            for part in ("weight", "bias"):
                value = parts.get(part)
                if value is None and getattr(made, name)._parameters.get(part) is not None:
                    value = getattr(getattr(made, name), part).clone().double()
                if value is not None:
                    getattr(reference, part).data.copy_(value)
            offload.activate_loras(made, [0], [multiplier])
            x = input_of(kind, shape)
            with torch.no_grad():
                expected = reference(x if kind == "embedding" else x.double())
                got = run(made, name, x)
            assert float((got - expected).abs().max() / expected.abs().max()) < 3e-5, (name, multiplier)
        offload.unload_loras_from_model(made)
        if attachment is not None:
            attachment.detach()
