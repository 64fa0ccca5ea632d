"""What is written of a model with packed weights, and who can read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from offload_files import write
from quant_files import corpus
from quant_models import ALL, bits, empty, quantized
from torch import nn

from weightstream import NotAvailableError, offload
from weightstream._native import Checkpoint
from weightstream.quant import QuantLinear


def test_a_saved_model_says_all_that_it_needs(tmp_path: Path) -> None:
    found, _, _ = corpus("quanto")
    whole = {name: one for name, one in found.packed.items() if len(one.shape) == 2}
    model = nn.ModuleDict(
        {
            str(number): QuantLinear.from_parts(one.weight, one.parts, hints=one.hints)
            for number, one in enumerate(whole.values())
        }
    )
    model._config = {"width": 3}
    offload.save_model(model, tmp_path / "q.safetensors")
    (metadata,) = Checkpoint.open([str(tmp_path / "q.safetensors")]).metadata()
    assert metadata["quantization_format"] == "quanto"
    sd, kinds, _ = offload.load_sd(tmp_path / "q.safetensors")
    assert set(kinds) == set(model) and {kind["activations"] for kind in kinds.values()} == {"none"}
    assert {kind["weights"] for kind in kinds.values()} <= {"qint8", "qint4", "qint2", "qfloat8", "qfloat8_e5m2"}
    for name, layer in model.items():
        # As the readers of this layout look for it.
        assert any(key.startswith(f"{name}.weight._data") for key in sd) and f"{name}.weight._scale" in sd
        assert sd[f"{name}.input_scale"].shape == sd[f"{name}.output_scale"].shape == ()


def test_a_layer_that_no_file_could_describe_is_not_saved(tmp_path: Path) -> None:
    found, _, _ = corpus("bnb")
    packed = next(one for one in found.packed.values() if one.hints and len(one.shape) == 2)
    layer = QuantLinear.from_parts(packed.weight, packed.parts)  # without the state that says what the bytes are
    with pytest.raises(NotAvailableError, match="would not say|cannot be saved packed"):
        offload.save_model(nn.Sequential(layer), tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_the_official_reader_opens_what_is_saved(tmp_path: Path) -> None:
    official = pytest.importorskip("safetensors.torch")
    file, _ = quantized(ALL)
    model = empty()
    offload.load_model_data(model, file)
    offload.save_model(model, tmp_path / "x.safetensors")
    theirs = official.load_file(tmp_path / "x.safetensors")
    for name in ("blocks.0.weight", "blocks.0.weight_scale", "embed.weight"):
        assert theirs[name].dtype == file[name].dtype and torch.equal(bits(theirs[name]), bits(file[name]))


def test_markers_in_metadata_are_followed(tmp_path: Path) -> None:
    rotated = next(one for one in corpus("rotation")[0].packed.values())
    sd = {f"net.fc.{local}": tensor for local, tensor in rotated.parts.items()}
    ((_, group),) = rotated.weight.transforms
    layers = {"fc": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"net.fc": layers["fc"]}})}
    path = write(tmp_path / "x.safetensors", sd, metadata)
    model = nn.ModuleDict({"fc": nn.Linear(512, 6, bias=False, device="meta")})
    offload.load_model_data(model, path, modelPrefix="net")
    assert model["fc"].quant_weight.transforms == [("Hadamard", group)]
