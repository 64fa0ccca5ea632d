"""Layouts that only a model's configuration names: beside the file, in its metadata, and in what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from offload_files import write
from quant_files import CORPUS
from torch import nn

from weightstream import QuantizationError, offload
from weightstream._native import Checkpoint
from weightstream.offload.building import empty_weights
from weightstream.offload.tensors import map_tensors

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}


def layer(name: str, module: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one layer of a file of the corpus, as those of `fc`, and its numbers."""
    checkpoint = Checkpoint.open([str(CORPUS / f"{name}.safetensors")])
    tensors, _, _ = map_tensors(checkpoint, checkpoint.entries())
    given = {
        key.replace(module, "fc", 1): tensor.clone() for key, tensor in tensors.items() if key.startswith(module + ".")
    }
    return given, tensors[f"expected.{module}.weight"]


def model(shape: torch.Size, bias: bool) -> nn.Module:
    with empty_weights():
        made = nn.Module()
        made.fc = nn.Linear(shape[1], shape[0], bias=bias)
    return made


CASES = [("nvfp4-modelopt", "tiles", MODELOPT), ("nvfp4-modelopt", "odd", MODELOPT), ("gptq-v2", "shuffled4", V2)]


@pytest.mark.parametrize(("name", "module", "config"), CASES)
@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json", "metadata"])
def test_a_configuration_names_the_layout(name: str, module: str, config: dict, where: str, tmp_path: Path) -> None:
    tensors, expected = layer(name, module)
    metadata = {"quantization_config": json.dumps(config)} if where == "metadata" else None
    path = write(tmp_path / "model.safetensors", tensors, metadata)
    if where == "config.json":
        (tmp_path / where).write_text(json.dumps({"quantization_config": config}))
    elif where != "metadata":
        if config is V2:
            return  # ModelOpt's own file
        (tmp_path / where).write_text(json.dumps({"producer": {}, "quantization": {"quant_algo": "NVFP4"}}))
    loaded = model(expected.shape, "fc.bias" in tensors)
    offload.load_model_data(loaded, path, default_dtype=torch.float32)
    assert torch.equal((loaded.fc.weight + 0).nan_to_num(7), expected.nan_to_num(7))
    # What is saved says it itself.
    (tmp_path / "elsewhere").mkdir()
    saved = tmp_path / "elsewhere" / "saved.safetensors"
    offload.save_model(loaded, saved)
    again = model(expected.shape, "fc.bias" in tensors)
    offload.load_model_data(again, saved, default_dtype=torch.float32)
    assert torch.equal((again.fc.weight + 0).nan_to_num(7), expected.nan_to_num(7))


def test_scales_in_rows_are_refused_where_nothing_names_them(tmp_path: Path) -> None:
    tensors, expected = layer("nvfp4-modelopt", "odd")
    path = write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("no JSON")
    with pytest.raises(QuantizationError, match=r"fc\.weight.*quantization_config"):
        offload.load_model_data(model(expected.shape, False), path)
