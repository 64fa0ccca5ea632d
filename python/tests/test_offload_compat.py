"""Files as mmgp writes them: no padding before the data, base64 metadata, quanto's layout for quantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offload_files import empty, encoded, same, small, weights, write

from weightstream import offload
from weightstream.quant import QuantLinear

METADATA = {
    "config_base64": encoded({"_class_name": "Small", "z": 1}),
    "tied_weights_map_base64": encoded({"embed.weight": ["head.weight"]}),
}


@pytest.mark.parametrize("pad", range(8))
def test_a_model_loads_wherever_its_data_starts(tmp_path: Path, pad: int) -> None:
    path = write(tmp_path / "x.safetensors", weights(small()), METADATA, pad=pad)
    model = empty()
    offload.load_model_data(model, path, default_dtype=None)
    assert all(same(model.state_dict()[name], tensor) for name, tensor in small().state_dict().items())


def test_quantized_weights_come_raw_and_stay_packed_in_models(tmp_path: Path) -> None:
    sd = {}
    for name, tensor in weights(small()).items():
        if name.startswith("blocks.") and name.endswith(".weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            sd[f"{name}._data"] = (tensor / scale).round().to(torch.int8)
            sd[f"{name}._scale"] = scale
            for kind in ("input_scale", "output_scale"):
                sd[name.replace("weight", kind)] = torch.tensor(1.0)
        else:
            sd[name] = tensor
    kinds = {f"blocks.{number}": {"weights": "qint8", "activations": "none"} for number in range(3)}
    metadata = {**METADATA, "quantization_format": "quanto", "quantization_map_base64": encoded(kinds)}
    path = write(tmp_path / "q.safetensors", sd, metadata)
    loaded, quantization_map, tied_map = offload.load_sd(path)
    assert quantization_map == kinds and tied_map == {"embed.weight": ["head.weight"]}
    assert all(same(loaded[name], tensor) for name, tensor in sd.items())
    assert {name: weight.format for name, weight in loaded.quantized().items()} == {
        f"blocks.{number}.weight": "quanto qint8 with a scale a row" for number in range(3)
    }
    model = empty()
    offload.load_model_data(model, path, default_dtype=None)
    for number in range(3):
        layer = model.blocks[number]
        assert isinstance(layer, QuantLinear) and same(layer.quant_data.detach(), sd[f"blocks.{number}.weight._data"])
        numbers = sd[f"blocks.{number}.weight._data"].float() * sd[f"blocks.{number}.weight._scale"]
        assert torch.equal(layer.weight + 0, numbers)
