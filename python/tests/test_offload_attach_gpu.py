"""Loaded models on a GPU: locked in the page cache, staged from the file, or changed since, always the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attach_models import MlpBlock, Towered, same_bits
from torch import nn

import weightstream
from weightstream import offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]

DIM = 1024


def made(seed: int = 0) -> Towered:
    """A tower of some 16 MiB a block in bf16."""
    torch.manual_seed(seed)
    return Towered([MlpBlock(DIM) for _ in range(6)], DIM).to(torch.bfloat16).eval().requires_grad_(False)


def run(model: nn.Module) -> torch.Tensor:
    x = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).cuda()
    with torch.inference_mode():
        return model(x)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("changed", [False, True])
def test_the_same_bits_wherever_they_are_read(tmp_path: Path, pinned: bool, changed: bool) -> None:
    reference = made()
    offload.save_model(reference, tmp_path / "x.safetensors")
    model = made(seed=1)
    offload.load_model_data(model, tmp_path / "x.safetensors")
    model.requires_grad_(False)
    if changed:
        for one in (reference, model):
            next(one.blocks[3].parameters()).mul_(2)
    expected = run(reference.cuda())
    with weightstream.attach(model, device="cuda", budget="64MiB", pinned_memory=pinned) as attachment:
        report = attachment.report()
        assert (report["host"]["registered_bytes"] > 0) is pinned, report["host"]
        if not pinned:
            assert report["in_files"] and report["host"]["file_bytes"] > 0
        for _ in range(3):
            assert same_bits(run(model), expected)
    for name, tensor in reference.cpu().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
