"""Loading where the program's default device is another than the CPU: what is read, converted and quantized lies in CPU memory
all the same. The meta device stands for any other here: it has no memory either that the CPU could write to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from offload_files import raw_bytes, same, write
from torch import nn

import weightstream
from weightstream import offload


@contextmanager
def default_device(how: str) -> Iterator[None]:
    if how == "context":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval().requires_grad_(False)


HOW = pytest.mark.parametrize("how", ["context", "set_default_device"])


@HOW
def test_tensors_of_files_are_in_cpu_memory(tmp_path: Path, how: str) -> None:
    tensors = {
        "aligned": torch.arange(4.0),
        "byte": torch.ones(1, dtype=torch.uint8),
        "misaligned": torch.arange(3.0),
        "none": torch.zeros(0, 3),
    }
    path = write(tmp_path / "x.safetensors", tensors)
    torch.save(tensors, tmp_path / "x.pt")
    for file in (path, tmp_path / "x.pt"):
        with default_device(how):
            weights, _, _ = offload.load_sd(file)
        assert {name: raw_bytes(tensor) for name, tensor in weights.items()} == {
            name: raw_bytes(tensor) for name, tensor in tensors.items()
        }


@HOW
@pytest.mark.parametrize("quantized", [False, True])
def test_models_are_converted_quantized_saved_and_attached(tmp_path: Path, how: str, quantized: bool) -> None:
    offload.save_model(linears(), tmp_path / "x.safetensors")
    with torch.device("meta"):
        expected, model, again = linears(), linears(), linears()
    offload.load_model_data(expected, tmp_path / "x.safetensors", do_quantize=quantized)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with default_device(how):
        offload.load_model_data(model, tmp_path / "x.safetensors", do_quantize=quantized)
        offload.save_model(model, tmp_path / "y.safetensors")
        offload.load_model_data(again, tmp_path / "y.safetensors")
        for loaded in (model, again):
            assert same(loaded(x), expected(x))
        with weightstream.attach(again, device="host", budget="64KiB"):
            assert same(again(x), expected(x))
    assert same(again(x), expected(x))


@HOW
def test_models_are_built_in_cpu_memory(tmp_path: Path, how: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    offload.save_model(model, tmp_path / "x.safetensors")
    with default_device(how):
        loaded = offload.fast_load_transformers_model(tmp_path / "x.safetensors", default_dtype=None)
    tokens = torch.arange(8)[None]
    assert same(loaded(tokens).logits, model(tokens).logits)
